"""Cycles that a TPU's program takes by its compiler's own estimates, and what has none priced.

The compiler notes `estimated_cycles` of most instructions. One without is priced: a kernel by the
cost that it declares, a collective by the links that it is sent over, all others by the bytes that
they move and the operations of their products, at the peaks of the hardware, whichever takes
longer. Copies and collectives in flight are left out, as others run meanwhile: what memory and
links take for all of a program is a bound of its own.

Knows nothing of models. Every figure is an estimate, and nothing here was run.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...sharding.communication import sent_bytes
from ..planning.hardware import Hardware
from ..planning.interconnect import Interconnect
from .collectives import KINDS, Collective
from .executions import Execution
from .hbm_bytes import CALLERS, Traffic
from .hlo_text import Computation, Instruction, Program
from .products import product_flops

_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**63 - 1
"""The compiler writes this where it has no estimate."""


@dataclass(frozen=True)
class Price:
    """Cycles of one run of an instruction."""

    cycles: float
    is_estimated: bool
    """Whether the compiler says so; otherwise it is priced here."""


class Prices:
    """Cycles of the instructions of one program."""

    def __init__(
        self,
        program: Program,
        traffic: Traffic,
        collectives: Iterable[Collective],
        hardware: Hardware,
        interconnect: Interconnect,
    ):
        if hardware.clock is None:
            raise ValueError(
                f"hardware {hardware.name}: expected a clock, as cycles of its programs are asked "
                f"for, got none. Add clock to a hardware table of your own."
            )
        self._program, self._traffic, self._hardware = program, traffic, hardware
        self._clock, self._peak = hardware.clock, max(hardware.flops.values())
        self._interconnect = interconnect
        self._collectives = {(one.computation, one.name): one for one in collectives}

    def of(self, execution: Execution) -> Price | None:
        """The price of one run; None for an instruction that takes no time of its own.

        That is one in flight, or one that takes as long as what it calls.
        """
        computation, one = execution.computation, execution.instruction
        if one.opcode in CALLERS or one.opcode.endswith(("-start", "-update", "-done")):
            return None
        estimate = _ESTIMATE.search(one.attributes)
        if estimate and int(estimate[1]) < _UNKNOWN:
            return Price(int(estimate[1]), is_estimated=True)
        seconds = self._seconds(computation, one)
        return Price(seconds * self._clock, is_estimated=False) if seconds else None

    def _seconds(self, computation: Computation, one: Instruction) -> float:
        if one.opcode in KINDS:
            return self._link_seconds(computation, one)
        if cost := one.kernel_cost:
            return self._local_seconds(cost["flops"], cost["bytes_accessed"])
        moved = sum(num_bytes for _, num_bytes in self._traffic.reads(computation, one))
        moved += self._traffic.written(computation, one)
        return self._local_seconds(product_flops(self._program, computation, one), moved)

    def _local_seconds(self, flops: float, num_bytes: float) -> float:
        return max(flops / self._peak, num_bytes / self._hardware.memory_rate)

    def _link_seconds(self, computation: Computation, one: Instruction) -> float:
        found = self._collectives.get((computation.name, one.name))
        if found is None:
            return 0.0
        sent = sent_bytes(found.kind, found.num_bytes, found.group_size)
        return self._interconnect.seconds(found.kind, found.mesh_axes, sent)
