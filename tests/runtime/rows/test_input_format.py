"""Files of other formats than JSON Lines are refused by name; bad lines are rows with errors."""

import bz2
import gzip
import json
import lzma
import zipfile

import pytest
from fake_model import FakeModel, run
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from noria.runtime.errors import InputError
from noria.runtime.rows import input_format

ROWS = [{"id": f"q{i}", "prompt": f"prompt {i}, with a comma"} for i in range(5)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
TABLE = b"id,prompt\n" + b"".join(b'"q%d","hello, you"\n' % i for i in range(5))


def other_format(path):
    with path.open("rb") as file:
        return input_format.other_format(path, file)


def zipped(folder):
    with zipfile.ZipFile(folder / "in", "w") as file:
        file.writestr("in.jsonl", LINES)
    return (folder / "in").read_bytes()


FORMATS = {
    "gzip. Give it a name that ends in .gz": gzip.compress(LINES),
    "xz. Run unxz": lzma.compress(LINES),
    "bzip2. Run bunzip2": bz2.compress(LINES),
    "Zstandard. Give it a name that ends in .zst": b"\x28\xb5\x2f\xfd" + LINES,
    "a zip file. Run unzip": zipped,
    "LZ4. Run unlz4": b"\x04\x22\x4d\x18" + LINES,
    "Parquet. Give it a name that ends in .parquet": b"PAR1\x15\x04" + LINES,
    "an Arrow file. Convert it": b"ARROW1\0\0" + LINES,
    "UTF-16. Run iconv": LINES.decode().encode("utf-16"),
    "CSV. Give it a name that ends in .csv": TABLE,
    "a JSON array. Write one line for each of its items: jq -c '.\\[\\]'": json.dumps(
        ROWS
    ).encode(),
    "an object over several lines. Write one line for each: jq -c . ": b"\xef\xbb\xbf"
    + b"\n".join(json.dumps(row, indent=2).encode() for row in ROWS),
}
SPELLINGS = {
    "a JSON array": [
        json.dumps(ROWS, indent=1).encode(),
        b"\n [\n" + LINES.strip().replace(b"\n", b",\n") + b"\n]\n",
        b"[" + LINES.strip().replace(b"\n", b"\n,") + b"]",
        b"[\n" + LINES.splitlines()[0] + b"\n]",
        b"[]",
    ],
    "CSV": [
        TABLE.replace(b",", b"\t"),
        b'id;prompt\r\n1;"a\nline\nmore"\r\n',
        b'prompt,id\n"{""a"": 1}",2\n',
    ],
}


@pytest.mark.parametrize("message", FORMATS)
def test_another_format_is_refused_by_name_with_what_to_do(tmp_path, message):
    content = FORMATS[message]
    path = tmp_path / "in"
    path.write_bytes(content(tmp_path) if callable(content) else content)
    with pytest.raises(InputError, match=f"in: expected plain JSON Lines, got {message}"):
        run(path, tmp_path / "out.jsonl")
    assert [found.name for found in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("name", "index"), [(n, i) for n, all_ in SPELLINGS.items() for i in range(len(all_))]
)
def test_a_format_has_several_spellings(tmp_path, name, index):
    path = tmp_path / "in"
    path.write_bytes(SPELLINGS[name][index])
    found = other_format(path)
    assert found is not None and found[0] == name


@pytest.mark.parametrize("content", [json.dumps(ROWS), json.dumps(ROWS, indent=1)])
def test_an_array_is_known_though_only_its_beginning_is_read(tmp_path, monkeypatch, content):
    monkeypatch.setattr(input_format, "HEAD_BYTES", 100)
    (tmp_path / "in").write_text(content)
    found = other_format(tmp_path / "in")
    assert found is not None and found[0] == "a JSON array"


def test_a_column_of_prompts_is_a_table_by_its_name(tmp_path):
    for name, is_table in (("in.csv", True), ("in.jsonl", False)):
        (tmp_path / name).write_text("prompt\nhello\n")
        assert (other_format(tmp_path / name) is not None) == is_table


BAD_LINES = [
    "[", "[]", "[1, 2]", "]", "{", "}", '{"a":', '[{"a": 1},', '[{"a": 1}', ",", "id,prompt",
    "BZh91AY", "PAR1", "hello, you", "1", "null", '"text"', '{"prompt": 1, }', "\x00",
]  # fmt: skip


@given(
    before=st.lists(st.sampled_from(BAD_LINES), max_size=3),
    after=st.lists(st.sampled_from(BAD_LINES), max_size=3),
    blank=st.sampled_from(["", "\n", "\r\n \n", "\ufeff"]),
)
@examples(max_examples=200, deadline=None)
def test_lines_of_which_one_can_be_run_are_not_refused(tmp_path_factory, before, after, blank):
    path = tmp_path_factory.getbasetemp() / "in.csv"
    text = "\n".join([*before, '{"id": "good", "prompt": "hello"}', *after])
    path.write_text(blank + text)
    found = other_format(path)
    if found is not None:
        # all lines together are one array or object
        json.JSONDecoder().raw_decode(text.strip())
        assert found[0] in ("a JSON array", "an object over several lines")


def test_a_first_line_that_is_bad_costs_no_other_row(tmp_path):
    for line in BAD_LINES:
        path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        path.write_text(f"{line}\n" + LINES.decode())
        model = FakeModel()
        assert run(path, output, model, restart=True) == 1
        assert len(model.generator.submitted) == 5, line
