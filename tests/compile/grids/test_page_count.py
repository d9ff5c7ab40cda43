"""Numbers of pages: what there is room for, and no more than the longest rows fill."""

import math
from dataclasses import replace

import pytest

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.default_grid import slot_use
from noria.compile.grids.page_count import expected_pages, with_pages
from noria.compile.grids.row_shape import RowShape

GRID = BucketGrid(96, ((32, 2), (64, 1)), 4, (32, 96), span_slots=(4, 2))
ROWS = [RowShape(60, 30), RowShape(8, 8, num_sequences=2), RowShape(20, None), RowShape(9, 4)]


def use_of(rows):
    return slot_use(rows, has_chunks=False)


def test_there_are_as_many_pages_as_the_longest_rows_fill_in_the_slots():
    paged = with_pages(GRID, use_of(ROWS), 16, math.inf)
    assert paged is not None
    assert paged.pages == 6 + 6 + 1 + 1, "rows of 90, 96, 16 and 16 positions"
    assert (paged.page, paged.decode_spans, paged.span_slots) == (16, (96,), None)
    many = replace(GRID, decode_slots=64, span_slots=None, slot_groups=None)
    more = with_pages(many, use_of(ROWS), 16, math.inf)
    assert more is not None and more.pages == 6 + 6 + 1 + 1 + 1


def test_there_are_no_more_pages_than_there_is_room_for_and_at_least_those_of_the_longest_row():
    paged = with_pages(GRID, use_of(ROWS), 16, 9.7)
    assert paged is not None and paged.pages == 9
    assert with_pages(GRID, use_of(ROWS), 16, 5.9) is None
    short = with_pages(GRID, use_of([RowShape(8, 8)]), 16, math.inf)
    assert short is not None and short.pages == 6


def test_chunks_have_one_span():
    chunks = BucketGrid(90, ((32, 8, 4), (32, 2, 16), (64, 9, 4), (64, 3, 16)), 4, (32, 64, 90))
    paged = with_pages(chunks, use_of([RowShape(40, 30)]), 16, math.inf)
    assert paged is not None and paged.is_packed and paged.decode_spans == (90,)
    assert paged.prefill == ((90, 9, 4), (90, 3, 16))


def test_rows_are_expected_to_end_at_their_output():
    assert expected_pages(use_of(ROWS), 16, unlimited=12) == pytest.approx((6 + 1 + 1 + 2 + 1) / 5)
    assert expected_pages(use_of([]), 16, unlimited=12) == 1
