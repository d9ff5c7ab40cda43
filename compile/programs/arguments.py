"""Finds the argument of a program from which an array comes.

It follows views, copies, conversions, slices and updates in place, also inside fusions, and the
state of loops and branches. So a cache that is converted, written to and converted back is still
the same argument, and so is a layer's slice of stacked weights.

Knows nothing of models; knows only the number and the name of an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .hlo_text import Computation, Instruction, Program

MOVING = ("bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice", "convert")
"""Operations that only move an array or a part of it, or convert it."""
_SAME = (*MOVING, "dynamic-update-slice", "scatter")
"""Operations whose result is their first operand, or a part of it, in another form."""


@dataclass(frozen=True)
class _Value:
    """An array: the result of an instruction, or an element of the result."""

    computation: str
    name: str
    index: int | None = None


class Arguments:
    """The arguments of one program."""

    def __init__(self, program: Program):
        self._program = program
        self._callers = _callers(program)
        entry = program.computations[program.entry]
        self.names: Mapping[int, str] = {
            int(instruction.arguments): (instruction.source or instruction.name).replace("\\'", "'")
            for instruction in entry.instructions.values()
            if instruction.opcode == "parameter"
        }
        """Names of arguments by number, as in the traced function: `parameters['head.table']`."""
        self._known: dict[_Value, int | None] = {}

    def of(self, computation: Computation, name: str, index: int | None = None) -> int | None:
        """The number of the argument from which an array comes, or None."""
        return self._of(_Value(computation.name, name, index))

    def of_result(self, computation: Computation, instruction: Instruction) -> int | None:
        """The number of the first argument found from which an array of a result comes, or None."""
        if len(instruction.arrays) == 1:
            return self.of(computation, instruction.name)
        numbers = (
            self.of(computation, instruction.name, index)
            for index in range(len(instruction.arrays))
        )
        return next((number for number in numbers if number is not None), None)

    def _of(self, value: _Value) -> int | None:
        if value not in self._known:
            # a loop passes its state around, and would otherwise be followed forever
            self._known[value] = None
            self._known[value] = self._follow(value)
        return self._known[value]

    def _follow(self, value: _Value) -> int | None:
        computation = self._program.computations[value.computation]
        instruction = computation.instructions[value.name]
        if instruction.opcode == "parameter":
            return self._of_parameter(computation, instruction, value.index)
        if instruction.opcode == "get-tuple-element":
            index = instruction.attribute("index", r"\d+")
            assert index is not None, (
                f"%{instruction.name} takes an element and must have its index"
            )
            return self._of(_Value(computation.name, instruction.operands[0], int(index)))
        if instruction.opcode == "tuple" and value.index is not None:
            return self._of(_Value(computation.name, instruction.operands[value.index]))
        if instruction.opcode == "while":
            return self._of(_Value(computation.name, instruction.operands[0], value.index))
        if instruction.opcode in ("fusion", "async-start"):
            moved = self._program.moved_operand(instruction, value.index, _SAME)
            return None if moved is None else self._of(_Value(computation.name, moved))
        is_same = instruction.opcode in _SAME
        is_same |= instruction.opcode.endswith(("-start", "-update", "-done"))
        if is_same and instruction.operands:
            return self._of(_Value(computation.name, instruction.operands[0]))
        return None

    def _of_parameter(
        self, computation: Computation, instruction: Instruction, index: int | None
    ) -> int | None:
        if computation.name == self._program.entry:
            return int(instruction.arguments)
        if computation.name not in self._callers:
            return None
        caller, outer, role, branch = self._callers[computation.name]
        if role in ("condition", "body"):
            return self._of(_Value(outer.name, caller.operands[0], index))
        operand = branch + 1 if caller.opcode == "conditional" else int(instruction.arguments)
        return self._of(_Value(outer.name, caller.operands[operand], index))


def _callers(program: Program) -> dict[str, tuple[Instruction, Computation, str, int]]:
    """The instruction that runs each computation, its own computation, role and branch number.

    Fusions do not count as runs.
    """
    callers = {}
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "conditional", "call"):
                for branch, (role, name) in enumerate(instruction.called()):
                    callers.setdefault(name, (instruction, computation, role, branch))
    return callers
