"""The beginnings that the prompts of a job share, as one length for each row.

Rows are in an order in which equal beginnings are neighbours. So the tokens that any two rows share
are the minimum of the numbers between them. A table of all rows needs eight bytes for each row, or
sixteen with hashes.

Knows nothing of token ids, grids or graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class PrefixTable:
    """Rows ordered by their prompts, and the tokens that neighbours share."""

    rows: np.ndarray
    """Row numbers, as int32."""
    shared: np.ndarray
    """The number of tokens at the start that each row shares with the row before it, as int32; 0
    for the first row. It may be too small, by less than the unit in which the search compares
    prompts."""
    hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """The hash of these tokens for each row, as plans have it (`prefix_grid`), as uint64; 0
    where nothing is shared. A table without hashes shows no prefixes that a plan can list."""
    whole: "PrefixTable | None" = None
    """The table from which these rows were taken, which shows where their prefixes end; None for a
    table of all rows."""
    taken: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """The number in `whole` of each row."""

    @property
    def shares(self) -> bool:
        """Whether any two rows share a beginning."""
        return bool(self.shared.any())

    def of_rows(self, rows: Sequence[int]) -> "PrefixTable":
        """The table of some rows, with each row's index in `rows` as its new number."""
        if not len(rows) or not len(self.rows):
            return NOTHING_SHARED
        index_of = np.full(max(max(rows), int(self.rows.max())) + 1, -1, np.int32)
        index_of[rows] = np.arange(len(rows))
        new = index_of[self.rows]
        kept = np.flatnonzero(new >= 0)
        if not len(kept):
            return NOTHING_SHARED
        # a row shares with the last kept row what all rows between them share
        last = kept[-1] + 1
        by_place = (self.shared[:last].astype(np.int64) << 32) | np.arange(last)
        place = np.minimum.reduceat(by_place, np.r_[0, kept[:-1] + 1]) & 0xFFFFFFFF
        shared, hashes = self.shared[place], self.hashes[place] if len(self.hashes) else self.hashes
        shared[0] = 0
        taken = np.asarray(rows, np.int64)
        if self.whole is not None:
            taken = self.taken[taken]
        return PrefixTable(new[kept], shared, hashes, self.whole or self, taken)

    def hex_hashes(self) -> list[str]:
        """The hashes as hexadecimal digits; empty strings without hashes."""
        digits = self.hashes.tobytes().hex()
        size = 2 * self.hashes.itemsize
        return [digits[i : i + size] for i in range(0, len(digits), size)] or [""] * len(self.rows)

    def shared_pieces(self, prompt_lengths: np.ndarray, chunks: Sequence[int]) -> np.ndarray:
        """The largest number of tokens that each row can share with the row before it, in whole
        pieces.

        A prompt is cut into pieces of the largest chunk, then its rest into pieces of the next one,
        and so on. The last piece of a prompt is never shared. With several chunks, a row may share
        less, as prompts of other lengths are cut elsewhere.

        Args:
          prompt_lengths: The length of each row's prompt.
          chunks: The sizes of pieces, in growing order.
        """
        result = np.zeros(len(prompt_lengths), np.int64)
        lengths = prompt_lengths[self.rows]
        shared = np.minimum(self.shared, lengths - 1)
        whole, is_complete = np.zeros_like(lengths), np.zeros(len(lengths), bool)
        for chunk in reversed(chunks):
            end = lengths // chunk * chunk
            whole = np.where(is_complete, whole, np.minimum(shared // chunk * chunk, end))
            # smaller pieces come only after the last piece of this size
            is_complete |= shared < end
        result[self.rows] = whole
        return result


NOTHING_SHARED = PrefixTable(np.zeros(0, np.int32), np.zeros(0, np.int32))
"""The table of a job in which nothing is shared."""
