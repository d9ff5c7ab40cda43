"""Recognises inputs in other formats than JSON Lines by their bytes, and says how to convert them.

Does not know about rows. Guarantees: a file whose first line begins like an object is not refused,
unless that object ends on a later line; a file is not taken for CSV if one of its first lines
begins like an object or an array.
"""

import csv
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

HEAD_BYTES = 2**20
"""The number of bytes that are read to recognise a format."""
_PACKED = "Run {tool} on it first."
_TABLE = "Convert it: pandas.read_feather(...).to_parquet(...)."
_NAMED = "Give it a name that ends in {suffix}; standard input must be plain lines."
_SIGNATURES = (
    (b"\x1f\x8b", "gzip", _NAMED.format(suffix=".gz")),
    (b"\xfd7zXZ\0", "xz", _PACKED.format(tool="unxz")),
    (b"\x28\xb5\x2f\xfd", "Zstandard", _NAMED.format(suffix=".zst")),
    (b"PK\x03\x04", "a zip file", _PACKED.format(tool="unzip")),
    (b"\x04\x22\x4d\x18", "LZ4", _PACKED.format(tool="unlz4")),
    (b"PAR1\x15", "Parquet", _NAMED.format(suffix=".parquet")),
    (b"ARROW1\0\0", "an Arrow file", _TABLE),
    (b"\xff\xfe", "UTF-16", "Run iconv -f UTF-16 -t UTF-8 on it first."),
    (b"\xfe\xff", "UTF-16", "Run iconv -f UTF-16 -t UTF-8 on it first."),
)


def other_format(path: Path, file: BinaryIO) -> tuple[str, str] | None:
    """The format of content that is not JSON Lines, and the remedy; None for JSON Lines.

    Args:
        path: The file's path, for its suffix and the remedy.
        file: The content, open at its beginning.
    """
    head = file.read(HEAD_BYTES)
    is_whole = len(head) < HEAD_BYTES
    file.seek(-min(len(head), 4096), 2)
    tail = file.read()
    for start, name, remedy in _SIGNATURES:
        if head.startswith(start):
            return name, remedy
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":  # with a digit in between
        return "bzip2", _PACKED.format(tool="bunzip2")
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    ends_as_array = tail.rstrip().endswith(b"]")
    if text.startswith("[") and _is_array(text, is_whole=is_whole, ends_as_array=ends_as_array):
        return "a JSON array", f"Write one line for each of its items: jq -c '.[]' {path}"
    if text.startswith("{") and "\n" in text[: _first_value(text)[1] or 0]:
        return "an object over several lines", f"Write one line for each: jq -c . {path}"
    lines = text.splitlines() if is_whole else text.splitlines()[:-1]
    if _is_table(lines, is_named_so=path.suffix.lower() in (".csv", ".tsv")):
        return "CSV", _NAMED.format(suffix=".csv")
    return None


def _is_array(text: str, *, is_whole: bool, ends_as_array: bool) -> bool:
    """Whether a text that begins with a bracket is one array, and not lines with a bad first
    line."""
    if (end := _first_value(text)[1]) is not None:
        return "\n" in text[:end] or (is_whole and not text[end:].strip())
    if is_whole or not ends_as_array:
        return False
    inside = text[1:].lstrip()
    item, end = _first_value(inside)
    return isinstance(item, dict) and inside[end:].lstrip().startswith(",")


def _first_value(text: str) -> tuple[Any, int | None]:
    """The value in JSON with which a text begins, and its end; None for both without one."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, None


def _is_table(lines: Sequence[str], *, is_named_so: bool) -> bool:
    """Whether no line begins like JSON, and the first two lines have the same number of cells."""
    if not lines or any(line.lstrip().startswith(("{", "[")) for line in lines):
        return False
    return is_named_so or any(_has_columns(lines, delimiter) for delimiter in ",;\t")


def _has_columns(lines: Sequence[str], delimiter: str) -> bool:
    try:
        rows = list(islice(csv.reader(lines, delimiter=delimiter), 2))
    except csv.Error:
        return False
    return len(rows) == 2 and len(rows[0]) == len(rows[1]) > 1
