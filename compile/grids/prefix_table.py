"""The beginnings that the prompts of a job share, as one number for each row.

Rows are in an order in which equal beginnings are neighbours. So the tokens that any two rows share
are the minimum of the numbers between them, and a table needs eight bytes for each row.

Knows nothing of token ids, grids or graphs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PrefixTable:
    """Rows ordered by their prompts, and the tokens that neighbours share."""

    rows: np.ndarray
    """Row numbers, as int32."""
    shared: np.ndarray
    """The first tokens that each row shares with the row before it, as int32; 0 for the first row.
    Shorter than the truth by less than the unit in which the search compares prompts."""

    @classmethod
    def empty(cls) -> "PrefixTable":
        """The table of a job in which nothing is shared."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int32))

    @property
    def shares(self) -> bool:
        """Whether any two rows share a beginning."""
        return bool(self.shared.any())

    def of_rows(self, rows: Iterable[int]) -> "PrefixTable":
        """The table of some of the rows, with each row's index in `rows` as its new number."""
        index_of = {row: index for index, row in enumerate(rows)}
        new = np.array([index_of.get(row, -1) for row in self.rows.tolist()], np.int32)
        kept = np.flatnonzero(new >= 0)
        if not len(kept):
            return PrefixTable.empty()
        # a row shares with the last kept row what all rows between them share
        shared = np.minimum.reduceat(self.shared[: kept[-1] + 1], np.r_[0, kept[:-1] + 1])
        shared[0] = 0
        return PrefixTable(new[kept], shared)
