"""What a compiled graph does in a call: operations and bytes, what it sends, the memory it takes.

The compiler counts the body of a loop once, and on GPU counts nothing: its counts of operations and
bytes stand where they are higher than those of the shapes. Collectives are read from the program.

Knows nothing of plans. Guarantees: seconds are by the same roofline and the same peaks for a
program and for shapes, each as one part, so their ratio is what the compiler added or saved.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from ...sharding.communication import sent_bytes
from ...sharding.mesh_layout import MeshLayout
from ..collectives import Collective, read_collectives
from .cost import CostModel
from .work import Call


@dataclass(frozen=True)
class CompiledCall:
    """A graph's call on one device; of decode, one step."""

    graph: str
    flops: float
    num_bytes: float
    sent: Mapping[str, float]
    """Bytes to other devices, by mesh axes joined by `+`."""
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


def compiled_call(
    name: str, call: Call, executable: jax.stages.Compiled, cost: CostModel, memory_bytes: int
) -> CompiledCall:
    """Read an executable of a call."""
    parts = cost.work.parts(call)
    flops, num_bytes = sum(part.flops for part in parts), sum(part.bytes for part in parts)
    planned = _added(part.sent for part in parts)
    counted = executable.cost_analysis() or {}
    more_flops = max(flops, counted.get("flops", 0.0))
    more_bytes = max(num_bytes, counted.get("bytes accessed", 0.0))
    sent = _sent(executable, cost.work.layout.mesh)
    return CompiledCall(
        graph=name,
        flops=more_flops,
        num_bytes=more_bytes,
        sent=sent,
        seconds=cost.roofline(more_flops, more_bytes, sent),
        shapes_seconds=cost.roofline(flops, num_bytes, planned),
        memory_bytes=memory_bytes,
    )


def _added(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for name, number in table.items():
            total[name] = total.get(name, 0.0) + number
    return total


def _sent(executable: jax.stages.Compiled, mesh: MeshLayout) -> dict[str, float]:
    """Bytes by mesh axes; branches that only some rows ask for are left out."""
    if mesh.num_devices == 1:
        return {}
    found = read_collectives(executable.as_text() or "", mesh.sizes)
    return _added(
        {"+".join(one.mesh_axes): _sent_for(one, mesh)} for one in found if not one.is_conditional
    )


def _sent_for(one: Collective, mesh: MeshLayout) -> float:
    group = mesh.num_shards(one.mesh_axes)
    return sent_bytes(one.kind, one.times * one.num_bytes, group)
