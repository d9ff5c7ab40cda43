"""The prefill lengths and batches of least cost, padding and graphs together.

Lengths are multiples of `GridDefaults.length_step`. Knows nothing of models, devices or caches.
"""

from collections.abc import Callable, Sequence

import numpy as np

from .bucket_grid import PrefillBucket
from .bucket_search import cheapest_cuts
from .grid_defaults import GridDefaults, round_up

SLOTS_PER_PREFILL_ROW = 16
"""The fewest slots for each row of a call of whole prompts."""
MOST_BORDERS = 512
"""The largest number of lengths that prefill buckets are chosen from: all up to 8192 tokens."""


def prefill_padding(rows: Sequence[int], buckets: Sequence[PrefillBucket]) -> tuple[int, int]:
    """Real and computed prefill tokens of these prompts, partly filled batches included.

    With chunks, batches count as full: which chunks meet in one shows when rows run.
    """
    if (chunk := buckets[0].chunk) is not None:
        return sum(rows), sum(round_up(length, chunk) for length in rows)
    counts = dict.fromkeys(buckets, 0)
    for length in rows:
        counts[next(bucket for bucket in buckets if length <= bucket.length)] += 1
    computed = sum(-(-count // b.batch) * b.batch * b.length for b, count in counts.items())
    return sum(rows), computed


def _num_tokens(bucket: PrefillBucket) -> float:
    return bucket.batch * bucket.length


def cheapest_prefill(
    lengths: Sequence[int] | np.ndarray,
    max_length: int,
    defaults: GridDefaults,
    price: Callable[[PrefillBucket], float] = _num_tokens,
    price_of_graph: float = 0.0,
) -> list[PrefillBucket]:
    """Prefill buckets of least cost of calls and graphs together, for prompts of these lengths.

    `price` is of one call, `price_of_graph` of having one; by default tokens are counted, and
    graphs cost nothing.
    """
    longest = defaults.longest_prefill(max_length)
    steps = np.minimum(round_up(np.array(lengths), defaults.length_step), longest)
    borders, counts = np.unique(_thinned(steps), return_counts=True)
    rows_below = np.concatenate([[0], np.cumsum(counts)])

    def of_sizes(end: int, first: int | slice) -> tuple[list[int], np.ndarray]:
        """Batch sizes of the bucket that ends at a border, and what each costs by first border."""
        rows = np.atleast_1d(rows_below[end + 1] - rows_below[first])
        length = int(borders[end])
        sizes = _batch_sizes(length, defaults)
        costs = [
            np.where(
                _may_have(size, length, rows, defaults),
                -(-rows // size) * price(PrefillBucket(length, size)),
                np.inf,
            )
            for size in sizes
        ]
        return sizes, np.array(costs)

    ends = cheapest_cuts(
        lambda end: of_sizes(end, slice(end + 1))[1].min(axis=0),
        len(borders),
        defaults.max_prefill_graphs,
        price_of_graph,
    )
    buckets = []
    for first, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        sizes, costs = of_sizes(end, first)
        buckets.append(PrefillBucket(int(borders[end]), sizes[int(costs[:, 0].argmin())]))
    return buckets


def with_small_calls(
    buckets: Sequence[PrefillBucket], slots: int, num_sequences: int, defaults: GridDefaults
) -> tuple[PrefillBucket, ...]:
    """Buckets of calls of at most 1 / `SLOTS_PER_PREFILL_ROW` of the slots, if rows wait for slots.

    Every row of a call takes its slot as the call begins, so many slots would idle until there are
    enough for a large call.
    """
    if num_sequences <= slots:
        return tuple(buckets)
    most = round_up(max(1, slots // SLOTS_PER_PREFILL_ROW), defaults.batch_multiple)
    return tuple(bucket._replace(batch=min(bucket.batch, most)) for bucket in buckets)


def _thinned(lengths: np.ndarray) -> np.ndarray:
    """The lengths, each rounded up to one of at most `MOST_BORDERS`; the longest one is kept."""
    borders = np.unique(lengths)
    every = -(-len(borders) // MOST_BORDERS)
    kept = borders[::-1][::every][::-1]
    return kept[np.searchsorted(kept, lengths)]


def _batch_sizes(length: int, defaults: GridDefaults) -> list[int]:
    """Batch sizes up to the target of tokens, largest first: of equal cost, fewest calls."""
    most = max(1, defaults.tokens_per_prefill // length)
    return sorted({round_up(n, defaults.batch_multiple) for n in range(1, most + 1)}, reverse=True)


def _may_have(size: int, length: int, rows: np.ndarray, defaults: GridDefaults) -> np.ndarray:
    """Whether a call of that size is between half of and the whole target of tokens.

    Fewer rows than that are one call of their own size, not a call of dummies.
    """
    most = max(1, defaults.tokens_per_prefill // length)
    half = -(-defaults.tokens_per_prefill // (2 * length))
    # at least one: rows too long for every bucket leave the last one empty
    least = np.maximum(1, np.minimum(np.minimum(half, rows), most))
    return np.minimum(size, most) >= least
