"""The plan of a batch job: given, or derived from its rows, and then changed by overrides.

Rows without `max_tokens` may go on to the model's context where the cache for it fits into a share
of the memory; where it does not, the plan says why they end before. Knows nothing of files.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from ...compile.abstract_model import AbstractModel
from ...compile.expert_plan import default_experts
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import (
    RowShape,
    derive_grid,
    slot_use,
    with_chunks,
    with_overrides,
)
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefill_ladder import prefill_padding
from ...compile.grids.span_slots import with_ragged_slots
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.hardware import hardware_of
from ...compile.planning.work import Work
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ..console import plural
from ..files.hardware_files import known_hardware
from ..files.run_config import apply_overrides
from ..planning.forecast import forecast_steps
from ..pods.peers import Peers

GIGABYTE = 10**9
OTHER_CHUNK = 256
"""The chunk length that whole prompts are compared with in the note on padding."""


def given_plan(table: Mapping[str, Any], overrides: Sequence[str]) -> Plan:
    """The plan in a table, changed by the user's overrides; ValueError names a wrong key."""
    return Plan.from_table(apply_overrides(table, overrides))


def derived_plan(
    rows: Sequence[RowShape],
    target: Target,
    model: PlannedModel,
    numbers: Numbers,
    config: DecoderConfig,
    layout: Layout | None,
    overrides: Sequence[str],
    peers: Peers,
) -> Plan:
    """A plan for the rows of a job, changed by the user's overrides; ValueError names a wrong
    key."""
    # other sizes are derived from some of the keys; then all keys are set
    asked = apply_overrides({}, overrides).get("buckets", {})
    defaults = with_overrides(GridDefaults.for_layout(layout), asked)
    placement = target.placement(layout)
    definition = AbstractModel(config, placement.arrangement(config))
    work = Work(definition, numbers.dtype, layout, placement.cache_dtype(numbers.dtype))
    prices = GraphPrices.of_target(target.name, work, known_hardware())
    fits, reason = None, ""
    if defaults.max_length is None and any(row.max_tokens is None for row in rows):
        share = defaults.cpu_cache_share if target.platform == "cpu" else defaults.cache_share
        # the memory of process 0, so that all derive the same plan
        left = peers.broadcast(_memory_bytes(target)) - work.parameter_bytes
        fits = partial(_fits, work, share * left)
        reason = (
            f"the cache of more would take over {share:g} of the memory that the weights leave "
            f"({left / GIGABYTE:.1f} GB a device)"
        )
    grid = derive_grid(rows, config.max_position, defaults, fits, prices)
    if grid.max_length >= defaults.longest_span(config.max_position):
        reason = ""
    experts = default_experts(config)
    plan = Plan(target.name, model, numbers, grid, layout, experts, max_length_reason=reason)
    plan = given_plan(tomllib.loads(plan.to_toml()), overrides)
    grid = plan.buckets
    use = slot_use(rows, has_chunks=bool(grid.chunks))
    # rows are sorted, so where they wait for slots these hold rows of similar length at any time,
    # and need equal capacity
    if use.num_sequences <= grid.decode_slots:
        grid = with_ragged_slots(grid, use, plan.layout)
    if not {"decode_spans", "decode_graphs"} & set(asked):
        grid = prices.without_idle_spans(grid, forecast_steps(rows, grid))
    return replace(plan, buckets=grid)


def _fits(work: Work, allowed: float, slots: int, length: int) -> bool:
    return work.cache_bytes(slots, length) <= allowed


def _memory_bytes(target: Target) -> int:
    """The memory of a device in whole GB, as devices of a kind may differ by less.

    For a CPU it is that of the hardware table, so that a job has the same plan on every machine.
    """
    if target.platform == "cpu":
        return int(hardware_of(target.name, known_hardware()).memory_bytes)
    # devices of other processes do not tell their memory
    own = next(device for device in target.devices if device.process_index == jax.process_index())
    found = own.memory_stats() or {}
    return found.get("bytes_limit", 0) // GIGABYTE * GIGABYTE


def limit_note(plan: Plan, rows: Sequence[RowShape], max_position: int) -> str | None:
    """A note if rows without `max_tokens` end before the model's context: where, and why."""
    count, limit = sum(row.max_tokens is None for row in rows), plan.buckets.max_length
    if not count or limit >= max_position:
        return None
    reason = plan.max_length_reason or "so the plan or --set says"
    return (
        f"{plural(count, 'row')} without max_tokens: at most {limit} tokens each, prompt "
        f"included, of the model's {max_position}: {reason}. Without --plan, --set "
        f"buckets.max_length=N changes it."
    )


def padding_note(
    rows: Sequence[RowShape], grid: BucketGrid, layout: Layout | None, max_position: int
) -> str:
    """A note that compares the padding of whole prompts and of prompts in chunks."""
    defaults = GridDefaults.for_layout(layout)
    if not grid.chunks:
        defaults = with_chunks(defaults, min(OTHER_CHUNK, grid.max_length))
    # whole chunks may need longer rows than the grid has
    other = derive_grid(rows, max_position, defaults)
    return f"prefill: {_padding(rows, grid)}; {_padding(rows, other)} otherwise"


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
