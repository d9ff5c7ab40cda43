"""Writes messages for people to a stream whose reader may be gone: a closed terminal or pipe.

Messages contain text from files: file names, configuration keys, templates, rows. `tell` escapes
the control characters in it.

Does not know what messages mean. Guarantees: a missing reader is no error, neither now nor when
Python ends; no message controls the terminal.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

GIGABYTE = 1e9
"""The unit of memory in messages, in bytes."""
MAX_LISTED = 20


def tell(stream: TextIO, message: object) -> None:
    """Write a message and a line ending, with control characters escaped."""
    say(stream, f"{printable(str(message))}\n")


def note(message: object, *, is_quiet: bool) -> None:
    """Write a line of progress to stderr, unless the user wants no progress."""
    if not is_quiet:
        tell(sys.stderr, message)


def printable(text: str) -> str:
    """The text with unprintable characters escaped as in `repr`, except line endings and tabs."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def align_columns(
    rows: Sequence[Sequence[str]], num_left: int = 1, *, has_rule: bool = False
) -> list[str]:
    """Format a table as lines.

    Args:
        rows: The cells of all rows, equally many in each.
        num_left: The number of first columns to align left; the others are aligned right.
        has_rule: Whether to draw a line below the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if has_rule:
        rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return [
        "  ".join(
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def say(stream: TextIO, text: str) -> bool:
    """Write and flush a text; return False if the stream no longer has a reader."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _discard(stream)
        return False
    return True


def _discard(stream: TextIO) -> None:
    """Redirect the stream to the null device, as its buffered text would fail again when Python
    ends."""
    with suppress(OSError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)


def listed(items: Sequence[str], indent: str) -> str:
    """Items in lines of their own; of more than `MAX_LISTED`, the number of the others."""
    num_more = len(items) - MAX_LISTED
    shown = [*items[:MAX_LISTED], *([f"and {num_more} more"] if num_more > 0 else [])]
    return "".join(f"\n{indent}{item}" for item in shown)


def plural(number: int, noun: str) -> str:
    """A number with its noun: `1 row`, `2 rows`, `2 prefixes`."""
    ending = "" if number == 1 else "es" if noun[-1] in "sx" else "s"
    return f"{number} {noun}{ending}"
