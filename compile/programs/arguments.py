"""Arguments of a program behind its arrays, as far as these are the same array by other names.

Followed are views, copies, conversions, slices and updates in place, also inside fusions, and the
state of loops and branches. So a cache that is converted, written to and converted back is still
the argument it came from, and so is a layer's slice of stacked weights.

Knows nothing of models; of an argument only its number and its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .hlo_text import Computation, Instruction, Program

MOVING = ("bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice", "convert")
"""Operations that do nothing to an array but move it, or a part of it, or convert it."""
_SAME = (*MOVING, "dynamic-update-slice", "scatter")
"""Operations whose result is their first operand, or a part of it, in another form."""


@dataclass(frozen=True)
class _Value:
    """An array: an instruction's result, or an element of it."""

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
            int(one.arguments): (one.source or one.name).replace("\\'", "'")
            for one in entry.instructions.values()
            if one.opcode == "parameter"
        }
        """Names of arguments by number, as in the traced function: `parameters['head.table']`."""
        self._known: dict[_Value, int | None] = {}

    def of(self, computation: Computation, name: str, index: int | None = None) -> int | None:
        """The number of the argument that an array is; None where it is none."""
        return self._of(_Value(computation.name, name, index))

    def of_result(self, computation: Computation, one: Instruction) -> int | None:
        """The same of the first array of an instruction's result that is one."""
        if len(one.arrays) == 1:
            return self.of(computation, one.name)
        found = (self.of(computation, one.name, index) for index in range(len(one.arrays)))
        return next((number for number in found if number is not None), None)

    def _of(self, value: _Value) -> int | None:
        if value not in self._known:
            # a loop that hands its state around would otherwise be followed for ever
            self._known[value] = None
            self._known[value] = self._followed(value)
        return self._known[value]

    def _followed(self, value: _Value) -> int | None:
        computation = self._program.computations[value.computation]
        one = computation.instructions[value.name]
        if one.opcode == "parameter":
            return self._of_parameter(computation, one, value.index)
        if one.opcode == "get-tuple-element":
            index = one.attribute("index", r"\d+")
            assert index is not None, f"%{one.name} takes an element, and says which"
            return self._of(_Value(computation.name, one.operands[0], int(index)))
        if one.opcode == "tuple" and value.index is not None:
            return self._of(_Value(computation.name, one.operands[value.index]))
        if one.opcode == "while":
            return self._of(_Value(computation.name, one.operands[0], value.index))
        if one.opcode in ("fusion", "async-start"):
            return self._of_fused(computation, one, value.index)
        if one.opcode in _SAME or one.opcode.endswith(("-start", "-update", "-done")):
            return self._of(_Value(computation.name, one.operands[0])) if one.operands else None
        return None

    def _of_parameter(
        self, computation: Computation, one: Instruction, index: int | None
    ) -> int | None:
        if computation.name == self._program.entry:
            return int(one.arguments)
        if computation.name not in self._callers:
            return None
        caller, where, role, place = self._callers[computation.name]
        if role in ("condition", "body"):
            return self._of(_Value(where.name, caller.operands[0], index))
        first = place + 1 if caller.opcode == "conditional" else int(one.arguments)
        return self._of(_Value(where.name, caller.operands[first], index))

    def _of_fused(
        self, computation: Computation, one: Instruction, index: int | None
    ) -> int | None:
        name = dict(one.called()).get("calls")
        if name is None:
            return None
        inside = self._program.computations[name]
        result = inside.root
        if result.opcode == "tuple" and index is not None:
            result = inside.instructions[result.operands[index]]
        while result.opcode in _SAME:
            result = inside.instructions[result.operands[0]]
        if result.opcode != "parameter":
            return None
        return self._of(_Value(computation.name, one.operands[int(result.arguments)]))


def _callers(program: Program) -> dict[str, tuple[Instruction, Computation, str, int]]:
    """The instruction that runs each computation, where it is, and as which of several it runs it.

    Fusions are no runs.
    """
    found = {}
    for computation in program.computations.values():
        for one in computation.instructions.values():
            if one.opcode in ("while", "conditional", "call"):
                for place, (role, name) in enumerate(one.called()):
                    found.setdefault(name, (one, computation, role, place))
    return found
