"""Prefill calls for given prompts: rows of each bucket, calls that fill all slots, idle slots.

Knows nothing of seconds.
"""

from collections.abc import Sequence

import numpy as np

from ..grids.bucket_grid import BucketGrid
from ..grids.grid_defaults import round_up
from ..grids.prefill_bucket import PrefillBucket

MAX_IDLE_SHARE = 0.9
"""Maximum expected share of waiting slots, however large batches are."""


def rows_by_bucket(
    grid: BucketGrid, prompts: np.ndarray, counts: np.ndarray | int = 1
) -> list[int]:
    """Number of prompts, or of pieces of prompts, that each bucket takes."""
    if grid.chunks:
        return _pieces_by_bucket(grid, prompts, counts)
    lengths = [bucket.length for bucket in grid.prefill]
    num_rows = np.zeros(len(lengths), int)
    np.add.at(num_rows, np.searchsorted(lengths, prompts), counts)
    return num_rows.tolist()


def _pieces_by_bucket(grid: BucketGrid, prompts: np.ndarray, counts: np.ndarray | int) -> list[int]:
    """Number of pieces per bucket; a chunk takes what larger chunks leave, in whole pieces."""
    borders = [0, *(bucket.length for bucket in grid.prefill[:: len(grid.chunks)])]
    counts_by_chunk: list[list[int]] = []
    begin = np.zeros_like(prompts)
    for chunk in reversed(grid.chunks):
        is_last = chunk == grid.chunks[0]
        end = round_up(prompts, chunk) if is_last else prompts // chunk * chunk
        tokens = (np.minimum(end, b) - np.minimum(begin, b) for b in borders)
        below = [int((tokens_P * counts).sum()) for tokens_P in tokens]
        counts_by_chunk.insert(0, [tokens // chunk for tokens in np.diff(below).tolist()])
        begin = end
    return [count for span_counts in zip(*counts_by_chunk, strict=True) for count in span_counts]


def calls_to_fill(slots: int, prefill: Sequence[PrefillBucket]) -> int | None:
    """Calls of chunks that fill all slots with the longest prompts; None for whole prompts.

    No one waits for a first token, so no row needs to decode beside empty slots.
    """
    span = prefill[-1].length
    longest_buckets = [bucket for bucket in prefill if bucket.length == span and bucket.chunk]
    # a prompt has fewer pieces of a smaller chunk than make one piece of the next larger chunk
    lengths = [*(bucket.tokens for bucket in longest_buckets[1:]), span]
    calls = (
        -(-slots // bucket.batch) * (length // bucket.tokens)
        for bucket, length in zip(longest_buckets, lengths, strict=False)
    )
    return sum(calls) if longest_buckets else None


def idle_share(grid: BucketGrid) -> float:
    """Expected share of slots that wait until enough rows fill a call of chunks.

    With a batch of B, 0 to B - 1 rows wait, (B - 1) / 2 on average.
    """
    if not grid.chunks:
        return 0.0
    waiting = sum(bucket.batch - 1 for bucket in grid.prefill) / 2
    return min(MAX_IDLE_SHARE, waiting / grid.decode_slots)
