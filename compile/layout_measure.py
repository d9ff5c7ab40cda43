"""One layout of one model measured by compiling it: memory, collectives, flops, compile seconds.

Knows nothing of files or pictures. A layout that cannot be is not lowered: it comes back with what
is wrong with it.
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
from ..sharding.layout import PHASES, Layout
from ..sharding.legality import check
from .attention_kernels import AUTO_ATTENTION, AttentionPlan, choose_kernels
from .build import compile_with_text, plan_graphs
from .definition import Definition, model_sizes
from .grids.bucket_grid import BucketGrid
from .planning.evidence import read_evidence
from .planning.hardware import Hardware
from .planning.work import Work
from .programs.collectives import Collective, read_collectives
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
    """Only for what some rows ask for, such as sampling or log-probabilities."""
    count: int
    bytes: int
    """Of all of them together, on one device; see `sharding.communication` for what is counted."""
    sent_bytes: float
    """What each device sends for them, by the ring algorithms."""
    per_layer: float
    """Of the count, those inside layers, by layer."""
    bytes_per_layer: float
    formula_bytes_per_layer: float | None
    """What the layout's rules say; None of what only some rows ask for."""


@dataclass
class LayoutResult:
    """What is known of one layout."""

    name: str
    mesh: dict[str, int]
    legal: bool
    findings: list[str]
    """What is wrong: of an illegal layout its rules, of a legal one that it does not compile."""
    bytes_per_device: dict[str, int] = field(default_factory=dict)
    """Of parameters, cache, and temporaries of the graph that needs most."""
    temp_by_phase: dict[str, int] = field(default_factory=dict)
    collectives: list[CollectiveTotal] = field(default_factory=list)
    collectives_from: str = COMPILER
    """Who says so: where XLA cannot write its program as text, the layout's rules on the shapes."""
    flops: float = 0.0
    """On one device, of one prefill call and one decode step together; of Pallas kernels none."""
    flops_from: str = COMPILER
    """Who counted them: where compilers do not, on GPU, or count the layers of a loop as one, those
    of the shapes stand for them."""
    flops_by_phase: dict[str, float] = field(default_factory=dict)
    programs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Evidence of the program of each phase; none of a program that XLA cannot write."""
    attention: dict[str, str] = field(default_factory=dict)
    """The kernel of each phase, and why it was chosen."""
    compile_seconds: float = 0.0
    max_abs_diff: float | None = None
    """Worst difference of logits from one device, where that was asked for."""

    @property
    def verdict(self) -> str:
        """In two words, what is wrong with a layout that has findings."""
        return "does not compile" if self.legal else "illegal"

    def as_json(self) -> dict[str, Any]:
        """The result as one JSON object; without a verification it has no `max_abs_diff`."""
        table = asdict(self)
        if self.max_abs_diff is None:
            del table["max_abs_diff"]
        return table


def measure(
    config: DecoderConfig,
    layout: Layout,
    target: Target,
    grid: BucketGrid,
    dtype: jax.typing.DTypeLike,
    on_graph: Callable[[str, float], None] = lambda name, seconds: None,
    attention: AttentionPlan = AUTO_ATTENTION,
    scan_layers: bool = False,
    hardware: Hardware | None = None,
    torus: Sequence[int] = (),
) -> LayoutResult:
    """Compile the longest prefill and decode graph of a grid under a layout, and read them.

    With `hardware` that has a clock, cycles are told; `torus` are the dimensions of its slice.
    """
    findings = check(layout, model_sizes(config, len(target.devices), grid))
    result = LayoutResult(layout.name, dict(layout.mesh.axes), not findings, findings)
    if findings:
        return result
    placement = target.placement(layout)
    definition = Definition(config, placement.arrangement(config, scan_layers))
    work = Work(definition, jnp.dtype(dtype).name, layout, placement.cache_dtype(dtype))
    result.bytes_per_device = {"params": work.parameter_bytes, "cache": work.grid_bytes(grid)}
    kernels = choose_kernels(config, grid, placement, jnp.dtype(dtype), attention)
    result.attention = kernels.report()
    graphs = {}
    for graph in plan_graphs(definition, grid, placement, jnp.dtype(dtype), attention=attention):
        phase = graph.kind
        # decode graphs come by growing span, prefill graphs by shrinking length
        if phase == "decode" or (phase == "prefill" and phase not in graphs):
            graphs[phase] = graph
    for phase in PHASES:
        try:
            compiled, text, seconds = compile_with_text(graphs[phase])
        except RuntimeError as error:
            # an over-full device is what a comparison should find out
            reason = str(error).strip().partition("\n")[0]
            result.findings.append(
                f"{graphs[phase].name} does not compile for {target.name}: {reason} Try more "
                f"devices, fewer slots, shorter rows or a layout that splits more."
            )
            return result
        on_graph(graphs[phase].name, seconds)
        result.compile_seconds += seconds
        is_decode = phase == "decode"
        call = grid.decode_call(grid.max_length) if is_decode else grid.prefill[-1].call()
        _read(result, compiled, text, call, work)
        if text is not None:
            evidence = read_evidence(text, target.platform, call, work, hardware, torus)
            result.programs[phase] = evidence.as_json()
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
    """Add what one executable says, and the flops of the shapes where it says nothing of them."""
    phase, layout, config = call.phase, work.layout, work.config
    memory = compiled.memory_analysis()
    result.temp_by_phase[phase] = memory.temp_size_in_bytes if memory is not None else 0
    # the body of the loop over steps counts once: one step. That of a loop over layers does, too
    flops = (compiled.cost_analysis() or {}).get("flops")
    if flops is None or work.definition.arrangement.scan_layers:
        result.flops_from = SHAPES
        flops = sum(part.flops for part in work.parts(call))
    result.flops_by_phase[phase] = float(flops)
    formulas = communication.predict_collectives(
        config, layout, call, jnp.dtype(work.dtype).itemsize
    )
    if text is None:
        result.collectives_from = SHAPES
    found = formulas if text is None else read_collectives(text, layout.mesh.sizes)
    result.collectives += _totals(phase, found, formulas, layout, config.num_layers)


def _totals(
    phase: str,
    found: Sequence[Collective | ExpectedCollective],
    formulas: Sequence[ExpectedCollective],
    layout: Layout,
    num_layers: int,
) -> Iterator[CollectiveTotal]:
    """Collectives by kind and mesh axes; the formulas tell of layers, which send nearly all."""
    groups: dict[tuple[str, tuple[str, ...], bool], list[Collective | ExpectedCollective]] = {}
    for one in found:
        is_conditional = isinstance(one, Collective) and one.is_conditional
        groups.setdefault((one.kind, one.mesh_axes, is_conditional), []).append(one)
    for (kind, mesh_axes, is_conditional), members in sorted(groups.items()):
        in_layers = [
            one
            for one in members
            if isinstance(one, ExpectedCollective) or _LAYER_SCOPE.search(one.source)
        ]
        formula = [one for one in formulas if (one.kind, one.mesh_axes) == (kind, mesh_axes)]
        num_bytes = _num_bytes(members)
        group = layout.mesh.num_shards(mesh_axes)
        yield CollectiveTotal(
            phase=phase,
            kind=kind,
            axis="+".join(mesh_axes),
            conditional=is_conditional,
            count=sum(one.times for one in members),
            bytes=num_bytes,
            sent_bytes=communication.sent_bytes(kind, num_bytes, group),
            per_layer=sum(one.times for one in in_layers) / num_layers,
            bytes_per_layer=_num_bytes(in_layers) / num_layers,
            formula_bytes_per_layer=None if is_conditional else _num_bytes(formula) / num_layers,
        )


def _num_bytes(members: Iterable[Collective | ExpectedCollective]) -> int:
    return sum(one.times * one.num_bytes for one in members)
