"""Make the plan and the prediction of `noria plan`: read the workload, rank layouts, search grids.

All seconds are predictions.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...compile.expert_plan import default_experts
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.plan import Numbers, Plan
from ...compile.plan_evidence import PlanEvidence
from ...compile.planning.cost import CostModel
from ...compile.target_names import TargetName
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ..checkpoint import ModelFiles
from ..console import note, plural
from ..errors import ConfigError, NoPlanFits
from ..files.layout_files import named_layout_tables, read_layout, split_spellings
from .compiled_layouts import LayoutCompiler, PlannedLayout
from .layout_ranking import RankedLayout, Ranking, all_layouts
from .layout_search import LayoutSearch
from .option_values import (
    budget_of,
    calibration_of,
    hardware_of_options,
    numbers_of,
    planned_model,
)
from .plan_options import PlanOptions
from .planner import PlanResult
from .search import SimulatedGrid
from .workload import Workload, read_workload

ALL = "all"
CHECKED, CHOICE = "checked plan", "planner's choice"
"""The names of a given plan and of the planner's own among grids that are compared."""


@dataclass(frozen=True)
class Prediction:
    """A plan, the workload and the costs that it was made from, and the alternatives."""

    plan: Plan
    result: PlanResult
    workload: Workload
    cost: CostModel
    searched: list[PlannedLayout]
    """The layouts with a plan, the fastest first."""
    refused: list[RankedLayout]
    """The layouts without one, with the reasons."""
    seconds: float
    """The seconds that planning took."""

    @property
    def choice(self) -> SimulatedGrid | None:
        """The planner's own grid, if the plan was given; else None."""
        return self.result.others.get(CHOICE)

    @property
    def gap(self) -> float:
        """The largest share of the plan's seconds that a grid of any layout might save, of those
        that were not simulated."""
        seconds = self.result.best.seconds
        bounds = (one.result.search.min_bound for one in self.searched)
        return max(0.0, 1 - min((bound for bound in bounds if bound), default=seconds) / seconds)

    @property
    def evidence(self) -> PlanEvidence:
        """The evidence of the plan."""
        assert self.plan.evidence is not None
        return self.plan.evidence


def workload_of(
    options: PlanOptions, files: ModelFiles, models: Mapping[str, str | None] | None = None
) -> Workload:
    """The workload that the options name; `models` maps the `model` of a row to its adapter."""
    workload = read_workload(
        options.workload,
        files,
        share_of_limit=options.expected_output,
        output=options.from_output,
        models=models,
    )
    return workload.within_context(files.spec.config.max_position)


def predict(
    options: PlanOptions,
    files: ModelFiles,
    workload: Workload | None = None,
    adapters: AdapterGrid | None = None,
) -> Prediction:
    """Find the best plan that the options allow.

    Args:
      options: The options of the plan.
      files: The model.
      workload: The workload; None to read that of the options.
      adapters: The room for adapters.

    Raises:
      NoPlanFits: No layout or no grid fits; the message has the reasons.
      ConfigError: An option or the workload cannot be used.
    """
    started = time.perf_counter()
    config, numbers = files.spec.config, numbers_of(options, files)
    workload = workload or workload_of(options, files)
    _check_workload(options, workload, config.max_position)
    ranking = replace(_ranking(options, files, workload, numbers), adapters=adapters)
    ranked = _rank(options, ranking)
    search = LayoutSearch(options, ranking, workload)
    searched, refused = search.plans(ranked)
    if options.compile_layouts:
        searched = _as_compiled(options, config, numbers, adapters, searched)
    best = searched[0]
    result = search.planner(best.layout, best.cost).with_comparison(best.result)
    grid = replace(best.result.best.grid, structured=workload.structured, adapters=adapters)
    plan = Plan(
        options.target,
        planned_model(options, files),
        numbers,
        grid,
        best.layout,
        default_experts(config),
        max_length_reason=_limit(options, config, workload, grid),
        evidence=_evidence(options, workload, best),
    )
    seconds = time.perf_counter() - started
    return Prediction(plan, result, workload, best.cost, searched, refused, seconds)


