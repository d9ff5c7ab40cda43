"""Reorder planned layouts by the graphs that the compiler makes of them.

For each plan, the costliest prefill graph and the costliest decode graph are compiled for the
target, with unrolled layers: once with one repetition of the model's pattern of layer kinds, and
once with two. The difference is the cost of each further repetition, so a deep model compiles no
longer than a shallow one. The predicted seconds of a phase are multiplied by the ratio of two
rooflines, that of the compiled graph and that of its shapes: the ratio includes what the compiler
copies, gathers and sends. The compiled graphs must fit into the memory of a device. All seconds are
predictions.

Guarantees: no weights are read, and nothing is run.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from ...compile.abstract_model import AbstractModel
from ...compile.build import compile_with_text, plan_graphs
from ...compile.expert_plan import LOSSLESS_EXPERTS, default_experts
from ...compile.graphs.graph_kinds import DECODE, GraphKey, call_of, kinds_of
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.plan import Numbers
from ...compile.planning.candidates import Candidate
from ...compile.planning.compiled_call import CompiledCall, ProgramCounts, compiled_call
from ...compile.planning.cost import CostModel
from ...compile.targets import find_target
from ...modelzoo.config import DecoderConfig
from ...modelzoo.layer_groups import longest_repeat
from ...sharding.layout import Layout
from ..console import GIGABYTE
from ..devices.compiler_messages import without_alarms
from ..devices.graph_memory import required_bytes
from .planner import PlanResult


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with the best plan under it, and the figures of its compiled graphs."""

    layout: Layout | None
    cost: CostModel
    result: PlanResult
    candidates: Sequence[Candidate] = ()
    """The grids among which the search chose the plan."""
    compiled: dict[str, CompiledCall] = field(default_factory=dict)
    """The costliest graph of each phase, compiled; empty if the layout was not compiled."""
    problem: str = ""
    """The reason why the compiled graphs cannot run; empty if they can."""

    @property
    def name(self) -> str:
        return "one device" if self.layout is None else f"{self.layout.name} ({self.layout.mesh})"

    @property
    def bound(self) -> float:
        """The lower bound of the seconds of all plans under the layout."""
        return min((one.bound for one in self.candidates), default=0.0)

    @property
    def seconds(self) -> float:
        """Predicted seconds to compile and to run the plan, from the shapes of its graphs."""
        return self.result.best.seconds

    @property
    def compiled_seconds(self) -> float:
        """Predicted seconds, corrected by the compiled graphs; infinite if they cannot run."""
        if self.problem:
            return math.inf
        metrics = self.result.best.simulation.metrics
        uses = {"prefill": metrics.prefill.values(), "decode": [metrics.decode]}
        more = sum(
            (call.factor - 1) * sum(use.seconds for use in uses[phase])
            for phase, call in self.compiled.items()
        )
        return self.seconds + more


@dataclass(frozen=True)
class LayoutCompiler:
    """Compiles the costliest graphs of layouts of one model on one target."""

    target: str
    config: DecoderConfig
    numbers: Numbers
    on_note: Callable[[str], None] = lambda line: None
    adapters: AdapterGrid | None = None
    """The room for adapters."""

    @without_alarms()
    def compile_and_rank(self, planned: Sequence[PlannedLayout], count: int) -> list[PlannedLayout]:
        """The first `count` layouts, compiled and sorted by seconds, then the others."""
        started = time.process_time()
        compiled = [self._compiled(layout_plan) for layout_plan in planned[:count]]
        compiled.sort(key=lambda layout_plan: layout_plan.compiled_seconds)
        minutes = (time.process_time() - started) / 60
        self.on_note(f"layouts compiled in {minutes:.1f} minutes of the processor")
        return [*compiled, *planned[count:]]

    def _compiled(self, layout_plan: PlannedLayout) -> PlannedLayout:
        compiled = {}
        for phase, key in _costliest(layout_plan).items():
            call = call_of(layout_plan.result.best.grid, key)
            try:
                counted = self._counted(layout_plan, key)
                compiled[phase] = compiled_call(key, call, counted, layout_plan.cost)
            except RuntimeError as error:
                # not enough memory on a device is the most common reason
                reason = str(error).strip().partition("\n")[0]
                return replace(layout_plan, problem=f"{key} does not compile: {reason}")
        return replace(layout_plan, compiled=compiled, problem=_too_large(layout_plan, compiled))

    def _counted(self, layout_plan: PlannedLayout, key: GraphKey) -> ProgramCounts:
        """The counts of a compiled graph, extrapolated to all layers."""
        first, period, turns = longest_repeat(self.config.layers)
        if turns <= 2:
            return self._read(layout_plan, key, self.config)
        shorter, longer = (
            self._read(layout_plan, key, self.config.first_layers(first + count * period))
            for count in (1, 2)
        )
        # layers that do not fill the pattern count as their share of a repetition
        return longer.with_more_turns((self.config.num_layers - first) / period - 2, shorter)

    def _read(
        self, layout_plan: PlannedLayout, key: GraphKey, config: DecoderConfig
    ) -> ProgramCounts:
        target = find_target(self.target)
        placement = target.placement(layout_plan.layout)
        arrangement = placement.arrangement(config, cache_codes=self.numbers.cache_codes)
        definition = AbstractModel(config, arrangement, self.numbers.weight_rules, self.adapters)
        experts = default_experts(config) or LOSSLESS_EXPERTS
        grid = replace(layout_plan.result.best.grid, adapters=self.adapters)
        graphs = plan_graphs(definition, grid, placement, jnp.dtype(self.numbers.dtype), experts)
        graph = next(graph for graph in graphs if graph.key == key)
        executable, text, seconds = compile_with_text(graph)
        layers = f"{config.num_layers} of {self.config.num_layers} layers"
        self.on_note(f"{layout_plan.name}: {key}, {layers}, compiled in {seconds:.1f} s")
        memory, steps = required_bytes(executable), grid.steps_per_call
        return ProgramCounts.from_executable(
            executable, text, target.platform, layout_plan.cost, memory, steps
        )


def _costliest(layout_plan: PlannedLayout) -> dict[str, GraphKey]:
    """The graph of each phase on which a plan spends most seconds."""
    grid, metrics = layout_plan.result.best.grid, layout_plan.result.best.simulation.metrics

    kind, suffix = kinds_of(grid, PrefillBucket)[0], "" if grid.decode_slots else " scored"
    seconds = {name: use.seconds for name, use in metrics.prefill.items()}
    bucket = max(grid.prefill, key=lambda bucket: seconds.get(f"{bucket}{suffix}", 0.0))
    costliest = {"prefill": GraphKey(kind, bucket)}
    if grid.decode_slots:
        costliest["decode"] = DECODE
    return costliest


def _too_large(layout_plan: PlannedLayout, compiled: dict[str, CompiledCall]) -> str:
    """The reason why the compiled graphs do not fit into a device; empty if they fit."""
    device = layout_plan.cost.hardware.memory_bytes
    largest = max(compiled.values(), key=lambda call: call.memory_bytes)
    if largest.memory_bytes <= device:
        return ""
    return (
        f"{largest.graph} needs {largest.memory_bytes / GIGABYTE:.2f} GB on each device, "
        f"{(largest.memory_bytes - device) / GIGABYTE:.2f} GB more than a device has."
    )
