"""How many of a grid's slots should reach each span, for rows whose lengths are known.

Slots that end early need no cache beyond, and decode reads none there, so a grid of ragged slots
reads and keeps less, or has more slots in the same memory. Long rows may have to wait for one of
the long slots, so these are as many as long rows keep busy, and a few more. Knows nothing of
models.
"""

from collections.abc import Sequence

import numpy as np

SPARE = 1.125
"""Long slots over those that long rows keep busy on average, so that these do not end last."""
WORTHWHILE = 0.9
"""The share of the cache to which ragged slots must bring it."""


def span_slots(
    slots: int,
    spans: Sequence[int],
    limits: Sequence[int] | np.ndarray,
    lives: Sequence[int] | np.ndarray,
    multiple: int = 1,
) -> tuple[int, ...] | None:
    """Slots that reach each span, in multiples; None where that would not save enough.

    `limits` are the lengths at which sequences end at the latest, `lives` the decode steps that
    they take. Where every sequence has a slot of its own, each has one that is long enough.
    """
    limit_R, live_R = np.asarray(limits), np.asarray(lives, float)
    if not live_R.sum():
        return None
    counts = [slots]
    for start in spans[:-1]:
        is_longer_R = limit_R > start
        busy = SPARE * slots * live_R[is_longer_R].sum() / live_R.sum()
        count = int(is_longer_R.sum())
        needed = count if len(limit_R) <= slots else min(count, int(np.ceil(busy)))
        whole = -(-max(1, needed) // multiple) * multiple
        counts.append(min(whole, counts[-1]))
    lengths = np.diff([0, *spans])
    is_worthwhile = lengths @ counts <= WORTHWHILE * slots * spans[-1]
    return tuple(counts) if is_worthwhile else None
