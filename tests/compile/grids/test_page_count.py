"""Numbers of pages: what there is room for, and no more than the longest rows fill."""

from dataclasses import replace

import pytest

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.page_count import expected_pages, with_needed_pages, with_room
from noria.compile.grids.row_shape import RowShape
from noria.compile.grids.slot_use import SlotUse

GRID = BucketGrid(96, ((32, 2), (64, 1)), 4, page=16)
ROWS = [RowShape(60, 30), RowShape(8, 8, num_sequences=2), RowShape(20, None), RowShape(9, 4)]


def use_of(rows):
    return SlotUse.of_rows(rows, has_chunks=False)


def test_there_are_as_many_pages_as_the_longest_rows_fill_in_the_slots():
    paged = with_needed_pages(GRID, use_of(ROWS))
    assert paged == replace(GRID, pages=6 + 6 + 1 + 1), "rows of 90, 96, 16 and 16 positions"
    more = with_needed_pages(replace(GRID, decode_slots=64), use_of(ROWS))
    assert more.pages == 6 + 6 + 1 + 1 + 1


def test_each_group_of_slots_has_the_pages_of_a_row_and_as_many_as_others():
    groups = replace(GRID, slot_groups=2)
    assert with_needed_pages(groups, use_of(ROWS)).pages == 2 * 7
    assert with_needed_pages(groups, use_of([RowShape(8, 8)])).pages == 2 * 6
    assert with_needed_pages(GRID, use_of([RowShape(8, 8)])).pages == 6


def test_there_are_no_more_pages_than_there_is_room_for_and_at_least_those_of_the_longest_row():
    assert with_room(GRID, 9.7) == replace(GRID, pages=9)
    assert with_room(GRID, 99) == GRID
    assert with_room(GRID, 5.9) is None
    groups = replace(GRID, slot_groups=2)
    assert with_room(groups, 13.9) == replace(groups, pages=12)
    assert with_room(groups, 11.9) is None


def test_rows_are_expected_to_end_at_their_output():
    assert expected_pages(use_of(ROWS), 16, unlimited=12) == pytest.approx((6 + 1 + 1 + 2 + 1) / 5)
    assert expected_pages(use_of([]), 16, unlimited=12) == 1
