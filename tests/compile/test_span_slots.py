"""How many slots reach each span: as many as rows that are so long keep busy."""

import pytest

from noria.compile.default_grid import RowNeed, derive_grid, with_ragged_slots
from noria.compile.span_slots import SPARE, span_slots

SPANS = (100, 200, 400)


def test_where_every_row_has_a_slot_each_has_one_that_is_long_enough():
    limits = [50, 100, 101, 200, 201, 300, 60, 70]
    assert span_slots(8, SPANS, limits, [10] * 8) == (8, 4, 2)
    assert span_slots(16, SPANS, limits, [10] * 8) == (16, 4, 2)


def test_long_slots_are_those_that_long_rows_keep_busy_and_a_few_more():
    """A row in ten is long, and takes as many steps as nine short ones: half of all."""
    limits, lives = [100] * 900 + [400] * 100, [10] * 900 + [90] * 100
    busy = 64 / 2 * SPARE
    assert span_slots(64, SPANS, limits, lives) == (64, busy, busy)


def test_slots_come_in_multiples_and_no_span_has_more_than_a_shorter_one():
    limits = [100] * 95 + [400] * 5
    assert span_slots(64, SPANS, limits, [10] * 100, multiple=8) == (64, 8, 8)


@pytest.mark.parametrize("limits", [[400] * 20, [400] * 19 + [100]], ids=["none", "hardly any"])
def test_slots_are_alike_where_ragged_ones_would_save_little(limits):
    assert span_slots(20, SPANS, limits, [1] * 20) is None


def test_rows_that_generate_nothing_need_no_long_slot():
    rows = [RowNeed(20, 16)] * 30 + [RowNeed(900, 0)] * 30 + [RowNeed(800, 90)]
    grid = with_ragged_slots(derive_grid(rows, 4096), rows)
    assert grid.decode_slots == 31
    assert grid.span_slots == (31, 1, 1)


def test_rows_without_a_limit_may_become_as_long_as_any():
    rows = [RowNeed(20, 16)] * 30 + [RowNeed(20, None)] * 10
    grid = with_ragged_slots(derive_grid(rows, 4096), rows)
    assert grid.span_slots is not None and grid.span_slots[-1] == 10
