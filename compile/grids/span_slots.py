"""The number of slots that hold rows up to each span, for rows of known lengths.

Short slots need less cache, and decode reads less of them. So a grid with slots of several lengths
(ragged slots) reads and keeps less, or has more slots in the same memory. Long rows may have to
wait for a long slot, so there are as many long slots as long rows keep busy, and a few more. A job
with many more rows than slots can read little in another way: all slots have the same length and
take the longest rows first, so that rows of similar length run at the same time. This needs memory
for long rows in all slots. Knows nothing of models.
"""

from dataclasses import dataclass, replace

import numpy as np

from ...modelzoo import axes
from ...sharding.layout import Layout
from .bucket_grid import BucketGrid

SPARE = 1.125
"""Ratio of long slots to the number that long rows keep busy on average, so that long rows do not
end last."""
WORTHWHILE = 0.9
"""Ragged slots are worthwhile if they need at most this share of the cache of equal slots."""
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

    @property
    def num_sequences(self) -> int:
        return int(self.count_R.sum())

    def limits(self, grid: BucketGrid) -> np.ndarray:
        """Maximum total length of each row's sequences."""
        return np.where(
            self.max_tokens_R == NO_LIMIT, grid.max_length, self.prompt_R + self.max_tokens_R
        )


def with_ragged_slots(grid: BucketGrid, use: SlotUse, layout: Layout | None = None) -> BucketGrid:
    """A grid with slots of several lengths if only few rows are long, else the same grid.

    If every sequence has a slot of its own, each slot is long enough for its sequence.
    """
    groups = 1
    if layout is not None:
        groups = layout.mesh.num_shards(layout.phase("decode")[axes.ATTENTION_BATCH])
    if grid.span_slots is not None or grid.pages is not None:
        return grid
    limit_R = use.limits(grid)
    steps_R = use.count_R * (limit_R - use.prompt_R if use.output_R is None else use.output_R)
    if not steps_R.sum():
        return grid
    slots, spans = grid.decode_slots, grid.decode_spans
    counts = [slots]
    for start in spans[:-1]:
        is_longer_R = limit_R > start
        rows = int(use.count_R[is_longer_R].sum())
        busy = SPARE * slots * steps_R[is_longer_R].sum() / steps_R.sum()
        needed = rows if use.num_sequences <= slots else min(rows, int(np.ceil(busy)))
        counts.append(min(-(-max(1, needed) // groups) * groups, counts[-1]))
    kept_entries = np.diff([0, *spans]) @ np.array(counts)
    if kept_entries > WORTHWHILE * counts[0] * spans[-1]:
        return grid
    return replace(grid, span_slots=tuple(counts), slot_groups=groups)
