"""Chooses the pages of a cache, and whether layers with windows have pages of their own.

If they do, a slot keeps the window alone, and a call has fewer tokens of one row. That is worth it
if memory then holds more pages for the other layers. Knows nothing of the lengths of rows.
"""

import math
from functools import partial

from ...modelzoo.config import DecoderConfig
from ...modelzoo.layer_config import window_size
from ..grids.bucket_grid import BucketGrid
from ..grids.grid_defaults import round_up
from ..grids.grid_values import window_pages
from ..grids.page_count import with_pages
from ..grids.span_slots import SlotUse
from .work import Work

MIN_ROW_TOKENS = 256
"""With fewer tokens of a row, a long prompt would need very many calls."""


def pages_in_memory(
    grid: BucketGrid, use: SlotUse, page: int, groups: int, work: Work, max_bytes: float
) -> BucketGrid | None:
    """The grid with the pages that memory holds; None if there is no room for one row.

    Args:
      grid: A grid with slots, and without pages.
      use: The slots and lengths that rows need.
      page: The entries of a page.
      groups: The equal groups of slots on different devices.
      work: The work of the model's graphs.
      max_bytes: The bytes for the cache on each device.
    """
    shared = with_pages(grid, use, page, work.num_pages(max_bytes, page), groups)
    row_tokens = row_tokens_for(work.config, grid.chunks)
    if row_tokens is None:
        return shared
    of_window = partial(window_pages, row_tokens=row_tokens, page=page, max_length=grid.max_length)
    of_pool, of_slot = work.bytes_of_pages(page, of_window)
    left = max_bytes - grid.decode_slots * of_slot
    if not of_slot or left < 0:
        return shared
    room = left / of_pool if of_pool else math.inf
    own = with_pages(grid, use, page, room, groups, row_tokens)
    if own is None or (shared is not None and (shared.pages or 0) >= (own.pages or 0)):
        return shared
    return own


def rows_in_memory(
    work: Work, page: int, expected: float, chunks: tuple[int, ...], max_bytes: float
) -> float:
    """The rows that memory holds if each has so many pages, in the better of both forms."""
    row_bytes = expected * work.page_bytes(page)
    if (row_tokens := row_tokens_for(work.config, chunks)) is not None:
        longest = work.config.max_position
        of_window = partial(window_pages, row_tokens=row_tokens, page=page, max_length=longest)
        of_pool, of_slot = work.bytes_of_pages(page, of_window)
        row_bytes = min(row_bytes, expected * of_pool + of_slot)
    return max(0.0, max_bytes / row_bytes)


def row_tokens_for(config: DecoderConfig, chunks: tuple[int, ...]) -> int | None:
    """The largest number of tokens of a row in a call, if layers with windows have pages of their
    own; None without such layers. A decode step has one token of a row."""
    windows = [window_size(kind.window) for kind in config.attention_kinds if kind.window]
    if not windows:
        return None
    return round_up(max(MIN_ROW_TOKENS, *chunks, min(windows)), chunks[-1]) if chunks else 1