def plan_layouts(
    options: PlanOptions, files: ModelFiles, layouts: Sequence[Layout]
) -> tuple[list[PlannedLayout], list[RankedLayout]]:
    """Plan a workload under each of some layouts.

    Returns:
      The layouts with their plans, the fastest first, and those without a plan.

    Raises:
      NoPlanFits: No layout has a plan.
      ConfigError: An option or the workload cannot be used.
    """
    workload = workload_of(options, files)
    _check_workload(options, workload, files.spec.config.max_position)
    ranking = _ranking(options, files, workload, numbers_of(options, files))
    return LayoutSearch(options, ranking, workload).plans(ranking.rank(layouts))


def check_plan(options: PlanOptions, files: ModelFiles, plan: Plan) -> Prediction:
    """Price a given plan for a workload, beside the planner's own under the same layout.

    Target, numbers and layout are those of the plan. Rows that it cannot serve are left out.

    Raises:
      NoPlanFits: The planner finds no plan of its own.
      IllegalLayout: The layout does not fit the model or the plan.
      ConfigError: An option or the workload cannot be used, or no row fits the plan.
    """
    started = time.perf_counter()
    options, grid = replace(options, target=plan.target), plan.buckets
    workload = workload_of(options, files)
    _check_workload(options, workload, files.spec.config.max_position)
    workload = workload.within_grid(grid)
    if not workload.rows:
        raise ConfigError(
            f"--check: expected a plan that serves a row of {options.workload}, got one for rows "
            f"of at most {grid.max_length} tokens, prompt and output together, that serves none. "
            f"Raise buckets.max_length, or plan anew."
        )
    ranking = _ranking(options, files, workload, plan.numbers)
    ranking = replace(ranking, adapters=grid.adapters)
    ranking.require(plan.layout, grid)
    (ranked,) = ranking.rank([plan.layout])
    if ranked.bound is None:
        raise NoPlanFits(f"the layout of the plan cannot serve this:{ranked}")
    layout_search = LayoutSearch(options, ranking, workload)
    ((planned,), _) = layout_search.plans([ranked])
    planner = layout_search.planner(plan.layout, planned.cost)
    result = replace(planner, compared={CHECKED: grid}).with_comparison(planned.result)
    others = dict(result.others)
    search = replace(result.search, best=others.pop(CHECKED))
    others = {CHOICE: result.best, **others}
    result = replace(result, search=search, others=others, uncertainty=None)
    checked = replace(planned, result=result)
    plan = replace(plan, evidence=_evidence(options, workload, checked))
    seconds = time.perf_counter() - started
    return Prediction(plan, result, workload, planned.cost, [checked], [], seconds)


def _check_workload(options: PlanOptions, workload: Workload, max_position: int) -> None:
    """Say how many rows are planned for; refuse a workload without any, and a length too large."""
    if (asked := options.max_length) is not None and asked > max_position:
        raise ConfigError(
            f"--max-length: expected at most {max_position} tokens, the model's longest "
            f"sequence, got {asked}. Lower it."
        )
    rows = plural(len(workload.rows), "row")
    note(f"{rows} to plan for, {workload.num_refused} refused", is_quiet=options.quiet)
    if workload.length_source:
        note(workload.length_source, is_quiet=options.quiet)
    if not workload.rows:
        raise ConfigError(
            f"{options.workload}: expected at least one row of at most {max_position} "
            f"tokens, prompt and output together (the model's longest sequence), got none in "
            f"{plural(workload.num_refused, 'row')}. {workload.first_error}".rstrip()
        )
    longest = max(row.need.min_length for row in workload.rows)
    if asked is not None and asked < longest:
        raise ConfigError(
            f"--max-length: expected at least {longest} tokens, as many as a row of "
            f"{options.workload} may have, got {asked}. Raise it, or leave it out."
        )


