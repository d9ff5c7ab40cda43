"""The number of pages of a cache whose rows take pages as they grow.

Rows that end early never take the pages that they might have needed. So a pool holds more rows than
places for rows of the greatest length do, and may have fewer pages than its slots could fill. Rows
that find no free page wait. Knows nothing of models, devices or bytes.
"""

from dataclasses import replace

import numpy as np

from .bucket_grid import BucketGrid
from .slot_use import SlotUse


def with_needed_pages(grid: BucketGrid, use: SlotUse) -> BucketGrid:
    """The grid with the pages that the longest rows fill at their longest, one in each slot.

    Each group of slots has at least the pages of a row of `max_length`.

    Args:
      grid: A grid with pages.
      use: The slots and lengths that rows need.
    """
    groups, longest = grid.slot_groups or 1, grid.num_pages(grid.max_length)
    of_group = max(longest, -(-_most_needed(grid, use) // groups))
    return replace(grid, pages=of_group * groups)


def with_room(grid: BucketGrid, room: float, row_tokens: int | None = None) -> BucketGrid | None:
    """The grid with no more pages than there is room for; None if a row of its length finds none.

    Args:
      grid: A grid with pages.
      room: The largest number of pages.
      row_tokens: See `BucketGrid.row_tokens`.
    """
    assert grid.pages is not None
    groups = grid.slot_groups or 1
    of_group = int(min(room, grid.pages)) // groups
    if of_group < grid.num_pages(grid.max_length):
        return None
    return replace(grid, pages=of_group * groups, row_tokens=row_tokens)


def expected_pages(use: SlotUse, page: int, unlimited: int) -> float:
    """The pages that a sequence is expected to hold at its end, on average.

    Args:
      use: The slots and lengths that rows need.
      page: The entries of a page.
      unlimited: The expected output of rows without a limit.
    """
    if not use.num_sequences:
        return 1.0
    outputs = use.output_R
    if outputs is None:
        outputs = np.where(use.max_tokens_R < 0, unlimited, use.max_tokens_R)
    pages_R = -(-np.maximum(use.prompt_R + outputs, 1) // page)
    return float(use.count_R @ pages_R) / use.num_sequences


def _most_needed(grid: BucketGrid, use: SlotUse) -> int:
    """The pages of the longest sequences at their longest, one in each slot."""
    pages_R = grid.num_pages(np.minimum(use.limits(grid), grid.max_length))
    order = np.argsort(-pages_R, kind="stable")
    counts = use.count_R[order]
    slots_before = np.cumsum(counts) - counts
    taken = np.clip(grid.decode_slots - slots_before, 0, counts)
    return int(taken @ pages_R[order])
