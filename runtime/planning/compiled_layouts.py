"""Planned layouts in the order that their compiled graphs tell.

Of every plan the prefill graph and the decode graph that it spends most on are compiled for the
target: with one turn of the pattern that the model's layers repeat, and with two, one layer after
the other. What a turn adds is that of every further one, so a deep model takes no longer. A plan's
predicted seconds of each phase are multiplied by how much longer the compiled graph takes under the
roofline than its shapes alone: what the compiler copies, gathers and sends counts, and what it
needs must fit. Every second is a prediction.

Weights are not read, and nothing is run.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from ...compile.abstract_model import AbstractModel
from ...compile.build import compile_with_text, plan_graphs
from ...compile.compiled_graphs import CompiledGraphs
from ...compile.expert_plan import LOSSLESS_EXPERTS, default_experts
from ...compile.planning.compiled_call import CompiledCall, Counted, compiled_call
from ...compile.planning.cost import CostModel
from ...compile.targets import find_target
from ...modelzoo.config import DecoderConfig
from ...modelzoo.layer_groups import longest_repeat
from ...sharding.call import Call
from ...sharding.layout import Layout
from ..devices.graph_memory import memory_of
from .planning import Planned

GIGABYTE = 1e9


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with the best plan under it, and what compiling it told."""

    layout: Layout | None
    cost: CostModel
    planned: Planned
    compiled: dict[str, CompiledCall] = field(default_factory=dict)
    """The costliest graph of each phase; empty of a layout that was not compiled."""
    problem: str = ""
    """Why the compiled graphs cannot run."""

    @property
    def name(self) -> str:
        return "one device" if self.layout is None else f"{self.layout.name} ({self.layout.mesh})"

    @property
    def seconds(self) -> float:
        """Of building and running the plan, by shapes."""
        return self.planned.best.seconds

    @property
    def compiled_seconds(self) -> float:
        """The same by the compiled graphs; infinite where these cannot run."""
        if self.problem:
            return math.inf
        metrics = self.planned.best.simulation.metrics
        uses = {"prefill": metrics.prefill.values(), "decode": metrics.decode.values()}
        more = sum(
            (call.factor - 1) * sum(use.seconds for use in uses[phase])
            for phase, call in self.compiled.items()
        )
        return self.seconds + more


def problems(layouts: Sequence[PlannedLayout]) -> list[str]:
    """Why compiled layouts cannot run, a line each."""
    return [f"{one.name}: {one.problem}" for one in layouts if one.problem]


@dataclass(frozen=True)
class LayoutCompiler:
    """Compiles what decides between layouts of one model on one target."""

    target: str
    config: DecoderConfig
    dtype: str
    on_note: Callable[[str], None] = lambda line: None

    def in_order(self, planned: Sequence[PlannedLayout], count: int) -> list[PlannedLayout]:
        """The first so many, compiled, the fastest first; then the others."""
        started = time.process_time()
        compiled = [self._compiled(one) for one in planned[:count]]
        compiled.sort(key=lambda one: one.compiled_seconds)
        minutes = (time.process_time() - started) / 60
        self.on_note(f"layouts compiled in {minutes:.1f} minutes of the processor")
        return [*compiled, *planned[count:]]

    def _compiled(self, one: PlannedLayout) -> PlannedLayout:
        found = {}
        for phase, (name, call) in _costliest(one).items():
            try:
                found[phase] = compiled_call(name, call, self._counted(one, name), one.cost)
            except RuntimeError as error:
                # an over-full device is what compiling should find out
                reason = str(error).strip().partition("\n")[0]
                return replace(one, problem=f"{name} does not compile: {reason}")
        return replace(one, compiled=found, problem=_too_large(one, found))

    def _counted(self, one: PlannedLayout, name: str) -> Counted:
        """Of the graph with all layers."""
        first, period, turns = longest_repeat(self.config.layer_kinds)
        if turns <= 2:
            return self._read(one, name, self.config)
        shorter, longer = (
            self._read(one, name, self.config.first_layers(first + count * period))
            for count in (1, 2)
        )
        # layers that do not make a whole turn count as their share of one
        return longer.and_turns((self.config.num_layers - first) / period - 2, shorter)

    def _read(self, one: PlannedLayout, name: str, config: DecoderConfig) -> Counted:
        target = find_target(self.target)
        placement = target.placement(one.layout)
        definition = AbstractModel(config, placement.arrangement(config))
        experts = default_experts(config) or LOSSLESS_EXPERTS
        grid = one.planned.best.grid
        graphs = plan_graphs(definition, grid, placement, jnp.dtype(self.dtype), experts)
        graph = next(graph for graph in graphs if graph.name == name)
        executable, text, seconds = compile_with_text(graph)
        layers = f"{config.num_layers} of {self.config.num_layers} layers"
        self.on_note(f"{one.name}: {name}, {layers}, compiled in {seconds:.1f} s")
        memory, steps = memory_of(executable), grid.steps_per_call
        return Counted.of(executable, text, target.platform, one.cost, memory, steps)


def _costliest(one: PlannedLayout) -> dict[str, tuple[str, Call]]:
    """Name and call of the graph of each phase on which a plan spends most."""
    grid, metrics = one.planned.best.grid, one.planned.best.simulation.metrics

    def seconds(uses: dict, name: object) -> float:
        return uses[str(name)].seconds if str(name) in uses else 0.0

    is_scored, kind = not grid.decode_slots, "" if grid.decode_slots else " scored"
    bucket = max(grid.prefill, key=lambda bucket: seconds(metrics.prefill, f"{bucket}{kind}"))
    name = CompiledGraphs.prefill_name(bucket, is_scored)
    found = {"prefill": (name, bucket.call(is_scored=is_scored))}
    if grid.decode_slots:
        span = max(grid.graph_spans, key=lambda span: seconds(metrics.decode, span))
        found["decode"] = CompiledGraphs.decode_name(span), grid.decode_call(span)
    return found


def _too_large(one: PlannedLayout, found: dict[str, CompiledCall]) -> str:
    """What lacks of a device's memory; empty where all fits."""
    device = one.cost.hardware.memory_bytes
    largest = max(found.values(), key=lambda call: call.memory_bytes)
    if largest.memory_bytes <= device:
        return ""
    return (
        f"{largest.graph} needs {largest.memory_bytes / GIGABYTE:.2f} GB on each device, "
        f"{(largest.memory_bytes - device) / GIGABYTE:.2f} GB more than it has."
    )
