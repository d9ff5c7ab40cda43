"""Bytes that a TPU's program moves to and from main memory (HBM), read from its text.

Layouts in the text say where arrays lie: `{1,0:T(8,128)S(1)}` is memory on the chip, without `S` it
is HBM. An instruction reads operands and writes results, as far as they lie in HBM, and views are
free. What only slices an array reads the slices, what updates one in place writes the update, also
inside a fusion. So counts XLA's `HloCostAnalysis`, though without regard to where arrays lie.

Knows nothing of models or hardware. Guarantees: a transfer onto the chip counts once, where it is
done, however often the array is read there. Loops count with their turns, one of unknown length
with a single turn; of branches that one counts which moves least, as where no row asks for more.
A kernel that declares its bytes reads so many, of its operands by their sizes: it may read a part
of one, or all of it several times. Left out are the padding of tiles, and what other kernels read
more than once. What a call brings onto the chip for the next one counts beside what it brings for
itself.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from .hlo_text import Computation, Instruction, Program, array_bytes, read_program, trip_count

_VIEWS = ("bitcast", "get-tuple-element")
_FREE = (*_VIEWS, "parameter", "constant", "tuple", "partition-id", "replica-id", "after-all")
_FREE_TARGETS = ('"AllocateBuffer"', '"ConcatBitcast"')
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that change a part of their first operand in place, and which operand that part is."""
CALLERS = ("while", "conditional", "call")
"""Operations that move what the computations move that they run."""


def hbm_bytes(hlo_text: str) -> int:
    """Read and written in a call, on one device; `hlo_text` is what `program_text` gives."""
    program = read_program(hlo_text)
    return Traffic(program).of_run(program.entry)


class Traffic:
    """Bytes that the computations and instructions of one program move."""

    def __init__(self, program: Program):
        self._program = program
        self._of_runs: dict[str, int] = {}

    def of_run(self, name: str) -> int:
        """Bytes of a run of a computation, with all that it calls."""
        if name not in self._of_runs:
            computation = self._program.computations[name]
            self._of_runs[name] = sum(
                self._moved(computation, one) for one in computation.instructions.values()
            )
        return self._of_runs[name]

    def cheapest(self, conditional: Instruction) -> str:
        """The computation that moves least of those that an instruction may run."""
        return min((name for _, name in conditional.called()), key=self.of_run)

    def reads(self, computation: Computation, one: Instruction) -> list[tuple[str, int]]:
        """The operands that an instruction reads, and bytes of each; none of one that calls."""
        one = _synchronous(computation, one)
        if _is_free(one) or one.opcode in CALLERS:
            return []
        if one.kernel_cost:
            return _declared(computation, one)
        handed_on = _handed_on(one)
        return [
            (name, _read(self._program, one, position, _in_hbm(computation.instructions[name])))
            for position, name in enumerate(one.operands)
            if position not in handed_on
        ]

    def written(self, computation: Computation, one: Instruction) -> int:
        """Bytes of results that an instruction writes; none of one that calls."""
        one = _synchronous(computation, one)
        if _is_free(one) or one.opcode in CALLERS:
            return 0
        in_hbm = [_in_hbm(computation.instructions[name]) for name in one.operands]
        not_written = sum(in_hbm[position] for position in _handed_on(one))
        return _written(self._program, computation, one) - not_written

    def _moved(self, computation: Computation, one: Instruction) -> int:
        """Bytes of an instruction, with all that it runs."""
        if one.opcode == "while":
            turns = trip_count(self._program, computation, one)
            return (1 if turns is None else turns) * self.of_run(dict(one.called())["body"])
        if one.opcode in CALLERS:
            return self.of_run(self.cheapest(one))
        read = sum(num_bytes for _, num_bytes in self.reads(computation, one))
        return read + self.written(computation, one)


def _synchronous(computation: Computation, one: Instruction) -> Instruction:
    """The end of an asynchronous pair as the one instruction that it comes to."""
    if not one.opcode.endswith("-done"):
        return one
    start = computation.instructions[one.operands[0]]
    while start.opcode.endswith("-update"):
        start = computation.instructions[start.operands[0]]
    return replace(start, opcode=start.opcode.removesuffix("-start"), shape=one.shape)


