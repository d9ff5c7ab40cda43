"""The description of a model says what its tokenizer does with chat requests."""

import json

import pytest
from model_on_disk import write_model

from noria.runtime.checkpoint import open_model
from noria.runtime.checkpoint.description import describe, has_chat_template
from noria.runtime.text.tokenizer_directory import read_directory

TEMPLATE = "{{ messages[0].content }}"
DEFAULT, OTHER = ({"name": name, "template": TEMPLATE} for name in ("default", "tool_use"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", TEMPLATE, True),
        ("tokenizer_config.json", json.dumps({"chat_template": TEMPLATE}), True),
        ("tokenizer_config.json", json.dumps({"chat_template": [OTHER, DEFAULT]}), True),
        ("tokenizer_config.json", json.dumps({"chat_template": [OTHER]}), False),
        # the template of a processor, which text models do not have
        ("chat_template.json", json.dumps({"chat_template": TEMPLATE}), False),
    ],
)
def test_a_model_has_a_chat_template_if_its_tokenizer_reads_one(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    assert has_chat_template(tmp_path) is expected
    assert ("default" in read_directory(tmp_path).chat_templates) is expected


def test_a_template_that_cannot_be_read_is_described_so(tmp_path):
    folder = tmp_path / "model"
    write_model(folder, tokenizer=False)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with open_model(str(folder)) as files:
        assert "chat template    cannot be read: " in describe(files)
