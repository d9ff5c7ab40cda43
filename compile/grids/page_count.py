"""The number of pages of a cache whose rows take pages as they grow.

Rows that end early never take the pages that they might have needed. So a pool holds more rows than
places for rows of the greatest length do, and may have fewer pages than its slots could fill. Rows
that find no free page wait. Knows nothing of models, devices or bytes.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np

from ...modelzoo.config_values import check_count
from .bucket_grid import BucketGrid
from .span_slots import SlotUse

_Lengths = TypeVar("_Lengths", int, np.ndarray)


def with_pages(
    grid: BucketGrid,
    use: SlotUse,
    page: int,
    room: float,
    groups: int = 1,
    row_tokens: int | None = None,
) -> BucketGrid | None:
    """The grid with a cache of pages; None if there is no room for one row of its length.

    Chunks of all lengths then share the calls of one span, which have the batches of the last span.

    The pages are those that there is room for, but no more than the longest rows fill at their
    longest, one in each slot.

    Args:
      grid: A grid with slots, and without pages.
      use: The slots and lengths that rows need.
      page: The entries of a page.
      room: The largest number of pages.
      groups: The equal groups of slots on different devices, each with pages of its own. It divides
        the slots.
      row_tokens: See `BucketGrid.row_tokens`.
    """
    longest = _num_pages(grid.max_length, page)
    needed = -(-_most_needed(grid, use, page) // groups)
    of_group = int(min(room / groups, max(longest, needed)))
    if of_group < longest:
        return None
    prefill = grid.prefill
    if grid.chunks:
        prefill = tuple(
            bucket._replace(length=grid.max_length) for bucket in prefill[-len(grid.chunks) :]
        )
    return replace(
        grid,
        prefill=prefill,
        decode_spans=(grid.max_length,),
        span_slots=None,
        slot_groups=None if groups == 1 else groups,
        decode_graphs=None,
        pages=of_group * groups,
        page=page,
        row_tokens=row_tokens,
    )


def with_own_pages(grid: BucketGrid, page: int, groups: int = 1) -> BucketGrid:
    """The grid with so many pages that each slot has those of a row of `max_length`.

    Args:
      grid: A grid with slots and one span.
      page: The entries of a page.
      groups: The equal groups of slots on different devices.
    """
    check_count("buckets.page", page)
    pages = grid.decode_slots * _num_pages(grid.max_length, page)
    return replace(grid, pages=pages, page=page, slot_groups=None if groups == 1 else groups)


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
    pages_R = _num_pages(np.maximum(use.prompt_R + outputs, 1), page)
    return float(use.count_R @ pages_R) / use.num_sequences


def _most_needed(grid: BucketGrid, use: SlotUse, page: int) -> int:
    """The pages of the longest sequences at their longest, one in each slot."""
    pages_R = _num_pages(np.minimum(use.limits(grid), grid.max_length), page)
    order = np.argsort(-pages_R, kind="stable")
    counts = use.count_R[order]
    slots_before = np.cumsum(counts) - counts
    taken = np.clip(grid.decode_slots - slots_before, 0, counts)
    return int(taken @ pages_R[order])


def _num_pages(lengths: _Lengths, page: int) -> _Lengths:
    return -(-lengths // page)