def _is_free(one: Instruction) -> bool:
    """Whether an instruction moves nothing, or what it moves counts where it is done."""
    is_unfinished = one.opcode.endswith(("-start", "-update"))
    target = one.attribute("custom_call_target", '"[^"]*"')
    return one.opcode in _FREE or is_unfinished or target in _FREE_TARGETS


def _handed_on(one: Instruction) -> list[int]:
    """The operands, by position, that a fusion hands on as results, once for each result.

    The TPU's compiler spreads a collective over fusions that start it, carry its arrays beside a
    product and end it. What each hands on is left out, so the result counts in the first of them,
    and the operand in the last.
    """
    if one.opcode != "fusion":
        return []
    pairs = one.attribute("output_to_operand_aliasing", r"\{.*?\)\}") or ""
    return [int(position) for position in re.findall(r"\((\d+), \{\}\)", pairs)]


def _declared(computation: Computation, kernel: Instruction) -> list[tuple[str, int]]:
    """The bytes that a kernel declares, as reads of the operands that lie in main memory.

    Results, and operands on the chip, are among them once.
    """
    operands = [computation.instructions[name] for name in kernel.operands]
    in_hbm = [_in_hbm(one) for one in operands]
    others = sum(sum(map(array_bytes, one.arrays)) for one in (kernel, *operands)) - sum(in_hbm)
    assert kernel.kernel_cost is not None
    share = max(0, kernel.kernel_cost["bytes_accessed"] - others) / max(1, sum(in_hbm))
    return [
        (name, round(share * whole)) for name, whole in zip(kernel.operands, in_hbm, strict=True)
    ]


def _read(program: Program, user: Instruction, position: int, whole: int) -> int:
    """What is read of an operand of which so many bytes lie in HBM."""
    fused = dict(user.called()).get("calls")
    if whole and fused:
        inside = program.computations[fused]
        parameter = next(
            one
            for one in inside.instructions.values()
            if one.opcode == "parameter" and one.arguments == str(position)
        )
        return min(whole, _read_inside(program, inside, parameter, whole))
    if position == 0 and user.opcode in _UPDATES:
        return 0
    if position == 0 and user.opcode in _SLICES:
        return min(whole, sum(map(array_bytes, user.arrays)))
    return whole


def _read_inside(program: Program, fused: Computation, value: Instruction, whole: int) -> int:
    """What a fusion reads of one of its parameters, or of a view of it."""
    return sum(
        _read_inside(program, fused, user, whole)
        if user.opcode in _VIEWS and not user.is_root
        else _read(program, user, position, whole)
        for user, position in _uses(fused, value)
    )


def _uses(computation: Computation, value: Instruction) -> Iterator[tuple[Instruction, int]]:
    """Instructions that take a value, and as which operand."""
    for user in computation.instructions.values():
        for position, name in enumerate(user.operands):
            if name == value.name:
                yield user, position


def _written(program: Program, computation: Computation, one: Instruction) -> int:
    """What is written of an instruction's results."""
    if not (whole := _in_hbm(one)):
        return 0
    if fused := dict(one.called()).get("calls"):
        inside = program.computations[fused]
        return _written(program, inside, inside.root)
    if one.opcode == "tuple":
        results = [computation.instructions[name] for name in one.operands]
        return sum(_written(program, computation, result) for result in results)
    while one.opcode == "bitcast":
        one = computation.instructions[one.operands[0]]
    if one.opcode not in _UPDATES:
        return whole
    update = computation.instructions[one.operands[_UPDATES[one.opcode]]]
    return sum(map(array_bytes, update.arrays))


def _in_hbm(one: Instruction) -> int:
    """Bytes of an instruction's results that lie in HBM."""
    placed = zip(one.arrays, one.memory_spaces, strict=True)
    return sum(array_bytes(array) for array, space in placed if space == 0)
