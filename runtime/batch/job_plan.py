"""Makes the plan of a batch job: a given plan or one derived from its rows, with overrides.

Rows without `max_tokens` may continue to the model's context if the cache for it fits into a share
of the memory; if not, the plan gives the reason why they end earlier. Does not know about files.
"""

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...compile.expert_plan import default_experts
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import derive_grid, slot_use, with_chunks, with_overrides
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefill_ladder import prefill_padding
from ...compile.grids.prefix_choice import own_lengths, prefixes_of_rows
from ...compile.grids.prefix_table import PrefixTable
from ...compile.grids.row_shape import RowShape
from ...compile.grids.span_slots import with_ragged_slots
from ...compile.grids.structured_grid import StructuredGrid
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.run_bounds import ExpectedRow
from ...compile.planning.work import Work
from ...compile.target_names import TargetName
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ...sharding.legality import chunk_findings
from ..checkpoint.published_numbers import overridden_numbers, override_plan
from ..console import plural
from ..devices.graph_memory import GIGABYTE, device_bytes
from ..files.hardware_files import known_hardware
from ..files.run_config import apply_overrides
from ..planning.better_plan import OtherGrids, better_plan_note
from ..planning.forecast import expected_rows, fits_grid, forecast_steps
from ..planning.shared_grids import with_sharing
from ..planning.target_work import cache_fits, room_on_accelerator, work_of
from ..pods.peers import Peers

_KEYS_WITHOUT_SHARING = {"chunk", "prefill", "decode_spans", "decode_graphs"}
"""If the user sets one of these keys of `[buckets]`, no grid with shared beginnings is tried."""
_KEYS_WITHOUT_PREFIXES = {"decode_slots", "max_length", "score", "span_slots", "slot_groups"}
"""If the user sets one of these keys of `[buckets]`, no prefixes are derived.

With prefixes, slots must divide into groups, and some of the keys would mean something else.
"""
OTHER_CHUNK = 256
"""The length of the chunks that the note on padding compares with whole prompts."""


def given_plan(table: Mapping[str, Any], overrides: Sequence[str]) -> Plan:
    """The plan in a table, changed by the user's overrides.

    Raises:
        ValueError: A key is unknown or its value is invalid; the error names the key.
    """
    return Plan.from_table(override_plan(table, overrides))


def derived_plan(
    rows: Sequence[RowShape],
    target: Target,
    model: PlannedModel,
    numbers: Numbers,
    config: DecoderConfig,
    layout: Layout | None,
    overrides: Sequence[str],
    peers: Peers,
    table: PrefixTable,
    structured: StructuredGrid | None = None,
    adapters: AdapterGrid | None = None,
) -> Plan:
    """A plan for the rows of a job, changed by the user's overrides.

    Args:
        rows: The rows that can run.
        target: The devices.
        model: The model's name and fingerprint.
        numbers: The dtype and the format of weights.
        config: The model's configuration.
        layout: The layout; None for one device.
        overrides: Settings `a.b=value`; some of them also change the sizes that are derived.
        peers: The processes of the job, which must derive the same plan.
        table: What the prompts of the rows share.
        structured: The forms of answers that rows ask for.
        adapters: The room that the adapters of the job need.

    Raises:
        ValueError: A key of the overrides is unknown or its value is invalid.
    """
    # overrides of some keys change the derived sizes; later all overrides are applied
    overridden = apply_overrides({"numbers": numbers.to_table()}, overrides)
    asked, numbers = overridden.get("buckets", {}), overridden_numbers(numbers, overrides)
    defaults = with_overrides(GridDefaults.for_layout(layout, target.platform), asked)
    work = work_of(config, numbers, layout, target, adapters)
    prices = GraphPrices.of_target(target.name, work, known_hardware())
    # the memory of process 0, so that all processes derive the same plan
    memory_bytes = peers.broadcast(device_bytes(target))
    holds = room_on_accelerator(work, target, memory_bytes)
    fits, reason = None, ""
    if defaults.max_length is None and any(row.max_tokens is None for row in rows):
        share = defaults.cpu_cache_share if target.platform == "cpu" else defaults.cache_share
        free_bytes = memory_bytes - work.parameter_bytes
        fits = partial(cache_fits, work, share * free_bytes)
        reason = (
            f"a longer cache would take more than {share:g} of the memory that weights leave "
            f"({free_bytes / GIGABYTE:.1f} GB per device)"
        )

    def derive(rows: Sequence[RowShape], defaults: GridDefaults) -> BucketGrid:
        return derive_grid(rows, config.max_position, defaults, fits, prices, holds)

    grid = derive(rows, defaults)
    may_share = layout is None or not any(chunk_findings(layout))
    if may_share and not _KEYS_WITHOUT_SHARING & set(asked):
        fitting = [i for i, row in enumerate(rows) if fits_grid(row, grid)]
        expected = expected_rows([rows[i] for i in fitting], grid)
        shared = table.of_rows(fitting)
        may_group = not _KEYS_WITHOUT_PREFIXES & set(asked)
        grid = with_sharing(grid, expected, shared, defaults, prices, derive, may_group=may_group)
    if grid.max_length >= defaults.longest_span(config.max_position):
        reason = ""
    experts = default_experts(config)
    grid = replace(grid, structured=structured, adapters=adapters)
    plan = Plan(target.name, model, numbers, grid, layout, experts, max_length_reason=reason)
    plan = given_plan(tomllib.loads(plan.to_toml()), overrides)
    grid = plan.buckets
    rows = rows_after_prefixes(rows, table, grid)
    use = slot_use(rows, has_chunks=bool(grid.chunks))
    # rows are submitted in order of length; if they wait for slots, the slots hold rows of similar
    # length at any time and need equal capacity
    if use.num_sequences <= grid.decode_slots and grid.prefixes is None:
        grid = with_ragged_slots(grid, use, plan.layout)
    if not {"decode_spans", "decode_graphs"} & set(asked):
        grid = prices.without_idle_spans(grid, forecast_steps(rows, grid))
    return replace(plan, buckets=grid)