def _evidence(options: PlanOptions, workload: Workload, best: PlannedLayout) -> PlanEvidence:
    """The prices that a plan was made from, and what they predict for the workload."""
    simulated, hardware = best.result.best, best.cost.hardware
    run_seconds = simulated.simulation.seconds
    price = None
    if hardware.price_per_hour is not None:
        num_devices = TargetName.parse(options.target).num_devices
        price = hardware.price_per_hour * num_devices * simulated.seconds / 3600
    file = "" if options.calibration is None else options.calibration.name
    costs = best.cost.evidence_of(file, has_pages=simulated.grid.pages is not None)
    return PlanEvidence(
        costs,
        simulated.build_seconds,
        run_seconds,
        workload.output_tokens / run_seconds,
        3600 * len(workload.rows) / run_seconds,
        price,
    )


def _limit(
    options: PlanOptions, config: DecoderConfig, workload: Workload, grid: BucketGrid
) -> str:
    """The reason why rows without `max_tokens` end before the model's context, or empty."""
    is_open = any(row.need.max_tokens is None for row in workload.rows)
    if not is_open or options.max_length is not None or grid.max_length >= config.max_position:
        return ""
    return "noria plan expected no rows that are longer; --max-length plans for more"


def _as_compiled(
    options: PlanOptions,
    config: DecoderConfig,
    numbers: Numbers,
    adapters: AdapterGrid | None,
    searched: list[PlannedLayout],
) -> list[PlannedLayout]:
    """The layouts in the order of their compiled graphs; at least one of them must run."""
    compiler = LayoutCompiler(
        options.target, config, numbers, partial(note, is_quiet=options.quiet), adapters
    )
    ordered = compiler.compile_and_rank(searched, options.compile_layouts)
    if ordered[0].problem:
        problems = " ".join(f"{one.name}: {one.problem}" for one in ordered if one.problem)
        raise NoPlanFits(
            f"none of the compiled layouts can run: {problems} Use "
            f"more devices, shorter rows or less memory (--max-memory-gb), or compile more layouts."
        )
    return ordered


def _ranking(
    options: PlanOptions, files: ModelFiles, workload: Workload, numbers: Numbers
) -> Ranking:
    config, hardware = files.spec.config, hardware_of_options(options)
    target = TargetName.parse(options.target)
    return Ranking(
        config,
        workload.rows,
        hardware,
        numbers.dtype,
        budget_of(options, config, hardware),
        target.num_devices,
        target.torus,
        calibration_of(options, files, numbers),
        target.platform,
        numbers.weight_rules,
        numbers.cache_codes,
        page=options.page,
        table=workload.prefixes,
        max_length=options.max_length,
        may_chunk=options.chunks != "never",
        must_chunk=options.chunks == "always",
    )


def _rank(options: PlanOptions, ranking: Ranking) -> list[RankedLayout]:
    """The ranked layouts to choose from; if `--layout` names a single one, it must be legal."""
    layouts = _layouts(options, ranking.num_devices)
    if not layouts:
        raise ConfigError("--layout: expected at least one layout, got none.")
    if len(layouts) == 1:
        ranking.require(layouts[0])
    ranked = ranking.rank(layouts)
    if len(layouts) > 1:
        for ranked_layout in ranked:
            note(str(ranked_layout).strip(), is_quiet=options.quiet)
    return ranked


def _layouts(options: PlanOptions, count: int) -> list[Layout | None]:
    """The layouts of `--layout`, or else all named layouts over all meshes of `count` devices."""
    if options.layout is not None and options.layout != ALL:
        return [read_layout(spelling, count) for spelling in split_spellings(options.layout)]
    return [None] if count == 1 else list(all_layouts(named_layout_tables(), count))
