"""Chooses chunks for a job whose prompts share beginnings, if that saves time.

Only prompts in chunks can share computed pieces. Some sizes of chunks are compared with the grid of
whole prompts, by a simulation of the job or of a part of it. The part is a run of neighbours in the
order of prompts, so that they share as much as all rows do.

Does not know about files or options. All seconds are predictions. Guarantees: the same rows give
the same grid in every process.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import with_chunks
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefix_table import PrefixTable
from ...compile.planning.candidates import ExpectedRow
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.prefill_calls import rows_by_bucket
from .forecast import fits_grid
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
"""The share of the prompts' tokens that must be shared for chunks to be tried."""
MAX_SHARE_OF_SECONDS = 0.6
"""The share of the predicted seconds of whole prompts that chunks may take at most. On CPUs, small
calls take longer than predicted: 1.6 times as long for 32 tokens of the embedded model."""
MAX_SIMULATED = 4
MAX_ROWS = 1_024


def with_chunks_that_share(
    whole: BucketGrid,
    rows: Sequence[ExpectedRow],
    table: PrefixTable,
    defaults: GridDefaults,
    prices: GraphPrices,
    derive: Callable[[GridDefaults], BucketGrid],
) -> BucketGrid:
    """The grid of whole prompts, or a grid of chunks that takes less time.

    Args:
      whole: The grid of whole prompts.
      rows: Rows that fit the grid of whole prompts.
      table: What the prompts of the rows share.
      defaults: The sizes to aim for.
      prices: The seconds of calls and graphs.
      derive: Derives a grid from other defaults.
    """
    lengths = np.array([row.need.prompt_length for row in rows], np.int64)
    if table.shared.sum() < MIN_SHARE * lengths.sum() or not whole.decode_slots:
        return whole
    divisor = math.lcm(defaults.length_multiple, defaults.span_multiple)
    candidates = [
        grid
        for chunks in CHUNKS
        if chunks[-1] <= whole.max_length and chunks[0] % divisor == 0
        for grid in _batches(derive(with_chunks(defaults, list(chunks))), defaults.batch_multiple)
        # the last piece of a long prompt is padded, maybe past the model's context
        if all(fits_grid(need, grid) for need in {row.need for row in rows})
    ]
    candidates.sort(key=lambda grid: _min_seconds(grid, lengths, table, prices))
    part, part_table = _neighbours(rows, table)
    scale = len(rows) / len(part)

    def seconds(grid: BucketGrid) -> float:
        run = simulate_in_order(part, grid, prices.cost, part_table).seconds
        return scale * run + _build_seconds(grid, prices)

    if not candidates:
        return whole
    best_seconds, best = min(
        ((seconds(grid), grid) for grid in candidates[:MAX_SIMULATED]), key=lambda pair: pair[0]
    )
    return best if best_seconds < MAX_SHARE_OF_SECONDS * seconds(whole) else whole


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


def _min_seconds(
    grid: BucketGrid, lengths: np.ndarray, table: PrefixTable, prices: GraphPrices
) -> float:
    """The seconds of prefill if all calls were full, and of the build."""
    shared = table.shared_pieces(lengths, grid.chunks)
    every, saved = rows_by_bucket(grid, lengths), rows_by_bucket(grid, shared)
    seconds = sum(
        (count - less) / bucket.batch * prices.cost.seconds(bucket.call())
        for bucket, count, less in zip(grid.prefill, every, saved, strict=True)
    )
    return seconds + _build_seconds(grid, prices)


def _build_seconds(grid: BucketGrid, prices: GraphPrices) -> float:
    prefill = len(grid.prefill) * prices.of_prefill_bucket(len(grid.prefill_kinds))
    return prefill + sum(
        prices.of_decode_graph(grid.decode_slots, span) for span in grid.graph_spans
    )


def _neighbours(
    rows: Sequence[ExpectedRow], table: PrefixTable
) -> tuple[list[ExpectedRow], PrefixTable]:
    """A run of neighbours in the order of prompts, and what they share."""
    first = max(0, len(table.rows) - MAX_ROWS) // 2
    numbers = table.rows[first : first + MAX_ROWS].tolist()
    return [rows[row] for row in numbers], table.of_rows(numbers)
