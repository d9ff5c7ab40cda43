"""The rows of the input that one independent replica answers.

Part i of n has the rows whose index, counted from zero over the lines that are not blank, is i
modulo n. So parts have similar sizes and lengths even if the input is sorted by length, and line k
of a part's output is row i + k*n: merging needs neither the input nor an index.

Does not know about files or the content of rows. Guarantees: every row is in exactly one of the n
parts; the whole job is part 0 of 1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import UserError

Row = TypeVar("Row")


@dataclass(frozen=True, order=True)
class Part:
    """Part `index` of `num_parts` parts, counted from zero; as text `part 0 of 3`."""

    index: int
    num_parts: int

    def __post_init__(self):
        if not 0 <= self.index < self.num_parts:
            raise UserError(_expected(f"{self.index}/{self.num_parts}"))

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Read the value of `--rows`, such as `0/3`.

        Raises:
            ValueError: The text is not i/n with 0 <= i < n.
        """
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if match is None:
            raise UserError(_expected(text))
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def from_manifest(cls, text: str) -> "Part":
        """Read a part from its text in a manifest, which `str` made."""
        return cls.parse(text.removeprefix("part ").replace(" of ", "/"))

    @property
    def option(self) -> str:
        """The value of `--rows` for this part, which `parse` reads."""
        return f"{self.index}/{self.num_parts}"

    def __str__(self) -> str:
        return f"part {self.index} of {self.num_parts}"

    def take(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows of this part in order, from all rows of the input."""
        return rows[self.index :: self.num_parts]

    def has(self, row: int) -> bool:
        """Whether a row of the input, counted from zero, belongs to this part."""
        return row % self.num_parts == self.index

    def count(self, num_rows: int) -> int:
        """The number of rows of this part in an input of `num_rows` rows."""
        return len(range(self.index, num_rows, self.num_parts))


WHOLE = Part(0, 1)


def _expected(got: str) -> str:
    return (
        f"rows: expected i/n with 0 <= i < n, got {got!r}. Write 0/4, 1/4, 2/4 and 3/4 for four "
        "hosts."
    )
