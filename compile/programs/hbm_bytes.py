"""Bytes that a TPU's program moves to and from main memory (HBM), read from its text.

Layouts in the text have a memory space: `{1,0:T(8,128)S(1)}` is memory on the chip; without `S` it
is HBM. An instruction reads operands and writes results, as far as they are in HBM; views are free.
A slicing operation reads only the slices, and an update in place writes only the update, also
inside a fusion. XLA's `HloCostAnalysis` counts in the same way, but ignores memory spaces.

Knows nothing of models or hardware. Guarantees: a transfer onto the chip counts once, where it
ends, however often the array is read on the chip. A fusion that slices what it computes from an
operand counts as reading the whole operand. Loops count with all iterations, a loop of
unknown length with one. Of branches, the one that moves the fewest bytes counts, as if no row
needed more. A kernel that declares its bytes reads this number, divided among its operands by their
sizes, because it may read a part of an operand, or an operand several times. Not counted are the
padding of tiles, and repeated reads of kernels without a declaration. Bytes that a call loads onto
the chip for the next call count in addition to those for itself.
"""

import re
from dataclasses import replace

from .hlo_text import Computation, Instruction, Program, array_bytes, trip_count

_VIEWS = ("bitcast", "get-tuple-element")
_FREE = (*_VIEWS, "parameter", "constant", "tuple", "partition-id", "replica-id", "after-all")
_FREE_TARGETS = ('"AllocateBuffer"', '"ConcatBitcast"')
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that change a part of their first operand in place, and the index of the operand with
that part."""
CALLERS = ("while", "conditional", "call")
"""Operations whose bytes are those of the computations that they run."""


class Traffic:
    """Bytes that the computations and instructions of one program move."""

    def __init__(self, program: Program):
        self._program = program
        self._of_runs: dict[str, int] = {}

    def of_run(self, name: str) -> int:
        """Bytes of one run of a computation, with all computations that it calls."""
        if name not in self._of_runs:
            computation = self._program.computations[name]
            self._of_runs[name] = sum(
                self._moved(computation, instruction)
                for instruction in computation.instructions.values()
            )
        return self._of_runs[name]

    def cheapest(self, conditional: Instruction) -> str:
        """The computation with the fewest bytes among those that an instruction may run."""
        return min((name for _, name in conditional.called()), key=self.of_run)

    def reads(self, computation: Computation, instruction: Instruction) -> list[tuple[str, int]]:
        """The operands that an instruction reads, with their bytes; empty for a caller."""
        instruction = _synchronous(computation, instruction)
        if _is_free(instruction) or instruction.opcode in CALLERS:
            return []
        if instruction.kernel_cost:
            return _declared(computation, instruction)
        passed_on = _passed_on(instruction)
        in_hbm = [_in_hbm(computation.instructions[name]) for name in instruction.operands]
        return [
            (name, _read(self._program, instruction, position, in_hbm[position]))
            for position, name in enumerate(instruction.operands)
            if position not in passed_on
        ]

    def written(self, computation: Computation, instruction: Instruction) -> int:
        """Bytes of results that an instruction writes; 0 for a caller."""
        instruction = _synchronous(computation, instruction)
        if _is_free(instruction) or instruction.opcode in CALLERS:
            return 0
        in_hbm = [_in_hbm(computation.instructions[name]) for name in instruction.operands]
        not_written = sum(in_hbm[position] for position in _passed_on(instruction))
        return _written(self._program, computation, instruction) - not_written

    def _moved(self, computation: Computation, instruction: Instruction) -> int:
        """Bytes of an instruction, with everything that it runs."""
        if instruction.opcode == "while":
            turns = trip_count(self._program, computation, instruction)
            return (1 if turns is None else turns) * self.of_run(dict(instruction.called())["body"])
        if instruction.opcode in CALLERS:
            return self.of_run(self.cheapest(instruction))
        read = sum(num_bytes for _, num_bytes in self.reads(computation, instruction))
        return read + self.written(computation, instruction)


def _synchronous(computation: Computation, instruction: Instruction) -> Instruction:
    """The end of an asynchronous pair, as the one instruction that the pair stands for."""
    if not instruction.opcode.endswith("-done"):
        return instruction
    start = computation.instructions[instruction.operands[0]]
    while start.opcode.endswith("-update"):
        start = computation.instructions[start.operands[0]]
    return replace(start, opcode=start.opcode.removesuffix("-start"), shape=instruction.shape)


def _is_free(instruction: Instruction) -> bool:
    """Whether an instruction moves nothing, or its bytes count at another instruction."""
    is_unfinished = instruction.opcode.endswith(("-start", "-update"))
    target = instruction.attribute("custom_call_target", '"[^"]*"')
    return instruction.opcode in _FREE or is_unfinished or target in _FREE_TARGETS


def _passed_on(instruction: Instruction) -> list[int]:
    """Positions of the operands that a fusion returns as results, one for each such result.

    The TPU's compiler spreads a collective over several fusions, which start it, carry its arrays
    beside a product, and end it. Arrays that a fusion only passes on are not counted, so the result
    counts in the first fusion and the operand in the last.
    """
    if instruction.opcode != "fusion":
        return []
    pairs = instruction.attribute("output_to_operand_aliasing", r"\{.*?\)\}") or ""
    return [int(position) for position in re.findall(r"\((\d+), \{\}\)", pairs)]


def _declared(computation: Computation, kernel: Instruction) -> list[tuple[str, int]]:
    """The bytes that a kernel declares, as reads of its operands in main memory.

    The declaration includes results and operands on the chip once, so these are subtracted.
    """
    operands = [computation.instructions[name] for name in kernel.operands]
    in_hbm = [_in_hbm(instruction) for instruction in operands]
    others = sum(
        sum(map(array_bytes, instruction.arrays)) for instruction in (kernel, *operands)
    ) - sum(in_hbm)
    assert kernel.kernel_cost is not None
    share = max(0, kernel.kernel_cost["bytes_accessed"] - others) / max(1, sum(in_hbm))
    return [
        (name, round(share * whole)) for name, whole in zip(kernel.operands, in_hbm, strict=True)
    ]


def _read(program: Program, user: Instruction, position: int, whole: int) -> int:
    """Bytes that an instruction reads of an operand that has `whole` bytes in HBM."""
    if whole and (inside := program.fused(user)) is not None:
        parameter = next(
            instruction
            for instruction in inside.instructions.values()
            if instruction.opcode == "parameter" and instruction.arguments == str(position)
        )
        return min(whole, _read_inside(program, inside, parameter, whole))
    if position == 0 and user.opcode in _UPDATES:
        return 0
    if position == 0 and user.opcode in _SLICES:
        return min(whole, sum(map(array_bytes, user.arrays)))
    return whole


def _read_inside(program: Program, fused: Computation, value: Instruction, whole: int) -> int:
    """Bytes that a fusion reads of one of its parameters, or of a view of it.

    An inner fusion that returns its operand is a view: it is the compiler's form of a new tiling.
    """
    return sum(
        _read_inside(program, fused, user, whole)
        if (user.opcode in _VIEWS or position in _passed_on(user)) and not user.is_root
        else _read(program, user, position, whole)
        for user in fused.instructions.values()
        for position, name in enumerate(user.operands)
        if name == value.name
    )


def _written(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction writes of its results."""
    if not (whole := _in_hbm(instruction)):
        return 0
    if (inside := program.fused(instruction)) is not None:
        return _written(program, inside, inside.root)
    if instruction.opcode == "tuple":
        results = [computation.instructions[name] for name in instruction.operands]
        return sum(_written(program, computation, result) for result in results)
    while instruction.opcode == "bitcast":
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode not in _UPDATES:
        return whole
    update = computation.instructions[instruction.operands[_UPDATES[instruction.opcode]]]
    return sum(map(array_bytes, update.arrays))


def _in_hbm(instruction: Instruction) -> int:
    """Bytes of an instruction's results that are in HBM."""
    placed = zip(instruction.arrays, instruction.memory_spaces, strict=True)
    return sum(array_bytes(array) for array, space in placed if space == 0)
