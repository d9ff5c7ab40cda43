"""The work of a compiled graph in a call: operations, bytes, communication and memory.

Bytes, loop iterations, rewritten arguments, cycles and collectives are read from the program's
text. Operations are the maximum of the compiler's count and of the count from shapes, because the
compiler counts the body of a loop once, and nothing on GPU. Where XLA cannot write a program as
text, bytes are the compiler's (except on TPU), and everything else comes from shapes. Layers are
alike, so two programs of few layers give the figures for any number of layers.

Knows nothing of plans. Guarantees: seconds of a program and of shapes come from the same roofline
with the same peaks, each as one part, so their ratio is the compiler's effect. If the compiler's
own cycles take longer, they are used; the result is never below the seconds of the shapes.
"""

from dataclasses import dataclass, replace

import jax

from ...sharding.call import Call
from ...sharding.communication import sent_bytes
from ...sharding.mesh_layout import MeshLayout
from ..graphs.graph_kinds import GraphKey
from ..programs.collectives import read_collectives
from ..programs.report import Totals, read_report
from .cost import CostModel
from .work import Sent, sum_by_key

NOTABLE = 1.2
"""Reports name a compiled graph if its time is at least this multiple of the predicted time."""


@dataclass(frozen=True)
class ProgramCounts:
    """Counts of a program on one device."""

    flops: float
    num_bytes: float
    """Bytes read from and written to main memory; 0 if unknown."""
    sent: Sent | None
    """Bytes sent to other devices; None if unknown."""
    memory_bytes: float
    """Memory with arguments; 0 if the compiler does not report it."""
    loop_turns: float = 0.0
    converted_bytes: float = 0.0
    """Bytes of arguments, or of slices of them, that are written in another dtype."""
    copied_bytes: float = 0.0
    """Bytes of arguments, or of slices of them, that are copied as they are."""
    cycles: float = 0.0
    """Cycles; 0 if the compiler does not estimate them."""
    seconds: float = 0.0
    """Seconds of the cycles by the clock, or of the bytes by the memory's rate if that is longer.
    """

    @classmethod
    def from_executable(
        cls,
        executable: jax.stages.Compiled,
        text: str | None,
        platform: str,
        cost: CostModel,
        memory_bytes: int = 0,
        steps: int = 1,
    ) -> "ProgramCounts":
        """Count one executable.

        Args:
          executable: The compiled graph.
          text: Its text, or None if XLA cannot write it.
          platform: `cpu`, `gpu` or `tpu`.
          cost: The cost model of its layout and hardware.
          memory_bytes: Memory that the executable needs, arguments included.
          steps: Decode steps of a call; the counts are for one step.
        """
        analysis = executable.cost_analysis() or {}
        counted = cls(analysis.get("flops", 0.0), 0.0, None, memory_bytes)
        mesh = cost.work.layout.mesh
        if text is None:
            off_tpu = 0.0 if platform == "tpu" else analysis.get("bytes accessed", 0.0)
            return replace(counted, num_bytes=off_tpu, sent=None if mesh.num_devices > 1 else {})
        report = read_report(text, platform, mesh.sizes, cost.hardware, cost.torus)
        # a step has its share of the work that runs once for all steps
        step, once = _figures(report.step), _figures(report.once)
        figures = {name: number + once[name] / steps for name, number in step.items()}
        return replace(counted, sent=_sent(text, mesh), **figures)

    def with_more_turns(self, more: float, shorter: "ProgramCounts") -> "ProgramCounts":
        """Extrapolate to a program with `more` additional iterations of the loop over layers.

        `shorter` is a program with one iteration less than this one.
        """

        def grown(longer: float, shorter: float) -> float:
            return longer + more * (longer - shorter)

        sent = None
        if self.sent is not None and shorter.sent is not None:
            before = shorter.sent
            sent = {
                key: grown(num_bytes, before.get(key, 0.0)) for key, num_bytes in self.sent.items()
            }
        numbers = {
            name: grown(number, getattr(shorter, name))
            for name, number in vars(self).items()
            if name != "sent"
        }
        return ProgramCounts(sent=sent, **numbers)


@dataclass(frozen=True, kw_only=True)
class CompiledCall(ProgramCounts):
    """A graph's call on one device; for decode, one step.

    No operations, bytes or seconds are fewer than those from shapes and rules.
    """

    graph: GraphKey
    sent: Sent
    shapes_seconds: float
    """Seconds by the roofline of the work from shapes and rules."""
    moved_bytes: float = 0.0
    """Bytes of main memory that the program moves; 0 if unknown."""
    needed_bytes: float = 0.0
    """Bytes of main memory that the call needs, however it is computed."""

    @property
    def factor(self) -> float:
        """Ratio of its seconds to those of its shapes alone."""
        return self.seconds / self.shapes_seconds

    @property
    def difference(self) -> str:
        """A description of the difference from the prediction; empty if it is small."""
        if self.factor < NOTABLE:
            return ""
        moved, needed, converted, copied = (
            f"{number / 1e9:.2f} GB"
            for number in (
                self.moved_bytes, self.needed_bytes, self.converted_bytes, self.copied_bytes
            )
        )  # fmt: skip
        return (
            f"{self.graph} takes {self.factor:.1f} times the time predicted from its shapes: it "
            f"moves {moved} where {needed} are needed, converts {converted} of arguments, copies "
            f"{copied} of them, and runs {self.loop_turns:,.0f} loop iterations"
        )


def compiled_call(
    key: GraphKey, call: Call, counted: ProgramCounts, cost: CostModel
) -> CompiledCall:
    """Combine the counts of a program with the work of its call."""
    parts = cost.work.parts(call)
    flops, num_bytes = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    int8_flops = sum(part.int8_flops for part in parts)
    planned = sum_by_key(pair for part in parts for pair in part.sent.items())
    more_flops, more_bytes = max(flops, counted.flops), max(num_bytes, counted.num_bytes)
    sent = planned if counted.sent is None else counted.sent
    by_shapes = cost.roofline(flops, num_bytes, planned, int8_flops)
    by_program = cost.roofline(more_flops, more_bytes, sent, int8_flops)
    more = {
        "flops": more_flops,
        "num_bytes": more_bytes,
        "sent": sent,
        "memory_bytes": round(counted.memory_bytes),
        "seconds": max(by_shapes, by_program, counted.seconds),
    }
    return CompiledCall(
        **vars(counted) | more,
        graph=key,
        shapes_seconds=by_shapes,
        moved_bytes=counted.num_bytes,
        needed_bytes=cost.work.needed(call).total,
    )


def _figures(totals: Totals) -> dict[str, float]:
    return {
        "num_bytes": totals.bytes_moved,
        "loop_turns": totals.loop_turns,
        "converted_bytes": totals.converted_bytes,
        "copied_bytes": totals.copied_bytes,
        "cycles": totals.cycles.cycles if totals.cycles else 0.0,
        "seconds": totals.cycles.seconds if totals.cycles else 0.0,
    }


def _sent(text: str, mesh: MeshLayout) -> Sent:
    """Bytes sent by kind and mesh axes, without branches that only some rows need."""
    return sum_by_key(
        ((x.kind, x.mesh_axes), sent_bytes(x.kind, x.times * x.num_bytes, group))
        for x in read_collectives(text, mesh.sizes)
        for group in [mesh.num_shards(x.mesh_axes)]
        if not x.is_conditional
    )
