"""What a compiled graph does in a call: operations and bytes, what it sends, the memory it takes.

Counts of operations and bytes stand where they are higher than those of the shapes, as the compiler
counts the body of a loop once, and on GPU nothing. On TPU it counts arrays in memory on the chip
again wherever they are read, several times the bytes that main memory moves; so there these are
read from the program's text, as collectives are everywhere. Where XLA cannot write it, bytes on TPU
and what is sent are those of the shapes. Layers are alike, so two programs of few of them tell of
any number.

Knows nothing of plans. Guarantees: seconds are by the same roofline and the same peaks for a
program and for shapes, each as one part, so their ratio is what the compiler added or saved.
"""

from dataclasses import dataclass

import jax

from ...sharding.call import Call
from ...sharding.communication import sent_bytes
from ...sharding.mesh_layout import MeshLayout
from ..programs.collectives import Collective, read_collectives
from ..programs.hbm_bytes import hbm_bytes
from ..programs.program_text import program_text
from .cost import CostModel
from .work import Sent, summed


@dataclass(frozen=True)
class Counted:
    """What is counted of a program, on one device."""

    flops: float
    num_bytes: float
    """Of main memory, read and written; 0 where they cannot be told."""
    sent: Sent | None
    """None where it cannot be read."""
    memory_bytes: float
    """With all that it is given; 0 where the compiler says nothing."""

    @classmethod
    def of(
        cls, executable: jax.stages.Compiled, platform: str, mesh: MeshLayout, memory_bytes: int
    ) -> "Counted":
        """Of one executable for devices of a platform."""
        found, text = executable.cost_analysis() or {}, program_text(executable)
        num_bytes = found.get("bytes accessed", 0.0)
        if platform == "tpu":
            num_bytes = 0.0 if text is None else hbm_bytes(text)
        return cls(found.get("flops", 0.0), num_bytes, _sent(text, mesh), memory_bytes)

    def and_turns(self, more: float, shorter: "Counted") -> "Counted":
        """Of a program with so many more turns of its layers; `shorter` is of one turn less."""

        def grown(longer: float, shorter: float) -> float:
            return longer + more * (longer - shorter)

        sent = None
        if self.sent is not None and shorter.sent is not None:
            before = shorter.sent
            sent = {key: grown(of, before.get(key, 0.0)) for key, of in self.sent.items()}
        return Counted(
            grown(self.flops, shorter.flops),
            grown(self.num_bytes, shorter.num_bytes),
            sent,
            grown(self.memory_bytes, shorter.memory_bytes),
        )


@dataclass(frozen=True)
class CompiledCall:
    """A graph's call on one device; of decode, one step."""

    graph: str
    flops: float
    num_bytes: float
    sent: Sent
    seconds: float
    """By the roofline of all of it together."""
    shapes_seconds: float
    """The same of the work that shapes and rules tell."""
    memory_bytes: int
    """With all that it is given; 0 where the compiler says nothing."""

    @property
    def factor(self) -> float:
        """How much longer it takes than its shapes alone."""
        return self.seconds / self.shapes_seconds


def compiled_call(name: str, call: Call, counted: Counted, cost: CostModel) -> CompiledCall:
    """A call of a program, of which so much is counted."""
    parts = cost.work.parts(call)
    flops, num_bytes = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    planned = summed(pair for part in parts for pair in part.sent.items())
    more_flops, more_bytes = max(flops, counted.flops), max(num_bytes, counted.num_bytes)
    sent = planned if counted.sent is None else counted.sent
    return CompiledCall(
        graph=name,
        flops=more_flops,
        num_bytes=more_bytes,
        sent=sent,
        seconds=cost.roofline(more_flops, more_bytes, sent),
        shapes_seconds=cost.roofline(flops, num_bytes, planned),
        memory_bytes=round(counted.memory_bytes),
    )


def _sent(text: str | None, mesh: MeshLayout) -> Sent | None:
    """Branches that only some rows ask for are left out."""
    if mesh.num_devices == 1:
        return {}
    if text is None:
        return None
    return summed(
        ((one.kind, one.mesh_axes), _sent_for(one, mesh))
        for one in read_collectives(text, mesh.sizes)
        if not one.is_conditional
    )


def _sent_for(one: Collective, mesh: MeshLayout) -> float:
    group = mesh.num_shards(one.mesh_axes)
    return sent_bytes(one.kind, one.times * one.num_bytes, group)
