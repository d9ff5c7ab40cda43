"""The prefill lengths and batches with the least total cost of padding and graphs.

Lengths are multiples of `GridDefaults.length_step`. Knows nothing of models, devices or caches.
"""

from collections.abc import Callable, Sequence

import numpy as np

from .bucket_search import cheapest_cuts
from .grid_defaults import GridDefaults, round_up
from .prefill_bucket import PrefillBucket

SLOTS_PER_PREFILL_ROW = 16
"""Minimum number of slots for each row of a call of whole prompts."""
MAX_BORDERS = 512
"""Maximum number of lengths from which prefill buckets are chosen.

It is enough for all multiples of 16 tokens up to 8192.
"""


def prefill_padding(rows: Sequence[int], buckets: Sequence[PrefillBucket]) -> tuple[int, int]:
    """Real and computed prefill tokens of these prompts, dummy rows included.

    With chunks, batches count as full, because the composition of batches depends on the run.
    """
    if (chunk := buckets[0].chunk) is not None:
        return sum(rows), sum(round_up(length, chunk) for length in rows)
    counts = dict.fromkeys(buckets, 0)
    for length in rows:
        counts[next(bucket for bucket in buckets if length <= bucket.length)] += 1
    computed = sum(-(-count // b.batch) * b.batch * b.length for b, count in counts.items())
    return sum(rows), computed


def cheapest_prefill(
    lengths: Sequence[int] | np.ndarray,
    max_length: int,
    defaults: GridDefaults,
    price: Callable[[PrefillBucket], float] = lambda bucket: bucket.batch * bucket.length,
    price_of_graph: float = 0.0,
) -> list[PrefillBucket]:
    """Prefill buckets with the least total cost of calls and graphs, for prompts of these lengths.

    Args:
      lengths: Tokens of each prompt.
      max_length: Maximum total length of a row.
      defaults: The sizes to aim for.
      price: Cost of one call; the default counts tokens.
      price_of_graph: Cost of having a graph.
    """
    longest = defaults.longest_prefill(max_length)
    steps = np.minimum(round_up(np.array(lengths), defaults.length_step), longest)
    borders, counts = np.unique(_thinned(steps), return_counts=True)
    rows_below = np.concatenate([[0], np.cumsum(counts)])

    def num_rows(first: int | slice, end: int) -> np.ndarray:
        return np.atleast_1d(rows_below[end + 1] - rows_below[first])

    def costs_by_size(end: int, rows: np.ndarray) -> np.ndarray:
        """Costs of the bucket that ends at a border: a line per batch size, a column per count."""
        length = int(borders[end])
        return np.array(
            [
                np.where(
                    _is_allowed(size, length, rows, defaults),
                    -(-rows // size) * price(PrefillBucket(length, size)),
                    np.inf,
                )
                for size in _batch_sizes(length, defaults)
            ]
        )

    ends = cheapest_cuts(
        lambda end: costs_by_size(end, num_rows(slice(end + 1), end)).min(axis=0),
        len(borders),
        defaults.max_prefill_graphs,
        price_of_graph,
    )
    buckets = []
    for first, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        length, costs = int(borders[end]), costs_by_size(end, num_rows(first, end))
        size = _batch_sizes(length, defaults)[int(costs[:, 0].argmin())]
        buckets.append(PrefillBucket(length, size))
    return buckets


def with_small_calls(
    buckets: Sequence[PrefillBucket], slots: int, num_sequences: int, defaults: GridDefaults
) -> tuple[PrefillBucket, ...]:
    """Buckets whose calls have at most 1 / `SLOTS_PER_PREFILL_ROW` of the slots, if rows wait.

    All rows of a call take their slots at the same time, so before a large call many slots would be
    idle.
    """
    if num_sequences <= slots:
        return tuple(buckets)
    max_batch = round_up(max(1, slots // SLOTS_PER_PREFILL_ROW), defaults.batch_multiple)
    return tuple(bucket._replace(batch=min(bucket.batch, max_batch)) for bucket in buckets)


def _thinned(lengths: np.ndarray) -> np.ndarray:
    """The lengths, rounded up to at most `MAX_BORDERS` different ones; the longest is kept."""
    borders = np.unique(lengths)
    every = -(-len(borders) // MAX_BORDERS)
    kept_borders = borders[::-1][::every][::-1]
    return kept_borders[np.searchsorted(kept_borders, lengths)]


def _batch_sizes(length: int, defaults: GridDefaults) -> list[int]:
    """Batch sizes up to the target of tokens, largest first, so that ties have the fewest calls."""
    max_rows = max(1, defaults.tokens_per_prefill // length)
    multiple = defaults.batch_multiple
    return list(range(round_up(max_rows, multiple), 0, -multiple))


def _is_allowed(size: int, length: int, rows: np.ndarray, defaults: GridDefaults) -> np.ndarray:
    """Whether a call of this size has between half the target of tokens and all of it.

    With fewer rows than half the target needs, every size that holds them in one call is allowed.
    """
    max_rows = max(1, defaults.tokens_per_prefill // length)
    half = -(-defaults.tokens_per_prefill // (2 * length))
    # at least one: rows that are too long for every bucket leave the last bucket empty
    min_rows = np.maximum(1, np.minimum(np.minimum(half, rows), max_rows))
    return np.minimum(size, max_rows) >= min_rows
