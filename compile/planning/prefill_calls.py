"""What prompts ask of prefill buckets: rows of each, calls that fill all slots, slots that wait.

Knows nothing of seconds.
"""

from collections.abc import Sequence

import numpy as np

from ..grids.bucket_grid import BucketGrid, PrefillBucket
from ..grids.grid_defaults import round_up

MOST_IDLE = 0.9
"""Share of slots that are expected to wait, however large batches are."""


def rows_through(grid: BucketGrid, prompts: np.ndarray, counts: np.ndarray | int = 1) -> list[int]:
    """The number of prompts, or of pieces of prompts, that each bucket takes."""
    if grid.chunks:
        return _pieces_through(grid, prompts, counts)
    lengths = [bucket.length for bucket in grid.prefill]
    found = np.zeros(len(lengths), int)
    np.add.at(found, np.searchsorted(lengths, prompts), counts)
    return found.tolist()


def _pieces_through(grid: BucketGrid, prompts: np.ndarray, counts: np.ndarray | int) -> list[int]:
    """A chunk takes what larger ones leave of a prompt, as far as it fills whole pieces."""
    borders = [0, *(bucket.length for bucket in grid.prefill[:: len(grid.chunks)])]
    of_chunks: list[list[int]] = []
    begin = np.zeros_like(prompts)
    for chunk in reversed(grid.chunks):
        is_last = chunk == grid.chunks[0]
        end = round_up(prompts, chunk) if is_last else prompts // chunk * chunk
        tokens = (np.minimum(end, b) - np.minimum(begin, b) for b in borders)
        below = [int((of_prompt * counts).sum()) for of_prompt in tokens]
        of_chunks.insert(0, [tokens // chunk for tokens in np.diff(below).tolist()])
        begin = end
    return [count for of_span in zip(*of_chunks, strict=True) for count in of_span]


def calls_to_fill(slots: int, prefill: Sequence[PrefillBucket]) -> int | None:
    """Calls of chunks that fill all slots with the longest prompts; None of whole prompts.

    Nobody waits for a first token, so no row need decode beside empty slots.
    """
    span = prefill[-1].length
    of_span = [bucket for bucket in prefill if bucket.length == span and bucket.chunk]
    # of smaller chunks a prompt takes fewer than make one of the next
    lengths = [*(bucket.tokens for bucket in of_span[1:]), span]
    calls = (
        -(-slots // bucket.batch) * (length // bucket.tokens)
        for bucket, length in zip(of_span, lengths, strict=False)
    )
    return sum(calls) if of_span else None


def share_idle(grid: BucketGrid) -> float:
    """Of slots, that are expected to wait for rows that fill a call of chunks with theirs.

    A batch of B has from none to B - 1 rows that wait, (B - 1) / 2 on average.
    """
    if not grid.chunks:
        return 0.0
    waiting = sum(bucket.batch - 1 for bucket in grid.prefill) / 2
    return min(MOST_IDLE, waiting / grid.decode_slots)
