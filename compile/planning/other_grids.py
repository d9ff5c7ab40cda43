"""Grids with hand-picked prefill lengths, for comparison with a plan of the same slots and spans.

Knows nothing of the cost of a grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..grids.bucket_grid import BucketGrid
from ..grids.grid_defaults import round_up
from ..grids.prefill_bucket import PrefillBucket

LANES = 128
"""The step of lengths that fill a TPU's lanes."""


def hand_picked(
    grid: BucketGrid, longest_prompt: int, tokens_per_call: int
) -> Mapping[str, BucketGrid]:
    """Grids of whole prompts with as many prefill graphs as `grid` has, by name.

    Serving stacks ship powers of two up to the longest prompt (JetStream and vLLM's TPU backend
    begin at 16, SGLang's at 64). Equal steps of 128 are the other common choice.
    """
    count = len(grid.prefill)
    ladders = {
        "powers of two": powers_of_two(count, longest_prompt),
        "multiples of 128": multiples(count, longest_prompt),
    }
    return {name: with_lengths(grid, lengths, tokens_per_call) for name, lengths in ladders.items()}


def powers_of_two(count: int, longest: int) -> list[int]:
    """At most `count` powers of two, up to the smallest one of at least `longest`."""
    top = (longest - 1).bit_length()
    return [2**power for power in range(max(0, top - count + 1), top + 1)]


def multiples(count: int, longest: int) -> list[int]:
    """Equal steps that are multiples of 128, of which the last is at least `longest`."""
    step = round_up(-(-longest // count), LANES)
    return list(range(step, round_up(longest, step) + 1, step))


def with_lengths(grid: BucketGrid, lengths: Sequence[int], tokens_per_call: int) -> BucketGrid:
    """The grid with other prefill lengths, none of them above `max_length`."""
    lengths = sorted({min(length, grid.max_length) for length in lengths})
    max_rows = grid.decode_slots or tokens_per_call
    prefill = [
        PrefillBucket(length, max(1, min(tokens_per_call // length, max_rows)))
        for length in lengths
    ]
    return replace(grid, prefill=tuple(prefill), chunks_per_decode=None)
