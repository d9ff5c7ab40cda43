"""A report of a compiled program from its text: bytes, loops, rewritten arguments, cycles.

The figures of a decode graph are those of one step, and what runs once for all steps of a call
stands apart. A line of source has an excess where its instructions move more than one reading of
each argument, in the order of the program. Memory counts as `hbm_bytes` says; with the CPU and the
GPU, which have but one, it is all that is read and written.

Knows nothing of models. What a program should move is for others to say: `Needed` in planning.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..planning.hardware import Hardware
from ..planning.interconnect import Interconnect
from .arguments import Arguments
from .collectives import read_collectives
from .cycles import Prices
from .executions import Execution, Executions
from .hbm_bytes import Traffic
from .hlo_text import Computation, Program, array_bytes, read_program
from .products import slow_flops
from .rewritten import LARGE, Rewritten, rewritten

MOVES_SHOWN = 12
_NUMBERED = re.compile(r"(\blayers[.\[]|_[A-Z]+\[)[\d:]+")


@dataclass(frozen=True)
class Moved:
    """Bytes that the instructions of one line of source move."""

    line: str
    operation: str
    """The place in the traced function, such as `jit(graph)/while/body/layers.0/dot_general`."""
    num_bytes: int
    excess: int
    """Beyond one reading of each argument."""
    is_once: bool


@dataclass(frozen=True)
class Loop:
    """Loops of one line of source that are alike."""

    line: str
    operation: str
    turns: int | None
    """Each time that one runs; None where the text leaves it open."""
    runs: int
    bytes_a_turn: int
    is_once: bool

    @property
    def all_turns(self) -> int:
        """The turns of all runs together; one of each run where the text leaves it open."""
        return self.runs * (1 if self.turns is None else self.turns)


@dataclass(frozen=True)
class Rewrite:
    """An argument that one line of source rewrites."""

    line: str
    argument: str
    array: str
    num_bytes: int
    """Written, all runs together."""
    is_converted: bool
    is_once: bool


@dataclass(frozen=True)
class SlowProduct:
    """Products of one line of source that no library runs."""

    line: str
    array: str
    flops: int
    is_once: bool


@dataclass(frozen=True)
class Cycles:
    """Cycles by the compiler's estimates, and of what has none."""

    cycles: float
    priced_share: float
    """The share of the cycles that is priced here, as the compiler has no estimate."""
    seconds: float
    """Seconds of the cycles by the clock, or of all bytes by memory, whichever is longer."""


@dataclass(frozen=True)
class Totals:
    """The figures of a step, or of what runs once beside all steps."""

    bytes_moved: int
    loop_turns: int
    converted_bytes: int
    copied_bytes: int
    slow_flops: int
    cycles: Cycles | None
    """None where the program's compiler counts none."""


@dataclass(frozen=True)
class ProgramReport:
    """The figures of one program in a call."""

    step: Totals
    """The totals of one step of decode, or of a whole call elsewhere."""
    once: Totals
    """Beside the steps of a decode call; nothing elsewhere."""
    moved: tuple[Moved, ...]
    """The largest excess first."""
    loops: tuple[Loop, ...]
    """Without the loop over steps; the most turns first."""
    rewrites: tuple[Rewrite, ...]
    slow_products: tuple[SlowProduct, ...]

    @property
    def smallest_turn(self) -> int | None:
        """The fewest bytes that a turn of a loop moves; None without loops."""
        return min((loop.bytes_a_turn for loop in self.loops), default=None)

    def as_json(self) -> dict[str, Any]:
        """The report as one JSON object, with the largest lines alone."""
        table = asdict(self)
        return {
            **table.pop("step"),
            "smallest_turn_bytes": self.smallest_turn,
            **table,
            "moved": table["moved"][:MOVES_SHOWN],
        }


def read_report(
    hlo_text: str,
    platform: str,
    mesh_sizes: Mapping[str, int],
    hardware: Hardware | None = None,
    torus: Sequence[int] = (),
    least: int = LARGE,
) -> ProgramReport:
    """Read the text that `program_text` gives.

    Args:
      platform: Slow products are those of the CPU.
      mesh_sizes: The axes of its mesh in order.
      hardware: Of one device; with a clock, cycles are told.
      torus: The dimensions of the interconnect; without them it is a switch.
      least: Bytes of the smallest argument that counts as rewritten.
    """
    program = read_program(hlo_text)
    traffic = Traffic(program)
    prices = None
    if hardware is not None and hardware.clock is not None:
        collectives = read_collectives(hlo_text, mesh_sizes)
        interconnect = Interconnect(hardware, mesh_sizes, torus)
        prices = Prices(program, traffic, collectives, hardware, interconnect)
    return _Reader(program, traffic, prices, hardware, platform, least).report()


