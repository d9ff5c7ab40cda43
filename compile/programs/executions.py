"""The instructions of a program that run in a call, and the number of their runs.

Loops run as often as the text proves; a loop of unknown length counts as one iteration. Of
branches, the one that moves the fewest bytes counts, as if no row needed more. A decode graph is
one loop over steps with few instructions beside it; these are marked.

Knows nothing of models, or of the cost of instructions.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .hbm_bytes import CALLERS, Traffic
from .hlo_text import Computation, Instruction, Program, trip_count

_LOOP_OF_GRAPH = re.compile(r"jit\([\w.]+\)/while")


@dataclass(frozen=True)
class Execution:
    """An instruction that runs, loops and calls included."""

    computation: Computation
    instruction: Instruction
    times: int
    """Runs in one decode step, or in one call. For instructions beside the loop over steps, runs
    in one call."""
    is_once: bool
    """Whether it runs beside the loop over steps, once for all steps."""


class Executions:
    """A walk through a program in the order of execution."""

    def __init__(self, program: Program, traffic: Traffic):
        self._program, self._traffic = program, traffic
        entry = program.computations[program.entry]
        loops = (each for each in entry.instructions.values() if each.opcode == "while")
        of_graph = (loop for loop in loops if _LOOP_OF_GRAPH.fullmatch(loop.source))
        endless = (loop for loop in of_graph if trip_count(program, entry, loop) is None)
        self.steps = next(endless, None)
        """The loop over steps; None without one."""

    def __iter__(self) -> Iterator[Execution]:
        """Visit every instruction that runs, in the order of the text, callers first."""
        return self._visit(self._program.entry, 1, is_once=self.steps is not None)

    def turns(self, loop: Execution) -> int | None:
        """Iterations of a loop in each of its runs; None if the text does not prove a number."""
        return trip_count(self._program, loop.computation, loop.instruction)

    def _visit(self, name: str, times: int, *, is_once: bool) -> Iterator[Execution]:
        """Visit the instructions of a computation that runs so often, and those that they run."""
        computation = self._program.computations[name]
        for instruction in computation.instructions.values():
            execution = Execution(computation, instruction, times, is_once)
            yield execution
            if instruction.opcode == "while":
                turns = self.turns(execution)
                in_body = times * (1 if turns is None else turns)
                body = dict(instruction.called())["body"]
                beside = is_once and instruction is not self.steps
                yield from self._visit(body, in_body, is_once=beside)
            elif instruction.opcode in CALLERS:
                cheapest = self._traffic.cheapest(instruction)
                yield from self._visit(cheapest, times, is_once=is_once)
