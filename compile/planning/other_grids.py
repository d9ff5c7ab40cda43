"""Grids whose prefill lengths follow a simple rule, for comparison with a plan of the same slots.

Of the lengths that a rule allows, those with the least predicted seconds for the workload are
taken: the comparison is with the best grid of the rule. Knows nothing of schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..grids.bucket_grid import BucketGrid
from ..grids.bucket_search import cheapest_cuts
from ..grids.prefill_bucket import PrefillBucket
from .cost import CostModel
from .run_bounds import rows_by_bucket

LANES = 128
"""The step of lengths that fill a TPU's lanes."""
SHORTEST = 16
"""The shortest power of two that serving stacks ship."""


def rule_based(
    grid: BucketGrid, prompts: np.ndarray, tokens_per_call: int, cost: CostModel
) -> Mapping[str, BucketGrid]:
    """The fastest grids of whole prompts whose prefill lengths follow a rule, by name.

    They have at most as many prefill graphs as `grid`, and its slots and pages. Serving stacks ship
    powers of two up to the longest prompt: those of JetStream and vLLM's TPU backend begin at 16,
    those of SGLang at 64. Multiples of 128 are the other common choice.

    Args:
      grid: The grid to compare with.
      prompts: The lengths of all prompts.
      tokens_per_call: Maximum number of tokens of a call, if it has more than one row.
      cost: The seconds of calls.
    """
    longest = int(prompts.max())
    rules = {"powers of two": powers_of_two(longest), "multiples of 128": multiples_of_128(longest)}
    return {
        name: with_fastest_lengths(
            with_lengths(grid, lengths, tokens_per_call), prompts, len(grid.prefill), cost
        )
        for name, lengths in rules.items()
    }


def powers_of_two(longest: int) -> list[int]:
    """The powers of two from 16 to the smallest one of at least `longest`."""
    top = max(SHORTEST, longest) - 1
    return [2**power for power in range(SHORTEST.bit_length() - 1, top.bit_length() + 1)]


def multiples_of_128(longest: int) -> list[int]:
    """The multiples of 128 up to the smallest one of at least `longest`."""
    return list(range(LANES, longest + LANES, LANES))


def with_lengths(grid: BucketGrid, lengths: Sequence[int], tokens_per_call: int) -> BucketGrid:
    """The grid with other prefill lengths, none of them above `max_length`."""
    lengths = sorted({min(length, grid.max_length) for length in lengths})
    max_rows = grid.decode_slots or tokens_per_call
    prefill = [
        PrefillBucket(length, max(1, min(tokens_per_call // length, max_rows)))
        for length in lengths
    ]
    return replace(grid, prefill=tuple(prefill), chunks_per_decode=None)


def with_fastest_lengths(
    grid: BucketGrid, prompts: np.ndarray, max_buckets: int, cost: CostModel
) -> BucketGrid:
    """The grid with at most `max_buckets` of its prefill buckets, chosen by predicted seconds.

    The last bucket is kept.
    """
    buckets = grid.prefill
    rows_below = np.cumsum([0, *rows_by_bucket(grid, prompts)])

    def seconds(end: int) -> np.ndarray:
        rows = rows_below[end + 1] - rows_below[: end + 1]
        return -(-rows // buckets[end].batch) * cost.seconds(grid.prefill_call(buckets[end]))

    ends = cheapest_cuts(seconds, len(buckets), max_buckets)
    return replace(grid, prefill=tuple(buckets[end] for end in ends))
