"""Which rows of the input one independent replica answers.

Part i of n holds the rows whose index, counted from zero over the lines that are not blank, leaves
i when divided by n. So parts are of like size and like lengths even where the input is sorted by
length, and line k of a part's output is row i + k*n: merging needs neither the input nor an index.

Knows nothing of files or of what a row says. Guarantees: every row is in exactly one of the n
parts; the whole job is part 0 of 1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, order=True)
class Part:
    """Part `index` of `of` parts, counted from zero; as text `part 0 of 3`."""

    index: int
    of: int

    def __post_init__(self):
        if not 0 <= self.index < self.of:
            raise ValueError(_expected(f"{self.index}/{self.of}"))

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Read what a person writes: `0/3`."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if found is None:
            raise ValueError(_expected(text))
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def from_manifest(cls, text: str) -> "Part":
        """Read what `str` writes."""
        return cls.parse(text.removeprefix("part ").replace(" of ", "/"))

    def __str__(self) -> str:
        return f"part {self.index} of {self.of}"

    def take(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of this part, in their order, out of all rows of the input."""
        return rows[self.index :: self.of]

    def has(self, row: int) -> bool:
        """Whether a row of the input, counted from zero, belongs to this part."""
        return row % self.of == self.index

    def count(self, num_rows: int) -> int:
        """How many of the input's rows are this part's."""
        return len(range(self.index, num_rows, self.of))


WHOLE = Part(0, 1)


def _expected(got: str) -> str:
    return (
        f"rows: expected i/n with 0 <= i < n, got {got!r}. Write 0/4, 1/4, 2/4 and 3/4 for four "
        "hosts."
    )
