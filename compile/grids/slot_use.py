"""The slots and lengths that the rows of a job need. Knows nothing of models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .bucket_grid import BucketGrid
from .row_shape import RowShape

NO_LIMIT = -1


@dataclass(frozen=True)
class SlotUse:
    """Slots and lengths that the rows of a job need, as arrays over the rows R that generate."""

    prompt_R: np.ndarray
    max_tokens_R: np.ndarray
    """Maximum number of output tokens; `NO_LIMIT` means up to the grid's `max_length`."""
    count_R: np.ndarray
    """Number of sequences; each one takes a slot."""
    output_R: np.ndarray | None = None
    """Expected number of output tokens; None means the maximum."""

    @classmethod
    def of_rows(cls, rows: Sequence[RowShape], *, has_chunks: bool) -> "SlotUse":
        """Slots that the rows need, if each row emits its maximum output."""
        return cls(
            np.array([row.prompt_length for row in rows], int),
            np.array([NO_LIMIT if row.max_tokens is None else row.max_tokens for row in rows], int),
            np.array([row.num_slots(has_chunks=has_chunks) for row in rows], int),
        )

    @property
    def num_sequences(self) -> int:
        return int(self.count_R.sum())

    def limits(self, grid: BucketGrid) -> np.ndarray:
        """Maximum total length of each row's sequences."""
        return np.where(
            self.max_tokens_R == NO_LIMIT, grid.max_length, self.prompt_R + self.max_tokens_R
        )
