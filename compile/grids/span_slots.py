"""How many of a grid's slots should reach each span, for rows whose lengths are known.

Slots that end early need no cache beyond, and decode reads none there, so a grid of ragged slots
reads and keeps less, or has more slots in the same memory. Long rows may have to wait for one of
the long slots, so these are as many as long rows keep busy, and a few more. In a job of many more
rows than slots there is another way to read little: slots that are all alike and take the longest
rows first, so that all are of like length at any time. It needs memory for all to be long. Knows
nothing of models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...modelzoo import axes
from ...sharding.layout import Layout
from .bucket_grid import BucketGrid

SPARE = 1.125
"""Long slots over those that long rows keep busy on average, so that these do not end last."""
WORTHWHILE = 0.9
"""The share of the cache to which ragged slots must bring it."""
NO_LIMIT = -1


@dataclass(frozen=True)
class SlotUse:
    """What the rows of a job need of slots, as arrays over rows R that generate."""

    prompt_R: np.ndarray
    most_R: np.ndarray
    """Tokens that may follow; `NO_LIMIT` up to the longest row of the grid."""
    count_R: np.ndarray
    """Sequences, each of which takes a slot."""
    output_R: np.ndarray | None = None
    """Tokens that are expected to follow; None: as many as may."""

    @property
    def num_sequences(self) -> int:
        return int(self.count_R.sum())

    def limits(self, grid: BucketGrid) -> np.ndarray:
        """Length at which each row's sequences end at the latest."""
        return np.where(self.most_R == NO_LIMIT, grid.max_length, self.prompt_R + self.most_R)


def with_ragged_slots(grid: BucketGrid, use: SlotUse, layout: Layout | None = None) -> BucketGrid:
    """A grid whose slots reach as far as rows need, where few are long; else the same.

    Where every sequence has a slot of its own, each has one that is long enough.
    """
    groups = 1
    if layout is not None:
        groups = layout.mesh.num_shards(layout.phase("decode")[axes.ATTENTION_BATCH])
    if grid.span_slots is not None:
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
    if not _is_worthwhile(counts, spans):
        return grid
    return replace(grid, span_slots=tuple(counts), slot_groups=groups)


def _is_worthwhile(counts: Sequence[int], spans: Sequence[int]) -> bool:
    kept = np.diff([0, *spans]) @ np.array(counts)
    return bool(kept <= WORTHWHILE * counts[0] * spans[-1])
