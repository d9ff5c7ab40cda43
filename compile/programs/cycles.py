"""Cycles of a TPU's program by its compiler's estimates, with prices for other instructions.

The compiler notes `estimated_cycles` for most instructions. The others are priced here: a kernel by
its declared cost, a collective by the links that it uses, and all other instructions by their bytes
and the operations of their products at the peaks of the hardware, whichever takes longer. Copies
and collectives in flight are not counted, because other instructions run at the same time; the time
of memory and links for the whole program is a separate bound.

Knows nothing of models. Every figure is an estimate; nothing was run.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...sharding.communication import sent_bytes
from ..hardware.hardware import Hardware
from ..hardware.interconnect import Interconnect
from .collectives import KINDS, Collective
from .executions import Execution
from .hbm_bytes import CALLERS, Traffic
from .hlo_text import Computation, Instruction, Program, array_sizes

_LIBRARY = '"__ynn_fusion"'

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
            raise ValueError(
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
            return self._link_seconds(computation, instruction)
        if cost := instruction.kernel_cost:
            return self._local_seconds(cost["flops"], cost["bytes_accessed"])
        moved = sum(num_bytes for _, num_bytes in self._traffic.reads(computation, instruction))
        moved += self._traffic.written(computation, instruction)
        return self._local_seconds(product_flops(self._program, computation, instruction), moved)

    def _local_seconds(self, flops: float, num_bytes: float) -> float:
        return max(flops / self._peak, num_bytes / self._hardware.memory_rate)

    def _link_seconds(self, computation: Computation, instruction: Instruction) -> float:
        collective = self._collectives.get((computation.name, instruction.name))
        if collective is None:
            return 0.0
        sent = sent_bytes(collective.kind, collective.num_bytes, collective.group_size)
        return self._interconnect.seconds(collective.kind, collective.mesh_axes, sent)


def product_flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Operations of an instruction's products, also inside a fusion: two for each factor pair."""
    if instruction.opcode == "dot":
        return _dot_flops(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if instruction.opcode != "fusion":
        return 0
    inside = program.computations[dict(instruction.called())["calls"]]
    return sum(product_flops(program, inside, each) for each in inside.instructions.values())


def slow_flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Operations of products in a CPU's program that do not run in the fast library."""
    return (
        0
        if _LIBRARY in instruction.attributes
        else product_flops(program, computation, instruction)
    )


def _dot_flops(computation: Computation, instruction: Instruction) -> int:
    sizes = array_sizes(computation.instructions[instruction.operands[0]].arrays[0])
    dimensions = instruction.attribute("lhs_contracting_dims", r"\{[\d,]*\}") or "{}"
    contracted = [sizes[int(number)] for number in dimensions.strip("{}").split(",") if number]
    return 2 * math.prod(array_sizes(instruction.arrays[0])) * math.prod(contracted)


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """Operations of a matrix product that the TPU's compiler writes as a convolution.

    In B products of [M, K] and [K, N], the operands and the result have B M K, B K N and B M N
    elements, and the product of these numbers is B (B M N K)^2. B is the dilated dimension.
    """
    factors = (computation.instructions[name].arrays[0] for name in instruction.operands)
    elements = math.prod(
        math.prod(array_sizes(array)) for array in (*factors, instruction.arrays[0])
    )
    dilated = instruction.attribute("lhs_dilate", r"[\dx]+") or "1"
    return 2 * math.isqrt(elements // math.prod(map(int, dilated.split("x"))))
