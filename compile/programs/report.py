"""A report of a compiled program from its text: bytes, loops, rewritten arguments, cycles.

The figures of a decode graph are those of one step; work that runs once for all steps of a call is
reported separately. The excess of a source line is the bytes that its instructions move, without
the first reading of each argument in the order of the program. Bytes of memory are counted as in
`hbm_bytes`; the CPU and the GPU have only one memory, so there it is everything that is read and
written.

An instruction rewrites an argument if it only moves the argument or a slice of it from main memory
to main memory, or converts it: the model asks for neither. A product that converts the operand that
it reads does not count.

Knows nothing of models. The bytes that a program should move are computed elsewhere: `NeededBytes`
in `compile.planning`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..hardware.hardware import Hardware
from ..hardware.interconnect import Interconnect
from .arguments import MOVING, Arguments
from .collectives import read_collectives
from .cycles import Prices
from .executions import Execution, Executions
from .hbm_bytes import Traffic
from .hlo_text import Computation, Instruction, Program, array_bytes, array_dtype, read_program
from .products import slow_flops

LARGE = 1 << 20
"""Bytes below which a rewritten array is not reported."""
MOVES_SHOWN = 12
_NUMBERED = re.compile(r"(\blayers[.\[]|_[A-Z]+\[)[\d:]+")


@dataclass(frozen=True)
class LineTraffic:
    """Bytes that the instructions of one source line move."""

    line: str
    operation: str
    """The place in the traced function, such as `jit(graph)/while/body/layers.0/dot_general`."""
    num_bytes: int
    excess: int
    """Bytes in excess of one reading of each argument."""
    is_once: bool


@dataclass(frozen=True)
class Loop:
    """Equal loops of one source line."""

    line: str
    operation: str
    turns: int | None
    """Iterations in each run; None if the text does not prove a number."""
    runs: int
    bytes_a_turn: int
    is_once: bool

    @property
    def all_turns(self) -> int:
        """Iterations of all runs; one for each run if the text does not prove a number."""
        return self.runs * (1 if self.turns is None else self.turns)


@dataclass(frozen=True)
class Rewrite:
    """An argument that one source line rewrites."""

    line: str
    argument: str
    array: str
    num_bytes: int
    """Bytes written in all runs."""
    is_converted: bool
    is_once: bool


@dataclass(frozen=True)
class SlowProduct:
    """Products of one source line that do not run in the fast library."""

    line: str
    array: str
    flops: int
    is_once: bool


@dataclass(frozen=True)
class Cycles:
    """Cycles of a program: the compiler's estimates, and prices of other instructions."""

    cycles: float
    priced_share: float
    """Share of the cycles that is priced here, because the compiler has no estimate."""
    seconds: float
    """Seconds of the cycles by the clock, or of all bytes by memory, whichever is longer."""


@dataclass(frozen=True)
class Totals:
    """Totals of a step, or of the work that runs once beside all steps."""

    bytes_moved: int
    loop_turns: int
    converted_bytes: int
    copied_bytes: int
    slow_flops: int
    cycles: Cycles | None
    """None if the program's compiler estimates no cycles."""


@dataclass(frozen=True)
class ProgramReport:
    """The figures of one program in a call."""

    step: Totals
    """Totals of one decode step, or of a whole call of another graph."""
    once: Totals
    """Totals beside the steps of a decode call; zero for another graph."""
    moved: tuple[LineTraffic, ...]
    """Bytes by source line, largest excess first."""
    loops: tuple[Loop, ...]
    """Loops except the loop over steps, most iterations first."""
    rewrites: tuple[Rewrite, ...]
    slow_products: tuple[SlowProduct, ...]

    @property
    def smallest_turn(self) -> int | None:
        """The fewest bytes that an iteration of a loop moves; None without loops."""
        return min((loop.bytes_a_turn for loop in self.loops), default=None)

    def as_json(self) -> dict[str, Any]:
        """The report as one JSON object, with only the lines of the largest excess."""
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
    min_bytes: int = LARGE,
) -> ProgramReport:
    """Read a report from the text of a program.

    Args:
      hlo_text: The text from `program_text`.
      platform: `cpu`, `gpu` or `tpu`; slow products are reported for the CPU.
      mesh_sizes: Sizes of the program's mesh axes, in order.
      hardware: Rates of one device. If it has a clock, the report has cycles.
      torus: Dimensions of the interconnect; empty for a switch.
      min_bytes: Bytes of the smallest argument that counts as rewritten.
    """
    program = read_program(hlo_text)
    traffic = Traffic(program)
    prices = None
    if hardware is not None and hardware.clock is not None:
        collectives = read_collectives(hlo_text, mesh_sizes)
        interconnect = Interconnect(hardware, mesh_sizes, torus)
        prices = Prices(program, traffic, collectives, hardware, interconnect)
    return _Reader(program, traffic, prices, hardware, platform, min_bytes).report()


