"""Compiles one layout of a model and reads memory, collectives, flops and compile seconds.

An illegal layout is not lowered: its result has the findings. Knows nothing of files or pictures.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ..modelzoo.config import DecoderConfig
from ..sharding import communication
from ..sharding.call import Call
from ..sharding.layer_shapes import ExpectedCollective
from ..sharding.layout import Layout
from ..sharding.legality import check
from ..sharding.placement import Placement
from .abstract_model import AbstractModel, model_sizes
from .attention_kernels import AUTO_ATTENTION, AttentionPlan, cache_dtype, choose_kernels
from .build import GraphSpec, compile_with_text, plan_graphs
from .graphs.graph_kinds import DECODE, GraphKey, call_of
from .grids.bucket_grid import BucketGrid
from .hardware.hardware import Hardware
from .planning.evidence import Evidence
from .planning.work import Work
from .programs.collectives import Collective, read_collectives
from .programs.report import read_report
from .targets import Target

COMPILER, SHAPES = "the compiler", "shapes"
_LAYER_SCOPE = re.compile(r"/layers\.[\d:]+/")


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one kind over the same mesh axes in one prefill call or one decode step."""

    phase: str
    kind: str
    axis: str
    """Mesh axes, joined by `+`."""
    conditional: bool
    """Whether they run only if some row needs them, for example for sampling or log-probabilities.
    """
    count: int
    bytes: int
    """Bytes of all these collectives on one device; `sharding.communication` defines the count."""
    sent_bytes: float
    """Bytes that each device sends for them in the ring algorithms."""
    per_layer: float
    """Number of collectives inside layers, divided by the number of layers."""
    bytes_per_layer: float
    formula_bytes_per_layer: float | None
    """Bytes that the layout's rules predict; None for conditional collectives."""


@dataclass
class LayoutResult:
    """The measurements of one layout."""

    name: str
    mesh: dict[str, int]
    legal: bool
    findings: list[str]
    """Errors: the broken rules of an illegal layout, or why a legal one failed."""
    verdict: str = ""
    """The failure of a layout with findings: `illegal`, `does not compile` or `not finite`."""
    bytes_per_device: dict[str, int] = field(default_factory=dict)
    """Bytes of parameters and of the cache, and the largest temporaries of a graph."""
    temp_by_phase: dict[str, int] = field(default_factory=dict)
    collectives: list[CollectiveTotal] = field(default_factory=list)
    collectives_from: str = COMPILER
    """Source of the collectives: the compiler, or the layout's rules where XLA cannot write its
    program as text."""
    flops: float = 0.0
    """Flops on one device of one prefill call and one decode step together, without Pallas
    kernels."""
    flops_from: str = COMPILER
    """Source of the flops: the compiler, or the shapes where it reports none (GPU) or counts a
    scanned layer once."""
    flops_by_phase: dict[str, float] = field(default_factory=dict)
    programs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evidence from the program of each phase; missing for a program that XLA cannot write as
    text."""
    attention: dict[str, str] = field(default_factory=dict)
    """The kernel of each phase, and the reason for it."""
    compile_seconds: float = 0.0
    max_abs_diff: float | None = None
    """Largest difference of logits from one device, if it was asked for."""
    tolerance: float | None = None
    """The largest difference of a layout that is equal to one device."""
    weights: str | None = None
    """The weights of the comparison: `checkpoint` or `random`."""

    predicted: dict[str, Any] | None = None
    """The figures of the layout's plan for a workload, if there is one."""

    @property
    def agreement(self) -> str:
        """Whether a layout is equal to one device: `equal`, `differs`, or empty if nobody asked."""
        if self.max_abs_diff is None or self.tolerance is None:
            return ""
        return "equal" if self.max_abs_diff <= self.tolerance else "differs"

    def as_json(self) -> dict[str, Any]:
        """The result as one JSON object; with the agreement, if layouts were compared."""
        table = asdict(self)
        if not self.agreement:
            of_comparison = ("max_abs_diff", "tolerance", "weights")
            return {key: x for key, x in table.items() if key not in of_comparison}
        return table | {"agreement": self.agreement}


@dataclass(frozen=True)
class MeasuredModel:
    """A model and its grid, of which the longest prefill graph and decode are compiled."""

    config: DecoderConfig
    grid: BucketGrid
    dtype: jax.typing.DTypeLike
    """The dtype of weights and activations."""
    attention: AttentionPlan = AUTO_ATTENTION
    """The kernels that the plan names."""
    scan_layers: bool = False
    """Whether repeated layers run in a loop."""

    def graphs(self, model: AbstractModel, placement: Placement) -> list[GraphSpec]:
        """The longest prefill graph and decode graph under a layout."""
        dtype, grid = jnp.dtype(self.dtype), self.grid
        planned = plan_graphs(model, grid, placement, dtype, attention=self.attention)
        graphs = {graph.key: graph for graph in planned}
        longest = GraphKey("prefill", grid.prefill[-1]), DECODE
        return [graphs[key] for key in longest]


