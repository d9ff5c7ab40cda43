"""Cycles of a TPU's program by its compiler's estimates, with prices for other instructions.

The compiler notes `estimated_cycles` for most instructions. The others are priced here: a kernel by
its declared cost, a collective by the links that it uses, and all other instructions by their bytes
and the operations of their products at the peaks of the hardware, whichever takes longer. Copies
and collectives in flight are not counted, because other instructions run at the same time; the time
of memory and links for the whole program is a separate bound.

Knows nothing of models. Every figure is an estimate; nothing was run.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...modelzoo.errors import UserError
from ...sharding.communication import sent_bytes
from ..hardware.hardware import Hardware
from ..hardware.interconnect import Interconnect
from .collectives import KINDS, Collective
from .executions import Execution
from .hbm_bytes import CALLERS, Traffic
from .hlo_text import Computation, Instruction, Program
from .products import product_flops

_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**63 - 1
"""The compiler's value for a missing estimate."""


@dataclass(frozen=True)
class Price:
    """Cycles of one run of an instruction."""

    cycles: float
    is_estimated: bool
    """Whether the cycles are the compiler's estimate; otherwise they are priced here."""


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
            raise UserError(
                f"hardware {hardware.name}: expected a clock, which cycles of its programs need, "
                f"got none. Add clock to a hardware table of your own."
            )
        self._program, self._traffic, self._hardware = program, traffic, hardware
        rates = (rate for dtype, rate in hardware.flops.items() if dtype != "int8")
        self._clock, self._peak = hardware.clock, max(rates)
        self._interconnect = interconnect
        self._collectives = {
            (instruction.computation, instruction.name): instruction for instruction in collectives
        }

    def of(self, execution: Execution) -> Price | None:
        """The price of one run; None for an instruction that takes no time of its own.

        These are instructions in flight, and instructions whose time is that of the computations
        that they call.
        """
        computation, instruction = execution.computation, execution.instruction
        if instruction.opcode in CALLERS or instruction.opcode.endswith(
            ("-start", "-update", "-done")
        ):
            return None
        estimate = _ESTIMATE.search(instruction.attributes)
        if estimate and int(estimate[1]) < _UNKNOWN:
            return Price(int(estimate[1]), is_estimated=True)
        seconds = self._seconds(computation, instruction)
        return Price(seconds * self._clock, is_estimated=False) if seconds else None

    def _seconds(self, computation: Computation, instruction: Instruction) -> float:
        if instruction.opcode in KINDS:
            collective = self._collectives.get((computation.name, instruction.name))
            if collective is None:
                return 0.0
            sent = sent_bytes(collective.kind, collective.num_bytes, collective.group_size)
            return self._interconnect.seconds(collective.kind, collective.mesh_axes, sent)
        if cost := instruction.kernel_cost:
            return self._local_seconds(cost["flops"], cost["bytes_accessed"])
        moved = sum(num_bytes for _, num_bytes in self._traffic.reads(computation, instruction))
        moved += self._traffic.written(computation, instruction)
        return self._local_seconds(product_flops(self._program, computation, instruction), moved)

    def _local_seconds(self, flops: float, num_bytes: float) -> float:
        return max(flops / self._peak, num_bytes / self._hardware.memory_rate)
