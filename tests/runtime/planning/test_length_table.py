"""Tables of lengths: files of spreadsheets are read, and others are refused with the line."""

import pytest

from noria.runtime.errors import ConfigError
from noria.runtime.planning.length_table import read_table

HEAD = b"prompt_tokens,output_tokens\n"


def rows_of(path):
    return [(row.need.prompt_length, row.output, row.need.max_tokens) for row in read_table(path)]


@pytest.mark.parametrize(
    "content",
    [
        "prompt_tokens,output_tokens\n5,3\n7,0\n",
        "prompt_tokens,output_tokens\r\n5,3\r\n7,0\r\n",
        "\ufeffprompt_tokens,output_tokens\n5,3\n7,0\n",
        "output_tokens, prompt_tokens\n\n 3, 5\n0,7\n\n",
        "prompt_tokens,output_tokens,max_tokens\n5,3,\n7,0,0\n",
        '"prompt_tokens","output_tokens"\n"5","3"\n"7","0"',
    ],
)
def test_what_spreadsheets_write_is_read(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_bytes(content.encode())
    assert rows_of(path) == [(5, 3, 3), (7, 0, 0)]


def test_rows_may_emit_more_than_they_are_expected_to(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt_tokens,output_tokens,max_tokens\n5,3,9\n")
    assert rows_of(path) == [(5, 3, 9)]


def test_a_line_may_stand_for_several_rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt_tokens,output_tokens,rows\n5,3,2\n7,1,\n")
    assert rows_of(path) == [(5, 3, 3), (5, 3, 3), (7, 1, 1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt_tokens,output_tokens,rows\n5,3,0\n", "line 2: expected 1 to 10000000 for rows"),
        (b"prompt_tokens,output_tokens,rows\n5,3,10000001\n", "got 10000001"),
        (b"", "line 1: expected the columns .* got none"),
        (b"prompt_tokens\n5\n", "line 1: expected the columns"),
        (b"prompt_tokens;output_tokens\n5;3\n", "line 1: .* separated by commas"),
        (b"prompt_tokens,output_tokens,output_tokens\n5,3,4\n", "line 1: expected the columns"),
        (b"5,3\n", "line 1: expected the columns"),
        (HEAD + b"5,3\n5\n", r"line 3: expected 2 values .*, got 1\."),
        (HEAD + b"5,3,4\n", r"line 2: expected 2 values .*, got 3\."),
        (
            HEAD + b"5.0,3\n",
            r"line 2: expected a whole number .* prompt_tokens, got '5\.0'",
        ),
        (HEAD + b"5,-3\n", "output_tokens, got '-3'"),
        (HEAD + b"1_000,3\n", "got '1_000'"),
        (HEAD + "٣,3\n".encode(), "got '٣'"),
        (HEAD + b"5,\n", "output_tokens, got ''"),
        (HEAD + b"9" * 5000 + b",3\n", r"got '9{100,119} \.\.\.\."),
        (HEAD + b'"' + b"9" * 200_000 + b'",3\n', "line 2: expected values.*field larger"),
        (HEAD + b"0,3\n", "line 2: expected at least one prompt token"),
        (HEAD + b"5,3\n\xff\n", "expected CSV in UTF-8"),
        ("prompt_tokens".encode("utf-16"), "expected CSV in UTF-8"),
    ],
)
def test_anything_else_is_refused_by_its_line(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path}.*{message}"):
        rows_of(path)
