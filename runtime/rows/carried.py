"""Adds the carried columns of a table to output lines, under the key `carried`.

Carried cells are no part of requests: they are kept in a file of their own, one line for each row,
and change no answer. Does not know about tables. Guarantees: an output line has the cells of its
own row, whichever run or part answered it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, BinaryIO

from .part import Part

CARRIED = "carried"
"""The key of the carried cells in output lines."""


@dataclass(frozen=True)
class CarriedCells:
    """The carried cells of all rows of an input, as lines of JSON in the order of the rows."""

    file: BinaryIO | None = None
    """The lines; None if nothing is carried."""

    def of(self, part: Part) -> Iterator[bytes]:
        """The cells of each row of a part, in order; empty if nothing is carried."""
        if self.file is None:
            return repeat(b"")
        self.file.seek(0)
        return islice(self.file, part.index, None, part.num_parts)


def with_carried(line: bytes, cells: bytes) -> bytes:
    """An output line with the carried cells of its row, if there are any."""
    return line[:-1] + b',"%s":%s}' % (CARRIED.encode(), cells.rstrip()) if cells else line


def carried_in(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The carried cells of an output line by name."""
    return record.get(CARRIED, {})
