"""Finds arguments that a program rewrites: copies and conversions that the model does not ask for.

An instruction rewrites an argument if it only moves the argument or a slice of it from main memory
to main memory, or converts it. A product that converts the operand that it reads does not count.

Knows nothing of models.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .arguments import MOVING, Arguments
from .executions import Execution
from .hlo_text import Computation, Instruction, Program, array_bytes, array_dtype

LARGE = 1 << 20
"""Bytes below which a rewritten array is not reported."""


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
