"""Messages for people on a stream whose reader may be gone: a closed terminal or pipe.

Messages contain texts of others: names of files, keys of configurations, templates, rows. `tell`
shows their control characters instead of sending them to the terminal.

Knows nothing of the messages. Guarantees: a missing reader is no error, now or when Python ends; no
message moves the cursor, colours, renames or reorders anything.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO


def tell(stream: TextIO, message: object) -> None:
    """Write a message with a line ending."""
    say(stream, f"{printable(str(message))}\n")


def note(options: argparse.Namespace, message: object) -> None:
    """Write a line of progress to stderr, unless a command was asked to be quiet."""
    if not options.quiet:
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
    """A table as lines: the first columns start at the left, the others end at the right.

    With `has_rule` a line is drawn below the first row.
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
    """Write and flush a text; return False if the stream has no reader any more."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _discard(stream)
        return False
    return True


def _discard(stream: TextIO) -> None:
    """Redirect the stream to the null device: its buffered text would fail again when Python
    ends."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def plural(number: int, noun: str) -> str:
    """A number with its noun: `1 row`, `2 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
