"""Finds the argument of a program from which an array comes.

It follows views, copies, conversions, slices and updates in place, also inside fusions, and the
state of loops and branches. So a cache that is converted, written to and converted back is still
the same argument, and so is a layer's slice of stacked weights.

Knows nothing of models; knows only the number and the name of an argument.
"""

from collections.abc import Mapping

from .hlo_text import Computation, Instruction, Program

MOVING = ("bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice", "convert")
"""Operations that only move an array or a part of it, or convert it."""
_SAME = (*MOVING, "dynamic-update-slice", "scatter")
"""Operations whose result is their first operand, or a part of it, in another form."""


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
        self._known: dict[tuple[str, str, int | None], int | None] = {}

    def of(self, computation: Computation, name: str, index: int | None = None) -> int | None:
        """The number of the argument from which an array comes, or None.

        The array is the result of the instruction `name`, or an element of the result.
        """
        array = computation.name, name, index
        if array not in self._known:
            # a loop passes its state around, and would otherwise be followed forever
            self._known[array] = None
            self._known[array] = self._follow(computation, computation.instructions[name], index)
        return self._known[array]

    def of_result(self, computation: Computation, instruction: Instruction) -> int | None:
        """The number of the first argument found from which an array of a result comes, or None."""
        if len(instruction.arrays) == 1:
            return self.of(computation, instruction.name)
        numbers = (
            self.of(computation, instruction.name, index)
            for index in range(len(instruction.arrays))
        )
        return next((number for number in numbers if number is not None), None)

    def _follow(
        self, computation: Computation, instruction: Instruction, index: int | None
    ) -> int | None:
        if instruction.opcode == "parameter":
            return self._of_parameter(computation, instruction, index)
        if instruction.opcode == "get-tuple-element":
            element = instruction.attribute("index", r"\d+")
            assert element is not None, (
                f"%{instruction.name} takes an element and must have its index"
            )
            return self.of(computation, instruction.operands[0], int(element))
        if instruction.opcode == "tuple" and index is not None:
            return self.of(computation, instruction.operands[index])
        if instruction.opcode == "while":
            return self.of(computation, instruction.operands[0], index)
        if instruction.opcode in ("fusion", "async-start"):
            moved = self._program.moved_operand(instruction, index, _SAME)
            return None if moved is None else self.of(computation, moved)
        is_same = instruction.opcode in _SAME
        is_same |= instruction.opcode.endswith(("-start", "-update", "-done"))
        if is_same and instruction.operands:
            return self.of(computation, instruction.operands[0])
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
            return self.of(outer, caller.operands[0], index)
        operand = branch + 1 if caller.opcode == "conditional" else int(instruction.arguments)
        return self.of(outer, caller.operands[operand], index)


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
