"""Arguments that a program writes anew: copies and conversions that its definition did not ask for.

An argument is rewritten by an instruction that does nothing but move it, whole or a slice of it,
from main memory to main memory, or that converts it: a product that converts what it reads is none.

Knows nothing of models.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .arguments import MOVING, Arguments
from .executions import Execution
from .hlo_text import Computation, Instruction, Program, array_bytes, array_dtype

LARGE = 1 << 20
"""Bytes under which a rewritten array is left out."""


@dataclass(frozen=True)
class Rewritten:
    """An argument, or a slice of it, that is written anew."""

    argument: str
    array: str
    """As it is written, such as `f32[8,128]`."""
    is_converted: bool
    """Whether its dtype changed."""

    @property
    def num_bytes(self) -> int:
        """That are written."""
        return array_bytes(self.array)


def rewritten(
    program: Program, arguments: Arguments, execution: Execution, least: int = LARGE
) -> Iterator[Rewritten]:
    """Arguments of at least so many bytes that an instruction rewrites."""
    computation, one = execution.computation, execution.instruction
    for position, (array, space) in enumerate(zip(one.arrays, one.memory_spaces, strict=True)):
        if array_bytes(array) < least:
            continue
        source = _moved(program, computation, one, position)
        if source is None:
            continue
        number = arguments.of(computation, source)
        from_array = computation.instructions[source].arrays[0]
        from_space = computation.instructions[source].memory_spaces[0]
        is_converted = array_dtype(array) != array_dtype(from_array)
        if number is not None and (is_converted or space == from_space == 0):
            yield Rewritten(arguments.names[number], array, is_converted)


def _moved(
    program: Program, computation: Computation, one: Instruction, position: int
) -> str | None:
    """The operand that one of an instruction's results is, in another form; None if it is none."""
    if one.opcode == "copy-done":
        return computation.instructions[one.operands[0]].operands[0]
    if one.opcode in ("copy", "transpose", "convert", "slice", "dynamic-slice"):
        return one.operands[0]
    if one.opcode != "fusion":
        return None
    inside = program.computations[dict(one.called())["calls"]]
    result = inside.root
    if result.opcode == "tuple":
        result = inside.instructions[result.operands[position]]
    while result.opcode in MOVING:
        result = inside.instructions[result.operands[0]]
    return one.operands[int(result.arguments)] if result.opcode == "parameter" else None