def rows_after_prefixes(
    rows: Sequence[RowShape], table: PrefixTable, grid: BucketGrid
) -> Sequence[RowShape]:
    """The rows without the planned prefixes that they begin with."""
    if grid.prefixes is None:
        return rows
    lengths = np.array([row.prompt_length for row in rows], np.int64)
    own = own_lengths(lengths.tolist(), prefixes_of_rows(table, lengths, grid.prefixes))
    return [replace(row, prompt_length=length) for row, length in zip(rows, own, strict=True)]


def limit_note(plan: Plan, rows: Sequence[RowShape], max_position: int) -> str | None:
    """A note on where and why rows without `max_tokens` end before the model's context.

    None if they do not.
    """
    count, limit = sum(row.max_tokens is None for row in rows), plan.buckets.max_length
    if not count or limit >= max_position:
        return None
    reason = plan.max_length_reason or "as the plan or --set says"
    after = "" if plan.buckets.prefixes is None else ", after its prefix"
    return (
        f"{plural(count, 'row')} without max_tokens: at most {limit} tokens each, prompt "
        f"included{after}, of the model's {max_position}: {reason}. Without --plan, --set "
        f"buckets.max_length=N changes it."
    )


def padding_note(rows: Sequence[RowShape], plan: Plan, max_position: int) -> str:
    """A note that compares the padding of whole prompts with the padding of chunked prompts."""
    grid, defaults = plan.buckets, _defaults(plan)
    if not grid.chunks:
        defaults = with_chunks(defaults, min(OTHER_CHUNK, grid.max_length))
    # the other grid may be longer than `grid`, as it rounds prompts up to whole chunks
    other = derive_grid(rows, max_position, defaults)
    return f"prefill: {_padding(rows, grid)}; {_padding(rows, other)} otherwise"


def sharing_note(rows: Sequence[RowShape], table: PrefixTable, grid: BucketGrid) -> str | None:
    """A note on the prompt tokens that rows share; None if there are none.

    Rows that do not fit the grid, or have no room for an answer of their form, are refused. So they
    do not count.
    """
    own_rows = rows_after_prefixes(rows, table, grid)
    fitting = [i for i, row in enumerate(own_rows) if fits_grid(row, grid)]
    lengths = np.array([row.prompt_length for row in rows], np.int64)
    num_tokens = plural(int(lengths[fitting].sum()), "token")
    if (prefixes := grid.prefixes) is not None:
        planned = prefixes_of_rows(table, lengths, prefixes)
        found = [prefix for i in fitting if (prefix := planned[i])]
        num_saved = sum(p.length for p in found) - sum(p.length for p in set(found))
        return (
            f"prompts that begin alike: {num_saved} of {num_tokens} are "
            f"read from {plural(len(set(found)), 'beginning')} and not computed again"
        )
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
                may_chunk=plan.layout is None or not any(chunk_findings(plan.layout)),
            ),
            run_seconds,
        )
    return None


def _defaults(plan: Plan) -> GridDefaults:
    """The aims of grids that are compared with that of a plan."""
    return GridDefaults.for_layout(plan.layout, TargetName.parse(plan.target).platform)


def _padding(rows: Sequence[RowShape], grid: BucketGrid) -> str:
    longest = grid.prefill[-1].length
    prompts = [row.prompt_length for row in rows]
    lengths = [length for length in prompts if grid.computed_length(length) <= longest]
    real, computed = prefill_padding(lengths, grid.prefill)
    share = (computed - real) / computed if computed else 0.0
    chunks = " and ".join(map(str, grid.chunks))
    how = f"chunks of {chunks}" if chunks else "whole prompts"
    given = f"{plural(real, 'token')} in {plural(len(lengths), 'row')}"
    return f"{given}, {computed} computed in {how}, {share:.1%} padding"
