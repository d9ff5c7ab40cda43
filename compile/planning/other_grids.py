"""Grids whose prefill lengths follow a simple rule, for comparison with a plan of the same slots.

Of the lengths that a rule allows, and of the sizes of calls that the planner tries, those with the
least predicted seconds for the workload are taken: the comparison is with the best grid of the
rule. Knows nothing of schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..grids.bucket_grid import BucketGrid
from ..grids.bucket_search import cheapest_cuts
from ..grids.grid_defaults import GridDefaults, round_up
from ..grids.prefill_bucket import PrefillBucket
from ..grids.prefill_ladder import with_small_calls
from ..grids.slot_use import SlotUse
from .candidates import TOKENS_PER_PREFILL, working_bytes
from .cost import CostModel
from .run_bounds import ExpectedRow, rows_by_bucket

LANES = 128
"""The step of lengths that fill a TPU's lanes."""
SHORTEST = 16
"""The shortest power of two that serving stacks ship."""


def rule_based(
    grid: BucketGrid, rows: Sequence[ExpectedRow], defaults: GridDefaults, cost: CostModel
) -> Mapping[str, BucketGrid]:
    """The fastest grids of whole prompts whose prefill lengths follow a rule, by name.

    They have at most as many prefill graphs as `grid`, its slots and pages, and calls that fit in
    the memory of a device; if none fits, the smallest ones. Serving stacks ship powers of two up to
    the longest prompt: those of JetStream and vLLM's TPU backend begin at 16, those of SGLang at
    64. Multiples of 128 are the other common choice.

    Args:
      grid: The grid to compare with.
      rows: The rows of the workload.
      defaults: The sizes that the layout of the grid divides.
      cost: The seconds of calls.
    """
    prompts = np.array([row.need.prompt_length for row in rows])
    num_sequences = SlotUse.of_rows([row.need for row in rows], has_chunks=False).num_sequences
    longest, max_buckets = int(prompts.max()), len(grid.prefill)
    rules = {"powers of two": powers_of_two(longest), "multiples of 128": multiples_of_128(longest)}
    found = {}
    for name, lengths in rules.items():
        of_rule = []
        for tokens in TOKENS_PER_PREFILL:
            whole = with_lengths(grid, lengths, tokens * defaults.batch_multiple, defaults)
            if slots := grid.decode_slots:
                prefill = with_small_calls(whole.prefill, slots, num_sequences, defaults)
                whole = replace(whole, prefill=prefill)
            of_rule.append(with_fastest_lengths(whole, prompts, max_buckets, cost))
        fitting = [whole for whole in of_rule if _fits(whole, cost)] or of_rule[:1]
        found[name] = min(fitting, key=lambda whole: _prefill_seconds(whole, prompts, cost))
    return found


def powers_of_two(longest: int) -> list[int]:
    """The powers of two from 16 to the smallest one of at least `longest`."""
    top = max(SHORTEST, longest) - 1
    return [2**power for power in range(SHORTEST.bit_length() - 1, top.bit_length() + 1)]


def multiples_of_128(longest: int) -> list[int]:
    """The multiples of 128 up to the smallest one of at least `longest`."""
    return list(range(LANES, longest + LANES, LANES))


def with_lengths(
    grid: BucketGrid,
    lengths: Sequence[int],
    tokens_per_call: int,
    defaults: GridDefaults,
) -> BucketGrid:
    """The grid with other prefill lengths, none of them above `max_length`.

    Lengths and batches are rounded up to those that the layout of `defaults` divides.
    """
    multiple, longest = defaults.length_multiple, defaults.longest_prefill(grid.max_length)
    lengths = sorted({min(round_up(length, multiple), longest) for length in lengths})
    max_rows = grid.decode_slots or tokens_per_call
    prefill = []
    for length in lengths:
        batch = max(1, min(tokens_per_call // length, max_rows))
        prefill.append(PrefillBucket(length, round_up(batch, defaults.batch_multiple)))
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


def _fits(grid: BucketGrid, cost: CostModel) -> bool:
    """Whether a device has the memory of the weights, the cache and the largest call."""
    work = cost.work
    own = work.parameter_bytes + work.grid_bytes(grid)
    return own + working_bytes(work, grid) <= cost.hardware.memory_bytes


def _prefill_seconds(grid: BucketGrid, prompts: np.ndarray, cost: CostModel) -> float:
    """The seconds of the calls that prefill the prompts."""
    counts = zip(grid.prefill, rows_by_bucket(grid, prompts), strict=True)
    return sum(
        -(-rows // bucket.batch) * cost.seconds(grid.prefill_call(bucket))
        for bucket, rows in counts
    )