def measure(
    measured: MeasuredModel,
    layout: Layout,
    target: Target,
    *,
    on_graph: Callable[[str, float], None] = lambda name, seconds: None,
    hardware: Hardware | None = None,
    torus: Sequence[int] = (),
) -> LayoutResult:
    """Compile the longest prefill graph and decode graph of a grid under a layout, and read them.

    Args:
      measured: The model and its grid.
      layout: The layout to measure.
      target: Devices, present or not.
      on_graph: Called with name and seconds after each compile.
      hardware: Rates of the target. If it has a clock, the evidence has cycles.
      torus: Dimensions of the target's slice.
    """
    config, grid, dtype = measured.config, measured.grid, jnp.dtype(measured.dtype)
    findings = check(layout, model_sizes(config, len(target.devices), grid))
    result = LayoutResult(layout.name, dict(layout.mesh.axes), not findings, findings)
    if findings:
        result.verdict = "illegal"
        return result
    placement = target.placement(layout)
    model = AbstractModel(config, placement.arrangement(config, measured.scan_layers))
    kernels = choose_kernels(config, grid, placement, dtype, measured.attention)
    stored = cache_dtype(config, placement.platform, dtype, choices=kernels)
    work = Work(model, dtype.name, layout, stored)
    result.bytes_per_device = {"params": work.parameter_bytes, "cache": work.grid_bytes(grid)}
    result.attention = kernels.report()
    for graph in measured.graphs(model, placement):
        try:
            compiled, text, seconds = compile_with_text(graph)
        except RuntimeError as error:
            # a comparison of layouts should report a device whose memory is too small
            reason = str(error).strip().partition("\n")[0]
            result.verdict = "does not compile"
            result.findings.append(
                f"{graph.key} does not compile for {target.name}: {reason} Try more "
                f"devices, fewer slots, shorter rows or a layout that splits more."
            )
            return result
        on_graph(str(graph.key), seconds)
        result.compile_seconds += seconds
        call = call_of(grid, graph.key)
        _read(result, compiled, text, call, work)
        if text is not None:
            report = read_report(text, target.platform, layout.mesh.sizes, hardware, torus)
            result.programs[call.phase] = Evidence(report, work.needed(call)).as_json()
    result.bytes_per_device["temp"] = max(result.temp_by_phase.values())
    result.flops = sum(result.flops_by_phase.values())
    return result


def _read(
    result: LayoutResult,
    compiled: jax.stages.Compiled,
    text: str | None,
    call: Call,
    work: Work,
) -> None:
    """Add the properties of one executable; flops come from shapes if the compiler has none."""
    phase, layout, config = call.phase, work.layout, work.config
    memory = compiled.memory_analysis()
    result.temp_by_phase[phase] = memory.temp_size_in_bytes if memory is not None else 0
    # the compiler counts the body of a loop once: for the loop over steps that is one step, but a
    # loop over layers would count as one layer
    flops = (compiled.cost_analysis() or {}).get("flops")
    if flops is None or work.model.arrangement.scan_layers:
        result.flops_from = SHAPES
        flops = sum(part.flops for part in work.parts(call))
    result.flops_by_phase[phase] = float(flops)
    formulas = communication.predict_collectives(
        config, layout, call, jnp.dtype(work.dtype).itemsize
    )
    if text is None:
        result.collectives_from = SHAPES
    collectives = formulas if text is None else read_collectives(text, layout.mesh.sizes)
    result.collectives += _totals(phase, collectives, formulas, layout, config.num_layers)


def _totals(
    phase: str,
    collectives: Sequence[Collective | ExpectedCollective],
    formulas: Sequence[ExpectedCollective],
    layout: Layout,
    num_layers: int,
) -> Iterator[CollectiveTotal]:
    """Collectives by kind and mesh axes; the formulas cover layers, which send most bytes."""
    groups: dict[tuple[str, tuple[str, ...], bool], list[Collective | ExpectedCollective]] = {}
    for collective in collectives:
        is_conditional = isinstance(collective, Collective) and collective.is_conditional
        groups.setdefault((collective.kind, collective.mesh_axes, is_conditional), []).append(
            collective
        )
    for (kind, mesh_axes, is_conditional), members in sorted(groups.items()):
        in_layers = [
            collective
            for collective in members
            if isinstance(collective, ExpectedCollective) or _LAYER_SCOPE.search(collective.source)
        ]
        formula = [
            collective
            for collective in formulas
            if (collective.kind, collective.mesh_axes) == (kind, mesh_axes)
        ]
        num_bytes = _num_bytes(members)
        group = layout.mesh.num_shards(mesh_axes)
        yield CollectiveTotal(
            phase=phase,
            kind=kind,
            axis="+".join(mesh_axes),
            conditional=is_conditional,
            count=sum(collective.times for collective in members),
            bytes=num_bytes,
            sent_bytes=communication.sent_bytes(kind, num_bytes, group),
            per_layer=sum(collective.times for collective in in_layers) / num_layers,
            bytes_per_layer=_num_bytes(in_layers) / num_layers,
            formula_bytes_per_layer=None if is_conditional else _num_bytes(formula) / num_layers,
        )


def _num_bytes(members: Iterable[Collective | ExpectedCollective]) -> int:
    return sum(collective.times * collective.num_bytes for collective in members)