class _Reader:
    """Sums over the executions of one program."""

    def __init__(
        self,
        program: Program,
        traffic: Traffic,
        prices: Prices | None,
        hardware: Hardware | None,
        platform: str,
        min_bytes: int,
    ):
        self._program, self._traffic, self._prices = program, traffic, prices
        self._hardware, self._platform, self._min_bytes = hardware, platform, min_bytes
        self._arguments = Arguments(program)
        entry = program.computations[program.entry].instructions.values()
        self._unread = {
            int(instruction.arguments): sum(map(array_bytes, instruction.arrays))
            for instruction in entry
            if instruction.opcode == "parameter"
        }
        """Bytes of each argument that were not read yet."""
        self._moved: Counter[tuple[str, str, bool]] = Counter()
        self._excess: Counter[tuple[str, str, bool]] = Counter()
        self._loops: Counter[tuple[str, str, int | None, int, bool]] = Counter()
        self._rewrites: Counter[tuple[str, RewrittenArgument, bool]] = Counter()
        self._slow: Counter[tuple[str, str, bool]] = Counter()
        self._cycles: dict[tuple[bool, bool], float] = defaultdict(float)

    def report(self) -> ProgramReport:
        executions = Executions(self._program, self._traffic)
        for execution in executions:
            if execution.instruction.opcode != "while":
                self._count(execution)
            elif execution.instruction is not executions.steps:
                body = dict(execution.instruction.called())["body"]
                turns, num_bytes = executions.turns(execution), self._traffic.of_run(body)
                loop = (*self._place(execution), turns, num_bytes, execution.is_once)
                self._loops[loop] += execution.times
        moved = [
            LineTraffic(*key[:2], num_bytes, self._excess[key], key[2])
            for key, num_bytes in self._moved.items()
        ]
        loops = [
            Loop(line, operation, turns, runs, num_bytes, is_once)
            for (line, operation, turns, num_bytes, is_once), runs in self._loops.items()
        ]
        rewrites = [
            Rewrite(line, x.argument, x.array, times * x.num_bytes, x.is_converted, is_once)
            for (line, x, is_once), times in self._rewrites.items()
        ]
        slow = [SlowProduct(*key[:2], flops, key[2]) for key, flops in self._slow.items()]

        def totals(*, is_once: bool) -> Totals:
            rewritten = [group for group in rewrites if group.is_once == is_once]
            num_bytes = sum(group.num_bytes for group in moved if group.is_once == is_once)
            return Totals(
                bytes_moved=num_bytes,
                loop_turns=sum(group.all_turns for group in loops if group.is_once == is_once),
                converted_bytes=sum(group.num_bytes for group in rewritten if group.is_converted),
                copied_bytes=sum(group.num_bytes for group in rewritten if not group.is_converted),
                slow_flops=sum(group.flops for group in slow if group.is_once == is_once),
                cycles=self._cycles_of(num_bytes, is_once),
            )

        return ProgramReport(
            totals(is_once=False),
            totals(is_once=True),
            tuple(sorted(moved, key=lambda group: (-group.excess, -group.num_bytes))),
            tuple(sorted(loops, key=lambda group: -group.all_turns)),
            tuple(sorted(rewrites, key=lambda group: -group.num_bytes)),
            tuple(sorted(slow, key=lambda group: -group.flops)),
        )

    def _count(self, execution: Execution) -> None:
        computation, instruction = execution.computation, execution.instruction
        times = execution.times
        line, operation = self._place(execution)
        reads = self._traffic.reads(computation, instruction)
        num_bytes = sum(num_bytes for _, num_bytes in reads)
        num_bytes += self._traffic.written(computation, instruction)
        if num_bytes:
            place = line, operation, execution.is_once
            self._moved[place] += times * num_bytes
            needed = 0 if execution.is_once else self._first_readings(computation, reads, times)
            self._excess[place] += times * num_bytes - needed
        for rewrite in find_rewrites(self._program, self._arguments, execution, self._min_bytes):
            self._rewrites[line, rewrite, execution.is_once] += times
        is_cpu = self._platform == "cpu"
        if is_cpu and (flops := slow_flops(self._program, computation, instruction)):
            self._slow[line, instruction.arrays[0], execution.is_once] += times * flops
        if self._prices and (price := self._prices.of(execution)):
            self._cycles[execution.is_once, price.is_estimated] += times * price.cycles

    def _first_readings(
        self, computation: Computation, reads: Iterable[tuple[str, int]], times: int
    ) -> int:
        """Bytes of arguments that are read for the first time."""
        total = 0
        for name, num_bytes in reads:
            argument = self._arguments.of(computation, name)
            if argument is not None:
                first = min(times * num_bytes, self._unread[argument])
                self._unread[argument] -= first
                total += first
        return total

    def _place(self, execution: Execution) -> tuple[str, str]:
        """Source line and operation; without a line, the operation names its argument.

        Layers are alike, so their numbers are left out.
        """
        line, operation = self._program.line(execution.instruction), execution.instruction.source
        if not line:
            number = self._arguments.of_result(execution.computation, execution.instruction)
            operation = operation or execution.instruction.opcode.removesuffix("-done")
            operation += "" if number is None else f" of {self._arguments.names[number]}"
        return line, _NUMBERED.sub(r"\1*", operation)

    def _cycles_of(self, num_bytes: int, is_once: bool) -> Cycles | None:
        if self._prices is None:
            return None
        hardware = self._hardware
        assert hardware is not None and hardware.clock is not None, "prices need a clock"
        priced = self._cycles[is_once, False]
        cycles = priced + self._cycles[is_once, True]
        seconds = max(cycles / hardware.clock, num_bytes / hardware.memory_rate)
        return Cycles(cycles, priced / cycles if cycles else 0.0, seconds)


