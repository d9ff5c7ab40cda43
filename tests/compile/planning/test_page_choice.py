"""The choice between pages that all layers share and pages of each slot for windows."""

import math
from dataclasses import replace

import pytest
from alike import changed
from planning_models import PLAIN, work_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.page_count import with_needed_pages
from noria.compile.grids.row_shape import RowShape
from noria.compile.grids.slot_use import SlotUse
from noria.compile.planning.page_choice import pages_in_memory, row_bytes, row_tokens_for

PAGE, WINDOW = 16, 24
MODEL = changed(PLAIN, windows=(None, WINDOW, WINDOW), max_position=4096)
GRID = BucketGrid(2048, ((2048, 8, 64),), 8, page=PAGE)
ROWS = [RowShape(1000, 1000)] * 100


def chosen(config, max_bytes, rows=ROWS, grid=GRID):
    use = SlotUse.of_rows(rows, has_chunks=True)
    return pages_in_memory(with_needed_pages(grid, use), work_of(config), max_bytes)


def test_windows_have_pages_of_their_own_if_memory_then_holds_more_of_each_row():
    work = work_of(MODEL)
    max_bytes = 3 * 125 * work.page_bytes(PAGE)
    grid, shared = chosen(MODEL, max_bytes), chosen(PLAIN, max_bytes)
    assert (shared.pages, shared.row_tokens) == (3 * 125, None)
    # at least 256 tokens of a row in a call, and the window
    assert grid.row_tokens == 256 and grid.window_pages(WINDOW) == 19
    assert grid.pages == int((max_bytes - 8 * 19 * 2 / 3 * work.page_bytes(PAGE)) * 3) // (
        work.page_bytes(PAGE)
    )
    assert work.grid_bytes(grid) <= max_bytes < work.grid_bytes(grid) + work.page_bytes(PAGE)


def test_pages_are_shared_where_no_row_would_wait_or_windows_are_longer_than_rows():
    assert chosen(MODEL, math.inf).row_tokens is None
    short = [RowShape(100, 100)] * 100
    assert chosen(MODEL, 60 * 128 * work_of(MODEL).page_bytes(PAGE), short).row_tokens is None
    wide = changed(MODEL, windows=(None, 2000, 2000))
    assert chosen(wide, 3 * 128 * work_of(wide).page_bytes(PAGE)).row_tokens is None


def test_a_model_whose_layers_all_have_windows_needs_no_pool():
    narrow = changed(MODEL, windows=(WINDOW,) * 3)
    work = work_of(narrow)
    grid = chosen(narrow, 8 * 20 * work.page_bytes(PAGE))
    assert grid.pages == 8 * 125 and grid.row_tokens == 256
    assert work.grid_bytes(grid) == 8 * 19 * work.page_bytes(PAGE)


@pytest.mark.parametrize(
    ("windows", "chunks", "expected"),
    [
        ((None,) * 3, (64,), None),
        ((None, 24, 24), (), 1),
        ((None, 24, 24), (16, 64), 256),
        ((None, 24, 24), (48,), 288),
        ((1000, None, 600), (64,), 640),
        ((24,) * 3, (512,), 512),
    ],
)
def test_a_call_has_whole_chunks_of_a_row_and_about_a_window(windows, chunks, expected):
    assert row_tokens_for(changed(PLAIN, windows=windows), chunks) == expected


def test_a_row_takes_fewer_bytes_if_windows_have_pages_of_their_own():
    page_bytes = work_of(PLAIN).page_bytes(PAGE)
    assert row_bytes(work_of(PLAIN), PAGE, 125.0, (64,)) == 125 * page_bytes
    own = row_bytes(work_of(MODEL), PAGE, 125.0, (64,))
    assert own == pytest.approx((125 / 3 + 19 * 2 / 3) * page_bytes)
    assert row_bytes(work_of(MODEL), PAGE, 10.0, (64,)) == 10 * page_bytes


def test_slots_are_fewer_where_their_own_pages_would_leave_no_room_for_a_row():
    """A row takes 128 pages, and a slot has 19 of its own in two of three layers."""
    layer_bytes = work_of(MODEL).page_bytes(PAGE) / 3
    grid = chosen(MODEL, (128 + 3 * 19 * 2) * layer_bytes)
    assert (grid.decode_slots, grid.pages, grid.row_tokens) == (3, 128, 256)
    assert chosen(MODEL, (128 + 19 * 2) * layer_bytes - 1) is None


def test_slots_have_no_room_for_more_tokens_than_a_call():
    small = replace(GRID, prefill=((2048, 2, 64),))
    max_bytes = 3 * 125 * work_of(MODEL).page_bytes(PAGE)
    assert chosen(MODEL, max_bytes, grid=small).row_tokens == 128


def test_a_user_may_ask_for_the_tokens_of_a_row():
    work = work_of(MODEL)
    grid = pages_in_memory(GRID, work, 1e12, row_tokens=64)
    assert grid is not None and grid.row_tokens == 64
    max_bytes = 300 * work.page_bytes(PAGE)
    tight = pages_in_memory(GRID, work, max_bytes, row_tokens=64)
    assert tight is not None and 0.99 * max_bytes < work.grid_bytes(tight) <= max_bytes
