"""The number of slots of each span: as many as rows of that length keep busy."""

import pytest

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.default_grid import derive_grid, slot_use
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.row_shape import RowShape
from noria.compile.grids.span_slots import SPARE, with_ragged_slots
from noria.sharding.layout import Layout


def slots_for(needs, slots: int, layout: Layout | None = None):
    """Return how many slots hold 100, 200 and 400 tokens, for rows as `(prompt, max_tokens)`."""
    grid = BucketGrid(400, ((400, 1),), slots, (100, 200, 400))
    rows = [RowShape(prompt, tokens) for prompt, tokens in needs]
    return with_ragged_slots(grid, slot_use(rows, has_chunks=False), layout).span_slots


def test_where_every_row_has_a_slot_each_has_one_that_is_long_enough():
    needs = [(limit - 10, 10) for limit in (50, 100, 101, 200, 201, 300, 60, 70)]
    assert slots_for(needs, 8) == (8, 4, 2)
    assert slots_for(needs, 16) == (16, 4, 2)


def test_long_slots_are_those_that_long_rows_keep_busy_and_a_few_more():
    """One row in ten is long, and takes as many steps as nine short rows: half of all steps."""
    busy = 64 / 2 * SPARE
    assert slots_for([(90, 10)] * 900 + [(310, 90)] * 100, 64) == (64, busy, busy)


def test_slots_come_in_multiples_of_the_pieces_of_a_layout():
    table = {"name": "rows", "mesh": {"data": 8}, "rules": {"batch": "data"}}
    needs = [(90, 10)] * 95 + [(390, 10)] * 5
    assert slots_for(needs, 64) == (64, 4, 4)
    assert slots_for(needs, 64, Layout.from_table(table)) == (64, 8, 8)


@pytest.mark.parametrize("short", [0, 1])
def test_slots_are_alike_where_ragged_ones_would_save_little(short):
    assert slots_for([(390, 10)] * (20 - short) + [(90, 10)] * short, 20) is None


def test_rows_that_generate_nothing_need_no_long_slot():
    rows = [RowShape(20, 16)] * 30 + [RowShape(900, 0)] * 30 + [RowShape(800, 90)]
    grid = with_ragged_slots(derive_grid(rows, 4096), slot_use(rows, has_chunks=False))
    assert grid.decode_slots == 31
    assert grid.span_slots == (31, 1, 1)


def test_with_chunks_a_prompt_needs_a_slot_that_holds_it():
    rows = [RowShape(20, 16)] * 30 + [RowShape(900, 0)] * 4
    grid = derive_grid(rows, 4096, GridDefaults(chunks=(64,)))
    grid = with_ragged_slots(grid, slot_use(rows, has_chunks=True))
    assert grid.decode_slots == 34
    assert grid.span_slots is not None and grid.span_slots[-1] == 4


def test_rows_without_a_limit_may_become_as_long_as_any():
    rows = [RowShape(20, 16)] * 30 + [RowShape(20, None)] * 10
    grid = with_ragged_slots(derive_grid(rows, 4096), slot_use(rows, has_chunks=False))
    assert grid.span_slots is not None and grid.span_slots[-1] == 10