class _Reader:
    """Sums over the executions of one program."""

    def __init__(
        self,
        program: Program,
        traffic: Traffic,
        prices: Prices | None,
        hardware: Hardware | None,
        platform: str,
        least: int,
    ):
        self._program, self._traffic, self._prices = program, traffic, prices
        self._hardware, self._platform, self._least = hardware, platform, least
        self._arguments = Arguments(program)
        entry = program.computations[program.entry].instructions.values()
        self._unread = {
            int(one.arguments): sum(map(array_bytes, one.arrays))
            for one in entry
            if one.opcode == "parameter"
        }
        """Bytes of each argument of which no first reading is counted yet."""
        self._moved: Counter[tuple[str, str, bool]] = Counter()
        self._excess: Counter[tuple[str, str, bool]] = Counter()
        self._loops: Counter[tuple[str, str, int | None, int, bool]] = Counter()
        self._rewrites: Counter[tuple[str, Rewritten, bool]] = Counter()
        self._slow: Counter[tuple[str, str, bool]] = Counter()
        self._cycles: dict[tuple[bool, bool], float] = defaultdict(float)

    def report(self) -> ProgramReport:
        executions = Executions(self._program, self._traffic)
        for execution in executions:
            if execution.instruction.opcode == "while":
                self._count_loop(execution, executions)
            else:
                self._count(execution)
        moved = [
            Moved(*of[:2], num_bytes, self._excess[of], of[2])
            for of, num_bytes in self._moved.items()
        ]
        loops = [
            Loop(line, operation, turns, runs, num_bytes, is_once)
            for (line, operation, turns, num_bytes, is_once), runs in self._loops.items()
        ]
        rewrites = [
            Rewrite(line, x.argument, x.array, times * x.num_bytes, x.is_converted, is_once)
            for (line, x, is_once), times in self._rewrites.items()
        ]
        slow = [SlowProduct(*of[:2], flops, of[2]) for of, flops in self._slow.items()]

        def totals(*, is_once: bool) -> Totals:
            rewritten = [one for one in rewrites if one.is_once == is_once]
            num_bytes = sum(one.num_bytes for one in moved if one.is_once == is_once)
            return Totals(
                bytes_moved=num_bytes,
                loop_turns=sum(one.all_turns for one in loops if one.is_once == is_once),
                converted_bytes=sum(one.num_bytes for one in rewritten if one.is_converted),
                copied_bytes=sum(one.num_bytes for one in rewritten if not one.is_converted),
                slow_flops=sum(one.flops for one in slow if one.is_once == is_once),
                cycles=self._cycles_of(num_bytes, is_once),
            )

        return ProgramReport(
            totals(is_once=False),
            totals(is_once=True),
            tuple(sorted(moved, key=lambda one: (-one.excess, -one.num_bytes))),
            tuple(sorted(loops, key=lambda one: -one.all_turns)),
            tuple(sorted(rewrites, key=lambda one: -one.num_bytes)),
            tuple(sorted(slow, key=lambda one: -one.flops)),
        )

    def _count_loop(self, one: Execution, executions: Executions) -> None:
        if not executions.is_steps(one.instruction):
            body = dict(one.instruction.called())["body"]
            turns, num_bytes = executions.turns(one), self._traffic.of_run(body)
            self._loops[*self._place(one), turns, num_bytes, one.is_once] += one.times

    def _count(self, one: Execution) -> None:
        computation, instruction, times = one.computation, one.instruction, one.times
        line, operation = self._place(one)
        reads = self._traffic.reads(computation, instruction)
        num_bytes = sum(num_bytes for _, num_bytes in reads)
        num_bytes += self._traffic.written(computation, instruction)
        if num_bytes:
            place = line, operation, one.is_once
            self._moved[place] += times * num_bytes
            needed = 0 if one.is_once else self._first_readings(computation, reads, times)
            self._excess[place] += times * num_bytes - needed
        for found in rewritten(self._program, self._arguments, one, self._least):
            self._rewrites[line, found, one.is_once] += times
        is_cpu = self._platform == "cpu"
        if is_cpu and (flops := slow_flops(self._program, computation, instruction)):
            self._slow[line, instruction.arrays[0], one.is_once] += times * flops
        if self._prices and (price := self._prices.of(one)):
            self._cycles[one.is_once, price.is_estimated] += times * price.cycles

    def _first_readings(
        self, computation: Computation, reads: Iterable[tuple[str, int]], times: int
    ) -> int:
        """Bytes of arguments among those read that were not read before."""
        total = 0
        for name, num_bytes in reads:
            argument = self._arguments.of(computation, name)
            if argument is not None:
                first = min(times * num_bytes, self._unread[argument])
                self._unread[argument] -= first
                total += first
        return total

    def _place(self, one: Execution) -> tuple[str, str]:
        """Line and operation; of what the compiler added, the argument that it moves.

        Layers are alike, so their numbers are left out.
        """
        line, operation = self._program.line(one.instruction), one.instruction.source
        if not line:
            number = self._arguments.of_result(one.computation, one.instruction)
            operation = operation or one.instruction.opcode.removesuffix("-done")
            operation += "" if number is None else f" of {self._arguments.names[number]}"
        return line, _NUMBERED.sub(r"\1*", operation)

    def _cycles_of(self, num_bytes: int, is_once: bool) -> Cycles | None:
        if self._prices is None:
            return None
        hardware = self._hardware
        assert hardware is not None and hardware.clock is not None, "they have made the prices"
        priced = self._cycles[is_once, False]
        cycles = priced + self._cycles[is_once, True]
        seconds = max(cycles / hardware.clock, num_bytes / hardware.memory_rate)
        return Cycles(cycles, priced / cycles if cycles else 0.0, seconds)
