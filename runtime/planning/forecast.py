"""The decode steps that a job is expected to run in each span: its rows, simulated.

Every row is expected to emit all that it may, and one without `max_tokens` the default output. Of
many rows a sample in even steps stands for all, so a forecast takes about as long for any job.
Knows nothing of seconds. The same rows and grid have the same forecast, in every process.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...compile.grids.bucket_grid import BucketGrid, NoBucketFits
from ...compile.grids.default_grid import RowNeed
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.planning.candidates import ExpectedRow
from .search import as_fed
from .simulator import simulate

MOST_ROWS = 2_000
ROWS_PER_SLOT = 8
"""At least, in a sample: most of its steps run with all slots busy, as those of the job do."""


def forecast_steps(rows: Sequence[RowNeed], grid: BucketGrid) -> dict[int, float]:
    """Steps by span, of those that any row runs in."""
    if not grid.decode_slots:
        return {}
    expected = [_expected(row, grid) for row in rows if _fits(row, grid)]
    most = max(MOST_ROWS, ROWS_PER_SLOT * grid.decode_slots)
    step = -(-len(expected) // most) or 1
    expected.sort(key=lambda row: row.limit(grid.max_length))
    sample = expected[::step]
    grid = _with_slots_for(sample, grid)
    found = simulate(grid, as_fed(sample, grid), None)
    return {int(span): step * use.steps for span, use in found.metrics.decode.items()}


def _with_slots_for(rows: Sequence[ExpectedRow], grid: BucketGrid) -> BucketGrid:
    """The grid with no more slots than rows can take, as a simulation has an object for each."""
    most = sum(row.need.num_sequences for row in rows) * (grid.slot_groups or 1)
    if not most or grid.decode_slots <= most:
        return grid
    slots = grid.span_slots and tuple(min(count, most) for count in grid.span_slots)
    return replace(grid, decode_slots=most, span_slots=slots)


def _expected(row: RowNeed, grid: BucketGrid) -> ExpectedRow:
    limit = row.max_tokens
    if limit is None:
        room = grid.max_length - row.prompt_length
        limit = min(GridDefaults().unspecified_output, room)
    return ExpectedRow(row, limit)


def _fits(row: RowNeed, grid: BucketGrid) -> bool:
    try:
        grid.fit(row.prompt_length, row.max_tokens)
    except NoBucketFits:
        return False
    return True
