"""The instructions of a program that run in a call, and how often.

Loops run as often as the text proves, one of open length once; of branches the one runs that moves
the fewest bytes, as where no row asks for more. A decode graph is one loop over steps with little
beside it: what runs beside it is told apart.

Knows nothing of models, or of what instructions cost.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .hbm_bytes import CALLERS, Traffic
from .hlo_text import Computation, Instruction, Program, trip_count

_LOOP_OF_GRAPH = re.compile(r"jit\([\w.]+\)/while")


@dataclass(frozen=True)
class Execution:
    """An instruction that runs, loops and calls included."""

    computation: Computation
    instruction: Instruction
    times: int
    """In a step of decode, or in a call; of what runs beside the loop over steps, in a call."""
    is_once: bool
    """Whether it runs beside a loop over steps, once for all of them."""


@dataclass(frozen=True)
class _Place:
    computation: str
    times: int = 1
    is_once: bool = False


class Executions:
    """A walk through a program as it runs."""

    def __init__(self, program: Program, traffic: Traffic):
        self._program, self._traffic = program, traffic
        entry = program.computations[program.entry]
        self._steps = next(
            (one for one in entry.instructions.values() if self._is_steps(one)), None
        )

    def __iter__(self) -> Iterator[Execution]:
        """Every instruction that runs, in the order of the text; what it calls comes after it."""
        return self._visit(_Place(self._program.entry, is_once=self._steps is not None))

    def turns(self, one: Execution) -> int | None:
        """Turns of a loop each time that it runs; None where the text leaves it open."""
        return trip_count(self._program, one.computation, one.instruction)

    def is_steps(self, loop: Instruction) -> bool:
        """Whether this is the loop over steps."""
        return loop is self._steps

    def _is_steps(self, one: Instruction) -> bool:
        entry = self._program.computations[self._program.entry]
        return (
            one.opcode == "while"
            and _LOOP_OF_GRAPH.fullmatch(one.source) is not None
            and trip_count(self._program, entry, one) is None
        )

    def _visit(self, place: _Place) -> Iterator[Execution]:
        computation = self._program.computations[place.computation]
        for one in computation.instructions.values():
            execution = Execution(computation, one, place.times, place.is_once)
            yield execution
            if one.opcode == "while":
                turns = self.turns(execution)
                times = place.times * (1 if turns is None else turns)
                body = dict(one.called())["body"]
                is_once = place.is_once and one is not self._steps
                yield from self._visit(_Place(body, times, is_once))
            elif one.opcode in CALLERS:
                yield from self._visit(replace(place, computation=self._traffic.cheapest(one)))
