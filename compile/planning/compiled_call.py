"""What a compiled graph does in a call: operations and bytes, what it sends, the memory it takes.

Bytes, turns of loops, rewritten arguments, cycles and collectives are read from the program's text.
Counts of operations are the compiler's, and stand where they are higher than those of the shapes,
as the compiler counts the body of a loop once, and on GPU nothing. Where XLA cannot write a
program, bytes off the TPU are the compiler's, too, and all else is as the shapes have it. Layers
are alike, so two programs of few of them tell of any number.

Knows nothing of plans. Guarantees: seconds are by the same roofline and the same peaks for a
program and for shapes, each as one part, so their ratio is what the compiler added or saved; where
the compiler's own cycles take longer they count, and none take less than shapes.
"""

from dataclasses import dataclass, replace

import jax

from ...sharding.call import Call
from ...sharding.communication import sent_bytes
from ...sharding.mesh_layout import MeshLayout
from ..programs.collectives import Collective, read_collectives
from ..programs.report import ProgramReport, Totals, read_report
from .cost import CostModel
from .work import Sent, summed

NOTABLE = 1.2
"""A compiled graph that takes so many times as long as predicted is named in reports."""


@dataclass(frozen=True)
class Counted:
    """What is counted of a program, on one device."""

    flops: float
    num_bytes: float
    """Bytes read from and written to main memory; 0 where they cannot be told."""
    sent: Sent | None
    """None where it cannot be read."""
    memory_bytes: float
    """With all that it is given; 0 where the compiler says nothing."""
    loop_turns: float = 0.0
    converted_bytes: float = 0.0
    """Arguments, or slices of them, that are written in another dtype."""
    copied_bytes: float = 0.0
    """Arguments, or slices of them, that are written as they were."""
    cycles: float = 0.0
    """0 where the compiler counts none."""
    seconds: float = 0.0
    """Seconds of the cycles by the clock, or of the bytes by the memory's rate if longer."""

    @classmethod
    def of(
        cls,
        executable: jax.stages.Compiled,
        text: str | None,
        platform: str,
        cost: CostModel,
        memory_bytes: int = 0,
        steps: int = 1,
    ) -> "Counted":
        """Count one executable for a platform, whose decode calls have so many steps."""
        found = executable.cost_analysis() or {}
        counted = cls(found.get("flops", 0.0), 0.0, None, memory_bytes)
        mesh = cost.work.layout.mesh
        if text is None:
            off_tpu = 0.0 if platform == "tpu" else found.get("bytes accessed", 0.0)
            return replace(counted, num_bytes=off_tpu, sent=None if mesh.num_devices > 1 else {})
        report = read_report(text, platform, mesh.sizes, cost.hardware, cost.torus)
        return replace(counted, sent=_sent(text, mesh), **_of_report(report, steps))

    def and_turns(self, more: float, shorter: "Counted") -> "Counted":
        """Of a program with so many more turns of its layers; `shorter` is of one turn less."""

        def grown(longer: float, shorter: float) -> float:
            return longer + more * (longer - shorter)

        sent = None
        if self.sent is not None and shorter.sent is not None:
            before = shorter.sent
            sent = {key: grown(of, before.get(key, 0.0)) for key, of in self.sent.items()}
        numbers = {
            name: grown(number, getattr(shorter, name))
            for name, number in vars(self).items()
            if name != "sent"
        }
        return Counted(sent=sent, **numbers)


@dataclass(frozen=True)
class CompiledCall:
    """A graph's call on one device; of decode, one step."""

    graph: str
    flops: float
    num_bytes: float
    sent: Sent
    seconds: float
    """Seconds by the roofline of all of it together, or by the compiler's cycles if longer."""
    shapes_seconds: float
    """Seconds by the roofline of the work that shapes and rules tell."""
    memory_bytes: int
    """With all that it is given; 0 where the compiler says nothing."""
    moved_bytes: float = 0.0
    """Bytes of main memory that the program moves; 0 where they cannot be told."""
    needed_bytes: float = 0.0
    """Bytes of main memory that the call needs, however it is computed."""
    loop_turns: float = 0.0
    converted_bytes: float = 0.0
    copied_bytes: float = 0.0
    cycles: float = 0.0

    @property
    def factor(self) -> float:
        """How much longer it takes than its shapes alone."""
        return self.seconds / self.shapes_seconds

    @property
    def difference(self) -> str:
        """How the program differs from what is predicted; empty where it does not by much."""
        if self.factor < NOTABLE:
            return ""
        moved, needed, converted, copied = (
            f"{number / 1e9:.2f} GB"
            for number in (
                self.moved_bytes, self.needed_bytes, self.converted_bytes, self.copied_bytes
            )
        )  # fmt: skip
        return (
            f"{self.graph} takes {self.factor:.1f} times what its shapes do: it moves {moved} "
            f"where {needed} are needed, converts {converted} of arguments, copies {copied} of "
            f"them, and makes {self.loop_turns:,.0f} turns of loops"
        )


def compiled_call(name: str, call: Call, counted: Counted, cost: CostModel) -> CompiledCall:
    """A call of a program, of which so much is counted."""
    parts = cost.work.parts(call)
    flops, num_bytes = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    planned = summed(pair for part in parts for pair in part.sent.items())
    more_flops, more_bytes = max(flops, counted.flops), max(num_bytes, counted.num_bytes)
    sent = planned if counted.sent is None else counted.sent
    by_shapes = cost.roofline(flops, num_bytes, planned)
    return CompiledCall(
        graph=name,
        flops=more_flops,
        num_bytes=more_bytes,
        sent=sent,
        seconds=max(by_shapes, cost.roofline(more_flops, more_bytes, sent), counted.seconds),
        shapes_seconds=by_shapes,
        memory_bytes=round(counted.memory_bytes),
        moved_bytes=counted.num_bytes,
        needed_bytes=cost.work.needed(call).total,
        loop_turns=counted.loop_turns,
        converted_bytes=counted.converted_bytes,
        copied_bytes=counted.copied_bytes,
        cycles=counted.cycles,
    )


def _of_report(report: ProgramReport, steps: int) -> dict[str, float]:
    """Figures of a step, with its share of what runs once beside all steps."""
    step, once = _figures(report.step), _figures(report.once)
    return {name: number + once[name] / steps for name, number in step.items()}


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
    """Branches that only some rows ask for are left out."""
    return summed(
        ((one.kind, one.mesh_axes), _sent_for(one, mesh))
        for one in read_collectives(text, mesh.sizes)
        if not one.is_conditional
    )


def _sent_for(one: Collective, mesh: MeshLayout) -> float:
    group = mesh.num_shards(one.mesh_axes)
    return sent_bytes(one.kind, one.times * one.num_bytes, group)
