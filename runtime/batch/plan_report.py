"""Reports the plan of a job: a short table, notes, and the work that its padding wasted.

The notes are about padding, what rows share, rows that end early, and a better plan. Knows nothing
of files, and of how a plan is made. All seconds of notes are predictions.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

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
from ...sharding.call import Call
from ..console import align_columns, plural
from ..files.hardware_files import known_hardware
from ..planning.better_plan import OtherGrids, better_plan_note
from ..planning.search import simulate_in_order
from ..planning.shared_grids import expected_rows, fits_grid

MAX_SIMULATED = 1_024
"""The largest numbers of rows and of slots with which calls are simulated for the note on padding.
"""
OTHER_CHUNK = 256
"""The length of the chunks that the note on padding compares with whole prompts."""


def plan_table(plan: Plan, work: Work) -> str:
    """The plan as a table of its buckets, slots, pages and memory."""
    grid = plan.buckets
    output = "" if grid.embed else ", prompt and output"
    rows = [
        ("plan", f"{plan.target}, {plan.model.source}, {plan.numbers.dtype}"),
        ("rows", f"at most {plural(grid.max_length, 'token')}{output}"),
        ("embed" if grid.embed else "prefill", ", ".join(map(str, grid.prefill))),
        ("decode", _decode(grid)),
    ]
    if grid.prefixes is not None:
        shared, groups = plural(len(grid.prefixes.shared), "prefix"), grid.prefixes.groups
        rows.append(("prefixes", f"{shared}, read by at most {plural(groups, 'group')} of rows"))
    if plan.layout is not None:
        rows.append(("layout", f"{plan.layout.name}: {plan.layout.mesh}"))
    weights, cache = _size(work.parameter_bytes), _size(work.grid_bytes(grid))
    where = "" if plan.layout is None else " on each device"
    pages = ""
    if grid.pages is not None:
        pages = f" in {plural(grid.pages, 'page')} of {grid.page} entries"
    rows.append(("memory", f"weights {weights}, cache {cache}{pages}{where}"))
    return "\n".join(align_columns(rows, num_left=2))


def with_waste(statistics: Mapping[str, Any], grid: BucketGrid, work: Work) -> dict[str, Any]:
    """The statistics of a run, with operations, wasted operations and wasted seconds by bucket.

    A bucket's calls all take the same operations, so the share of its padding is the share of its
    operations and seconds that is wasted. Operations are those of all devices.
    """
    devices, buckets = work.layout.mesh.num_devices, statistics["buckets"]
    calls: dict[str, Call] = {}
    for bucket, is_scored in product(grid.prefill, (False, True)):
        name, entries = f"{bucket}{' scored' if is_scored else ''}", None
        if grid.chunks and (use := buckets["prefill"].get(name)) and use["calls"]:
            entries = use["read_entries"] / use["calls"]
        calls[name] = grid.prefill_call(bucket, is_scored=is_scored, entries=entries)
    steps = {
        name: grid.average_step(*(use[f"{x}_entries"] / use["steps"] for x in ("read", "seen")))
        for name, use in buckets["decode"].items()
        if use["steps"]
    }
    flops = {
        name: devices * sum(part.flops for part in work.parts(call))
        for name, call in (*calls.items(), *steps.items())
    }
    found = {
        phase: {
            name: use | _wasted(use, flops.get(name), counted, real)
            for name, use in buckets[phase].items()
        }
        for phase, counted, real in (
            ("prefill", "calls", "real_tokens"),
            ("decode", "steps", "emitted_tokens"),
        )
    }
    return {**statistics, "buckets": found}


def _wasted(
    use: Mapping[str, Any], flops: float | None, counted: str, real: str
) -> dict[str, float | None]:
    """The figures of one bucket; `flops` are those of one call, None if they are not known."""
    computed = use["computed_tokens"]
    share = 1 - use[real] / computed if computed else 0.0
    total = None if flops is None else flops * use[counted]
    return {
        "flops": total,
        "wasted_flops": None if total is None else total * share,
        "wasted_seconds": use["seconds"] * share,
    }


def _decode(grid: BucketGrid) -> str:
    if grid.embed:
        return "none, as texts become vectors"
    if not grid.decode_slots:
        return "none, as rows are only scored"
    steps, longest = plural(grid.steps_per_call, "step"), plural(grid.max_length, "token")
    return f"{plural(grid.decode_slots, 'slot')}, {steps} in a call of rows up to {longest}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


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
    """The padding of a job in words, that of rows without prompts in its calls included.

    For large jobs the calls are taken as full, because such rows are few.
    """
    fitting = [row for row in rows if fits_grid(row, grid)]
    lengths = [row.prompt_length for row in fitting]
    if max(len(fitting), grid.decode_slots) <= MAX_SIMULATED:
        simulation = simulate_in_order(expected_rows(fitting, grid), grid, None)
        uses = simulation.metrics.prefill.values()
        real, computed = (
            sum(getattr(use, name) for use in uses) for name in ("real_tokens", "computed_tokens")
        )
    else:
        real, computed = prefill_padding(lengths, grid.prefill)
    share = (computed - real) / computed if computed else 0.0
    chunks = " and ".join(map(str, grid.chunks))
    how = f"chunks of {chunks}" if chunks else "whole prompts"
    given = f"{plural(real, 'token')} in {plural(len(lengths), 'row')}"
    return f"{given}, {computed} computed in {how}, {share:.1%} padding"
