"""Text from files and users reaches the terminal only as printable characters."""

import json

import pytest
from model_on_disk import write_model

from noria.runtime import cli
from noria.runtime.console import printable

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202ereversed\u2066\r\x00"
TEMPLATE = "{{ raise_exception('" + ESCAPES + "') }}"


def shows(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / f"model{ESCAPES[:-1]}"
    write_model(folder)
    for name, change in (
        ("config.json", {f"key{ESCAPES}": "x"}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | change))
    return folder


def test_a_text_that_shows_stays_as_it_is_and_other_characters_are_escaped():
    assert printable("a\n\tb 日本語 é") == "a\n\tb 日本語 é"
    assert printable("\x1b[2J\x9b\u202e\r") == r"\x1b[2J\x9b\u202e\r"


def test_escapes_of_templates_keys_names_and_rows_are_shown_and_rows_are_kept(
    model, tmp_path, capfd
):
    source, output = tmp_path / f"in{ESCAPES[:-1]}.jsonl", tmp_path / f"out{ESCAPES[:-1]}.jsonl"
    message = {"role": "user", "content": "hello"}
    source.write_text(json.dumps({"id": f"row{ESCAPES}", "messages": [message]}))
    arguments = ["batch", "-i", str(source), "-o", str(output), "--model", str(model)]
    assert cli.main(arguments) == 1
    shown = capfd.readouterr().err
    assert shows(shown) and shown.count(r"\x1b[2J\x1b]0;owned\x07\x9b31m\u202ereversed") >= 3
    (line,) = output.read_text().splitlines()
    row = json.loads(line)
    assert row["custom_id"] == f"row{ESCAPES}"
    # jinja2 reads a carriage return of a template as a line ending
    assert ESCAPES.replace("\r", "\n") in row["response"]["body"]["error"]["message"]
    assert cli.main([*arguments, "--on-error", "raise", "--restart"]) == 1
    assert shows(capfd.readouterr().err)


def test_escapes_are_shown_by_reports_and_errors_too(model, tmp_path, capfd):
    assert cli.main(["inspect", str(model)]) == 0
    assert cli.main(["inspect", str(tmp_path / f"none{ESCAPES[:-1]}")]) == 3
    assert cli.main(["--debug", "inspect", str(tmp_path / f"none{ESCAPES[:-1]}")]) == 3
    with pytest.raises(SystemExit, match="2"):
        cli.main(["inspect", "a", ESCAPES])
    shown = capfd.readouterr()
    assert shows(shown.out) and shows(shown.err)