@dataclass(frozen=True)
class RewrittenArgument:
    """An argument, or a slice of it, that is rewritten."""

    argument: str
    array: str
    """The array that is written, such as `f32[8,128]`."""
    is_converted: bool
    """Whether its dtype changed."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are written."""
        return array_bytes(self.array)


def find_rewrites(
    program: Program, arguments: Arguments, execution: Execution, min_bytes: int = LARGE
) -> Iterator[RewrittenArgument]:
    """Find the arguments of at least `min_bytes` that an instruction rewrites."""
    computation, instruction = execution.computation, execution.instruction
    for position, (array, space) in enumerate(
        zip(instruction.arrays, instruction.memory_spaces, strict=True)
    ):
        if array_bytes(array) < min_bytes:
            continue
        source = _moved_operand(program, computation, instruction, position)
        if source is None:
            continue
        number = arguments.of(computation, source)
        from_array = computation.instructions[source].arrays[0]
        from_space = computation.instructions[source].memory_spaces[0]
        is_converted = array_dtype(array) != array_dtype(from_array)
        if number is not None and (is_converted or space == from_space == 0):
            yield RewrittenArgument(arguments.names[number], array, is_converted)


def _moved_operand(
    program: Program, computation: Computation, instruction: Instruction, position: int
) -> str | None:
    """The operand of which a result is another form, or None."""
    if instruction.opcode == "copy-done":
        return computation.instructions[instruction.operands[0]].operands[0]
    if instruction.opcode in ("copy", "transpose", "convert", "slice", "dynamic-slice"):
        return instruction.operands[0]
    if instruction.opcode != "fusion":
        return None
    return program.moved_operand(instruction, position, MOVING)
