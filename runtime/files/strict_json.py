"""Parses one line of a JSON Lines file into one object, strictly.

The standard library's parser accepts more than JSON: NaN, Infinity, numbers that overflow,
duplicate keys (the last one counts), lone surrogates. All of these are refused here with a code and
the place, as are very long integers and deep nesting that no request needs.

Does not know what a request is. Guarantees: for any bytes, `parse_object` returns a dict that can
be written as JSON again, or raises `RowError`; `read_lines` holds at most one line in memory, and
no more of it than the limit.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NoReturn

from ..errors import RowError

MAX_LINE_BYTES = 64 * 2**20
MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 40
"""Longer integers are refused here; shorter ones reach the range check of their parameter."""

_BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


_FOREIGN = (
    (re.compile(r"\s*(//|/\*|#)"), "a comment", "Remove it, as JSON has none"),
    (re.compile(r"\s*\x1e"), "a record separator (RFC 7464)", r"Remove it, as tr -d '\036' does"),
    (re.compile(r"\s*\{\s*'"), "Python's quotes", "Write the object with json.dumps"),
)
"""The beginnings of lines in notations like JSON, their names, and the remedies."""

Unit = Literal["line", "row"]
"""The unit in which places are counted: the lines of a file, or the rows of a table."""


@dataclass(frozen=True)
class Line:
    """A line that is not blank, without its line ending; `content` is None for a too long line."""

    number: int
    """The line number from 1, blank lines included, as editors show it."""
    offset: int
    """Byte offset of the line in the file."""
    content: bytes | None
    unit: Unit = "line"

    @property
    def place(self) -> str:
        """The place of the line for people, such as `line 3`."""
        return f"{self.unit} {self.number}"


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        RowError: The content is not UTF-8 (`invalid_utf8`) or no JSON object (`invalid_json`).
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            "invalid_utf8", f"expected UTF-8, got {error.reason} at byte {error.start}."
        ) from None
    try:
        value = _DECODER.decode(text)
        # nesting is at most the number of opening brackets, so most lines need no traversal
        if content.count(b"[") + content.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            raise RecursionError
    except json.JSONDecodeError as error:
        raise _invalid(_syntax_problem(text, error)) from None
    except RecursionError:
        raise _invalid(f"expected at most {MAX_DEPTH} levels of nesting, got more") from None
    if not isinstance(value, dict):
        raise _invalid(f"expected a JSON object, got {_kind(value)}")
    # decoded UTF-8 has no surrogates, so a lone surrogate can only come from an escape
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            escape = f"\\u{ord(error.object[error.start]):04x}"
            raise _invalid(f"expected Unicode text, got the lone surrogate {escape}") from None
    return value


def dump_line(value: object, *, sort_keys: bool = False) -> bytes:
    """Write a value as one line of JSON, without any character that a reader takes as a line end.

    U+0085, U+2028 and U+2029 end a line for `str.splitlines`, so they are written as escapes.
    """
    text = json.dumps(
        value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=sort_keys
    )
    for character in "\x85\u2028\u2029":
        if character in text:
            text = text.replace(character, f"\\u{ord(character):04x}")
    # a lone surrogate becomes its own JSON escape
    return text.encode("utf-8", "backslashreplace")


def read_lines(
    file: BinaryIO,
    *,
    observe: Callable[[bytes], object] = len,
    unit: Unit = "line",
) -> Iterator[Line]:
    """Yield the lines of a file that are not blank; too long ones have the content None.

    A byte order mark at the start, CRLF line endings and a missing last newline are accepted.

    Args:
        file: The file, open at its beginning.
        observe: Called with every piece that is read, so that it sees every byte once, in order.
        unit: The unit of the line numbers; `row` for lines that were made of the rows of a table.
    """
    number = offset = 0
    while piece := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        start = offset
        offset += len(piece)
        observe(piece)
        content = piece
        if number == 1 and content.startswith(_BOM):
            content = content[len(_BOM) :]
        content = content.rstrip(b"\r\n")
        is_too_long = len(content) > MAX_LINE_BYTES
        while not piece.endswith(b"\n") and (piece := file.readline(MAX_LINE_BYTES)):
            is_too_long = is_too_long or bool(piece.rstrip(b"\r\n"))
            offset += len(piece)
            observe(piece)
        if is_too_long:
            yield Line(number, start, None, unit)
        elif content.strip():
            yield Line(number, start, content, unit)


def read_line_at(file: BinaryIO, offset: int) -> bytes:
    """Read the content of a line again, at an offset that `read_lines` yielded."""
    file.seek(offset)
    content = file.readline(MAX_LINE_BYTES + 2)
    if offset == 0 and content.startswith(_BOM):
        content = content[len(_BOM) :]
    return content.rstrip(b"\r\n")


def _invalid(message: str) -> RowError:
    return RowError("invalid_json", f"{message}.")


def _syntax_problem(text: str, error: json.JSONDecodeError) -> str:
    for pattern, got, remedy in _FOREIGN:
        if pattern.match(text):
            return f"expected a JSON object, got {got}. {remedy}"
    if error.msg == "Extra data" and text.lstrip().startswith("{"):
        if text[error.pos :].strip() == ",":
            return "expected a JSON object, got a comma after it. Remove the comma"
        problem = f"more after it at character {error.pos}"
        return f"expected one JSON object, got {problem}. Keep one, or write each on its own line"
    # some of the messages end in `at`
    problem = error.msg.removesuffix(" at")
    return f"expected a JSON object, got {problem} at character {error.pos}"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "an array")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _invalid(f"expected each key once, got {key[:100]!r} twice in one object")
            seen.add(key)
    return result


def _integer(literal: str) -> int:
    if len(literal) > MAX_INTEGER_DIGITS:
        raise _invalid(
            f"expected integers of at most {MAX_INTEGER_DIGITS} digits, got one of {len(literal)}"
        )
    return int(literal)


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise _invalid(f"expected finite numbers, got {literal[:40]}, which overflows")
    return value


def _refuse_constant(literal: str) -> NoReturn:
    raise _invalid(f"expected finite numbers, got {literal}, which is not JSON")


def _depth(value: object) -> int:
    """The number of containers inside each other, the value itself included."""
    if not isinstance(value, dict | list):
        return 0
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inside), default=0)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_int=_integer,
    parse_float=_finite,
    parse_constant=_refuse_constant,
)
