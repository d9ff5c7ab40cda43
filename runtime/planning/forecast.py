"""Forecast the number of decode steps that a job runs in each span, by simulating its rows.

Each row is expected to emit as many tokens as it may; a row without `max_tokens` is expected to
emit the default number. A large job is replaced by an evenly spaced sample of its rows, so the time
of a forecast is bounded. Does not know about seconds. Guarantees: the same rows and grid give the
same forecast, in every process.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...compile.grids.bucket_grid import BucketGrid, NoBucketFits
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.row_shape import RowShape
from ...compile.planning.run_bounds import ExpectedRow
from .search import simulate_in_order

MAX_SAMPLE_ROWS = 2_000
MIN_ROWS_PER_SLOT = 8
"""The smallest number of sampled rows for each slot. With fewer rows, a larger share of the steps
would have idle slots than in the job."""


def forecast_steps(rows: Sequence[RowShape], grid: BucketGrid) -> dict[int, float]:
    """The number of steps by span, for the spans that any row uses.

    In a grid with prefixes, the lengths of rows do not count them, and slots are not in groups.
    """
    grid = replace(grid, prefixes=None)
    if not grid.decode_slots:
        return {}
    expected = expected_rows([row for row in rows if fits_grid(row, grid)], grid)
    max_rows = max(MAX_SAMPLE_ROWS, MIN_ROWS_PER_SLOT * grid.decode_slots)
    step = -(-len(expected) // max_rows) or 1
    expected.sort(key=lambda row: row.limit(grid.max_length))
    sample = expected[::step]
    grid = _with_slots_for(sample, grid)
    simulation = simulate_in_order(sample, grid, None)
    return {int(span): step * use.steps for span, use in simulation.metrics.decode.items()}


def expected_rows(rows: Sequence[RowShape], grid: BucketGrid) -> list[ExpectedRow]:
    """The rows with their expected output tokens."""
    return [_expected(row, grid) for row in rows]


def _with_slots_for(rows: Sequence[ExpectedRow], grid: BucketGrid) -> BucketGrid:
    """The grid with no more slots than the rows can occupy: a simulation has an object for each."""
    max_slots = sum(row.need.num_sequences for row in rows) * (grid.slot_groups or 1)
    if not max_slots or grid.decode_slots <= max_slots:
        return grid
    slots = grid.span_slots and tuple(min(count, max_slots) for count in grid.span_slots)
    return replace(grid, decode_slots=max_slots, span_slots=slots)


def _expected(row: RowShape, grid: BucketGrid) -> ExpectedRow:
    limit = row.max_tokens
    if limit is None:
        room = grid.max_length - row.prompt_length
        limit = min(GridDefaults().unspecified_output, room)
    return ExpectedRow(row, limit)


def fits_grid(row: RowShape, grid: BucketGrid) -> bool:
    """Whether a grid serves a row."""
    try:
        grid.fit(row.prompt_length, row.max_tokens)
    except NoBucketFits:
        return False
    return row.fits(grid.max_length)
