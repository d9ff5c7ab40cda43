"""Notes on the plan of a job: padding, what rows share, rows that end early, and a better plan.

Knows nothing of files, and of how a plan is made. All seconds are predictions.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import derive_grid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefill_ladder import prefill_padding
from ...compile.grids.prefix_table import PrefixTable
from ...compile.grids.row_shape import RowShape
from ...compile.plan import Plan
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.run_bounds import ExpectedRow
from ...compile.planning.work import Work
from ...compile.target_names import TargetName
from ..console import plural
from ..files.hardware_files import known_hardware
from ..planning.better_plan import OtherGrids, better_plan_note
from ..planning.shared_grids import fits_grid

OTHER_CHUNK = 256
"""The length of the chunks that the note on padding compares with whole prompts."""


def notes_on_rows(
    plan: Plan, rows: Sequence[RowShape], table: PrefixTable, max_position: int
) -> list[str]:
    """Notes on the padding of a plan, on what rows share, and on rows that end early."""
    notes = [
        padding_note(rows, plan, max_position),
        sharing_note(rows, table, plan.buckets),
        limit_note(plan, rows, max_position),
    ]
    return [note for note in notes if note]


def limit_note(plan: Plan, rows: Sequence[RowShape], max_position: int) -> str | None:
    """A note on where and why rows without `max_tokens` end before the model's context.

    None if they do not.
    """
    count, limit = sum(row.max_tokens is None for row in rows), plan.buckets.max_length
    if not count or limit >= max_position:
        return None
    reason = plan.max_length_reason or "as the plan or --set says"
    return (
        f"{plural(count, 'row')} without max_tokens: at most {limit} tokens each, prompt "
        f"included, of the model's {max_position}: {reason}. Without --plan, --set "
        f"buckets.max_length=N changes it."
    )


def padding_note(rows: Sequence[RowShape], plan: Plan, max_position: int) -> str:
    """A note that compares the padding of whole prompts with the padding of chunked prompts."""
    grid, defaults = plan.buckets, _defaults(plan)
    if not grid.chunks:
        defaults = replace(defaults, chunks=(min(OTHER_CHUNK, grid.max_length),))
    # the other grid may be longer than `grid`, as it rounds prompts up to whole chunks
    other = derive_grid(rows, max_position, defaults)
    return f"prefill: {_padding(rows, grid)}; {_padding(rows, other)} otherwise"


def sharing_note(rows: Sequence[RowShape], table: PrefixTable, grid: BucketGrid) -> str | None:
    """A note on the prompt tokens that rows share; None if there are none.

    Rows that do not fit the grid, or have no room for an answer of their form, are refused. So they
    do not count.
    """
    fitting = [i for i, row in enumerate(rows) if fits_grid(row, grid)]
    lengths = np.array([row.prompt_length for row in rows], np.int64)
    num_tokens = plural(int(lengths[fitting].sum()), "token")
    shared = 0
    if grid.chunks:
        pieces = table.of_rows(fitting).shared_pieces(lengths[fitting], grid.chunks)
        shared = int(pieces.sum())
    if not shared:
        return None
    return f"prompts that begin alike: {shared} of {num_tokens} can be copied"


def better_plan(
    plan: Plan,
    work: Work,
    max_position: int,
    shapes: Mapping[int, RowShape],
    prefixes: PrefixTable,
    outputs: Mapping[int, int],
    run_seconds: float,
) -> str | None:
    """A note on a plan that would have saved much of a finished run; None if there is none.

    Args:
        plan: The plan of the job.
        work: The work of its graphs.
        max_position: The longest sequence of the model.
        shapes: The rows that can run, by number.
        prefixes: What the prompts of all rows share.
        outputs: The average number of output tokens of a row's sequences, by the numbers of the
            rows that have a result.
        run_seconds: The seconds of the run.
    """
    # a finished job does not fail for a note that nobody can compute, as on unknown hardware
    with suppress(KeyError, ValueError):
        return better_plan_note(
            plan.buckets,
            [ExpectedRow(shapes[row], output) for row, output in outputs.items()],
            prefixes.of_rows(list(outputs)),
            OtherGrids(
                GraphPrices.of_target(plan.target, work, known_hardware()),
                _defaults(plan),
                max_position,
            ),
            run_seconds,
        )
    return None


def _defaults(plan: Plan) -> GridDefaults:
    """The aims of grids that are compared with that of a plan."""
    defaults = GridDefaults.for_layout(plan.layout, TargetName.parse(plan.target).platform)
    page = plan.buckets.page
    return defaults if page is None else replace(defaults, page=page)


def _padding(rows: Sequence[RowShape], grid: BucketGrid) -> str:
    longest = grid.prefill[-1].length
    prompts = [row.prompt_length for row in rows]
    lengths = [length for length in prompts if length <= longest]
    real, computed = prefill_padding(lengths, grid.prefill)
    share = (computed - real) / computed if computed else 0.0
    chunks = " and ".join(map(str, grid.chunks))
    how = f"chunks of {chunks}" if chunks else "whole prompts"
    given = f"{plural(real, 'token')} in {plural(len(lengths), 'row')}"
    return f"{given}, {computed} computed in {how}, {share:.1%} padding"
