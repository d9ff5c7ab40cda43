"""Chooses a grid for a job whose prompts share beginnings, if that saves time.

Prompts in chunks share computed pieces, along a tree of any depth. Beside that, a decode step may
read the pages of a planned prefix once for a group of rows. Some grids are compared with the grid
of whole prompts, by a simulation of the job or of a part of it. The part is a run of neighbours in
the order of prompts, so that they share as much as all rows do.

Does not know about files or options. All seconds are predictions. Guarantees: the same rows give
the same grid in every process.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...compile.graphs.graph_kinds import kinds_of
from ...compile.grids.bucket_grid import BucketGrid, NoBucketFits
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.grids.prefix_choice import with_prefixes
from ...compile.grids.prefix_table import PrefixTable
from ...compile.grids.row_shape import RowShape
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.run_bounds import ExpectedRow
from ..engine.shared_prefixes import plan_submission
from .search import simulate_in_order

CHUNKS = (
    (32,),
    (64,),
    (128,),
    (256,),
    (16, 64),
    (16, 128),
    (16, 256),
    (32, 128),
    (32, 256),
    (64, 256),
)
MIN_SHARE = 0.1
"""The share of the prompts' tokens that must be shared for grids that share to be tried."""
MAX_SHARE_OF_SECONDS = 0.85
"""Grids that share may take at most this share of the predicted seconds of whole prompts.

The rest is a margin: without a calibration, the errors of small and of large calls may differ by as
much.
"""
MAX_SHARE_ALIKE = 0.95
"""The same share of a grid whose calls have as many tokens as those of whole prompts, as the errors
of their seconds are alike."""
MAX_ROWS = 1_024


def with_sharing(
    whole: BucketGrid,
    rows: Sequence[ExpectedRow],
    table: PrefixTable,
    defaults: GridDefaults,
    prices: GraphPrices,
    derive: Callable[[Sequence[RowShape], GridDefaults], BucketGrid],
) -> BucketGrid:
    """The grid of whole prompts, or a grid whose rows share beginnings that takes less time.

    Args:
      whole: The grid of whole prompts.
      rows: Rows that fit the grid of whole prompts.
      table: What the prompts of the rows share.
      defaults: The sizes to aim for.
      prices: The seconds of calls and graphs.
      derive: Derives a grid from rows and defaults.
    """
    lengths = np.array([row.need.prompt_length for row in rows], np.int64)
    is_enough = table.shares and table.shared.sum() >= MIN_SHARE * lengths.sum()
    if not is_enough:
        return whole
    grids = _chunk_grids(whole, rows, defaults, derive)
    if defaults.slot_multiple == 1:
        grids = [_with_places_of_prefixes(grid, rows, table) for grid in grids]
    first = max(0, len(table.rows) - MAX_ROWS) // 2
    # neighbours in the order of prompts
    numbers = table.rows[first : first + MAX_ROWS].tolist()
    part, part_table = [rows[row] for row in numbers], table.of_rows(numbers)
    scale = len(rows) / len(part)

    def seconds(grid: BucketGrid) -> float:
        run = simulate_in_order(part, grid, prices.cost, part_table).seconds
        num_graphs = len(grid.prefill) * len(kinds_of(grid, PrefillBucket))
        build = prices.of_prefill_bucket(num_graphs)
        return scale * run + build + (prices.of_decode_graph(grid) if grid.decode_slots else 0.0)

    if not grids:
        return whole

    def fastest(grids: Sequence[BucketGrid]) -> tuple[float, BucketGrid]:
        return min(((seconds(grid), grid) for grid in grids), key=lambda pair: pair[0])

    best_seconds, best = fastest(grids)
    if grouped := with_prefixes(best, table, lengths):
        best_seconds, best = min((best_seconds, best), fastest(grouped), key=lambda pair: pair[0])
    is_alike = _tokens_of_calls(best) == _tokens_of_calls(whole)
    share = MAX_SHARE_ALIKE if is_alike else MAX_SHARE_OF_SECONDS
    return best if best_seconds < share * seconds(whole) else whole


def _tokens_of_calls(grid: BucketGrid) -> set[int]:
    """The tokens of the grid's prefill calls."""
    return {bucket.batch * bucket.tokens for bucket in grid.prefill}


def _with_places_of_prefixes(
    grid: BucketGrid, rows: Sequence[ExpectedRow], table: PrefixTable
) -> BucketGrid:
    """The grid with slots and pages for shared prefixes, too, if all rows have slots.

    Otherwise the last rows would wait until others end, and then decode alone.
    """
    groups = grid.slot_groups or 1
    if len(rows) > grid.decode_slots or groups > 1 or grid.pages is None:
        return grid
    lengths = [(row.need.prompt_length, row.need.max_tokens) for row in rows]
    submission = plan_submission(lengths, table, grid)
    longest = max((x.max_length for x in submission.prefixes if x is not None), default=0)
    pages = submission.num_held * grid.num_pages(longest)
    slots = grid.decode_slots + submission.num_held
    return replace(grid, decode_slots=slots, pages=grid.pages + pages)


def _chunk_grids(
    whole: BucketGrid,
    rows: Sequence[ExpectedRow],
    defaults: GridDefaults,
    derive: Callable[[Sequence[RowShape], GridDefaults], BucketGrid],
) -> list[BucketGrid]:
    """Grids of chunks, in which prompts copy pieces from each other."""
    divisor = math.lcm(defaults.length_multiple, defaults.page_multiple)
    needs = [row.need for row in rows]
    return [
        grid
        for chunks in CHUNKS
        if chunks[-1] <= whole.max_length and chunks[0] % divisor == 0
        for derived in [derive(needs, replace(defaults, chunks=chunks))]
        for grid in _batches(derived, defaults.batch_multiple)
        # the last piece of a long prompt is padded, maybe past the model's context
        if all(fits_grid(need, grid) for need in set(needs))
    ]


def _batches(grid: BucketGrid, batch: int) -> Iterator[BucketGrid]:
    """The grid, and the grid with small calls of the largest chunk: prefixes are often alone in
    their calls."""
    yield grid
    single = tuple(
        bucket._replace(batch=batch) if bucket.chunk == grid.chunks[-1] else bucket
        for bucket in grid.prefill
    )
    if single != grid.prefill:
        yield replace(grid, prefill=single)


def expected_rows(rows: Sequence[RowShape], grid: BucketGrid) -> list[ExpectedRow]:
    """The rows with their expected output tokens."""
    unlimited = GridDefaults.unspecified_output
    return [
        ExpectedRow(row, min(unlimited, grid.max_length - row.prompt_length))
        if row.max_tokens is None
        else ExpectedRow(row, row.max_tokens)
        for row in rows
    ]


def fits_grid(row: RowShape, grid: BucketGrid) -> bool:
    """Whether a grid serves a row."""
    try:
        grid.fit(row.prompt_length, row.max_tokens)
    except NoBucketFits:
        return False
    return row.fits(grid.max_length)
