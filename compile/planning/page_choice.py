"""Chooses the pages of a cache, and whether layers with windows have pages of their own.

If they do, a slot keeps the window alone, and a call has fewer tokens of one row. That is worth it
if memory then holds more pages for the other layers. Knows nothing of requests or devices.
"""

import math
from dataclasses import replace
from functools import partial

from ...modelzoo.config import DecoderConfig
from ...modelzoo.layer_config import window_size
from ..grids.bucket_grid import BucketGrid
from ..grids.grid_defaults import round_up
from ..grids.grid_values import window_pages
from ..grids.page_count import with_room
from .work import Work

MIN_ROW_TOKENS = 256
"""With fewer tokens of a row, a long prompt would need very many calls."""


def pages_in_memory(
    grid: BucketGrid, work: Work, max_bytes: float, row_tokens: int | None = None
) -> BucketGrid | None:
    """The grid with no more pages than memory holds; None if there is no room for one row.

    It has fewer slots if the pages that slots have of their own would leave no room for others.

    Args:
      grid: A grid with pages.
      work: The work of the model's graphs.
      max_bytes: The bytes for the cache on each device.
      row_tokens: The `BucketGrid.row_tokens` that a user asks for; None to choose it.
    """
    assert grid.page is not None and grid.pages is not None
    page, groups, shared = grid.page, grid.slot_groups or 1, None
    if row_tokens is None:
        shared = with_room(grid, work.num_pages(max_bytes, page))
        row_tokens = row_tokens_for(work.config, grid.chunks)
        if row_tokens is None:
            return shared
        row_tokens = min(row_tokens, _most_row_tokens(grid))
    longest = grid.num_pages(grid.max_length)
    of_window = partial(window_pages, row_tokens=row_tokens, page=page, max_length=grid.max_length)
    of_pool, of_slot = work.bytes_of_pages(page, of_window)
    left = max_bytes - groups * longest * of_pool
    slots, most_slots = grid.decode_slots, left / of_slot if of_slot else math.inf
    if most_slots < slots:
        slots = int(most_slots) // groups * groups
        if slots < 1 or shared is not None:
            return shared
    room = (max_bytes - slots * of_slot) / of_pool if of_pool else math.inf
    grid = replace(grid, decode_slots=slots, pages=min(grid.pages, slots * longest))
    own = with_room(grid, room, row_tokens)
    if own is None or (shared is not None and (shared.pages or 0) >= (own.pages or 0)):
        return shared
    return own


def _most_row_tokens(grid: BucketGrid) -> int:
    """The most tokens of a row that a call of a grid has room for, in whole chunks."""
    if not grid.chunks:
        return 1
    largest = (bucket for bucket in grid.prefill if bucket.chunk == grid.chunks[-1])
    return max(bucket.batch * bucket.tokens for bucket in largest)


def row_bytes(work: Work, page: int, num_pages: float, chunks: tuple[int, ...]) -> float:
    """The bytes of a row with so many pages on each device, in the smaller of both forms."""
    num_bytes = num_pages * work.page_bytes(page)
    if (row_tokens := row_tokens_for(work.config, chunks)) is not None:
        longest = work.config.max_position
        of_window = partial(window_pages, row_tokens=row_tokens, page=page, max_length=longest)
        of_pool, of_slot = work.bytes_of_pages(page, of_window)
        num_bytes = min(num_bytes, num_pages * of_pool + of_slot)
    return num_bytes


def row_tokens_for(config: DecoderConfig, chunks: tuple[int, ...]) -> int | None:
    """The largest number of tokens of a row in a call, if layers with windows have pages of their
    own; None without such layers. A decode step has one token of a row."""
    windows = [window_size(kind.window) for kind in config.attention_kinds if kind.window]
    if not windows:
        return None
    return round_up(max(MIN_ROW_TOKENS, *chunks, min(windows)), chunks[-1]) if chunks else 1
