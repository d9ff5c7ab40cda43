"""Reads the text of a compiled program into computations and instructions.

Of an instruction it parses only the shape, the operation and the names of operands; the rest of the
line stays text and can be searched by name. Knows nothing of meshes, collectives or models.
Guarantees: every instruction of every computation is found by its name, and a loop's trip count is
a number that the text proves, or None.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ENTRY = re.compile(r"^(\d+) (.*)$")

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)"
    r"\((?P<arguments>[^)]*)\)(?P<attributes>.*)$"
)
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"\b(?!token)([a-z][a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%[\w.-]+)"
)
_KERNEL_COST = re.compile(r'"cost_estimate": ?(\{[^{}]*\})')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(arguments), attributes`."""

    name: str
    opcode: str
    shape: str
    arguments: str
    """Names of operands, or the literal of a constant."""
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays of the result without their layouts, such as `bf16[256,1024]`."""
        return tuple(f"{dtype}[{sizes}]" for dtype, sizes, _ in _ARRAY.findall(self.shape))

    @property
    def memory_spaces(self) -> tuple[int, ...]:
        """The memory space of each array of the result; 0 is main memory, and the default."""
        spaces = (re.search(r"S\((\d+)\)", layout) for _, _, layout in _ARRAY.findall(self.shape))
        return tuple(int(space[1]) if space else 0 for space in spaces)

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.arguments))

    @property
    def source(self) -> str:
        """The traced operation that the compiler notes, such as `jit(f)/while/body/dot_general`."""
        match = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""

    @property
    def kernel_cost(self) -> dict[str, int] | None:
        """The operations and bytes that a kernel declares, or None."""
        match = _KERNEL_COST.search(self.attributes)
        return {name: int(x) for name, x in json.loads(match[1]).items()} if match else None

    def attribute(self, name: str, pattern: str) -> str | None:
        """The value of the attribute `name`, if it matches `pattern`."""
        match = re.search(rf"\b{name}=({pattern})", self.attributes)
        return match[1] if match else None

    def called(self) -> Iterator[tuple[str, str]]:
        """The computations that it runs: for each the attribute that names it, and its name."""
        for role, names in _CALLED.findall(self.attributes):
            for name in _NAME.findall(names):
                yield role, name


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(
            instruction for instruction in self.instructions.values() if instruction.is_root
        )

    def origin(self, name: str) -> Instruction | None:
        """The instruction with this name, or the instruction of which it is a copy."""
        instruction = self.instructions.get(name)
        while instruction is not None and instruction.opcode == "copy":
            instruction = self.instructions.get(instruction.operands[0])
        return instruction


@dataclass(frozen=True)
class Program:
    """The computations of a module, and the name of its entry computation."""

    computations: dict[str, Computation]
    entry: str
    num_partitions: int
    num_replicas: int
    source_lines: Mapping[int, str]
    """Source lines by the number of the frame that instructions name."""

    def fused(self, instruction: Instruction) -> Computation | None:
        """The computation inside a fusion; None for another instruction."""
        name = dict(instruction.called()).get("calls")
        return None if name is None else self.computations[name]

    def moved_operand(
        self, fusion: Instruction, index: int | None, moving: Collection[str]
    ) -> str | None:
        """The operand of which a fusion's result, or an element of it, is another form, or None.

        `moving` are the operations whose result is another form of their first operand.
        """
        if (inside := self.fused(fusion)) is None:
            return None
        result = inside.root
        if result.opcode == "tuple" and index is not None:
            result = inside.instructions[result.operands[index]]
        while result.opcode in moving:
            result = inside.instructions[result.operands[0]]
        return fusion.operands[int(result.arguments)] if result.opcode == "parameter" else None

    def line(self, instruction: Instruction) -> str:
        """The source line of an instruction; empty if it is unknown.

        A fusion without a line has that of its root, or of its last instruction that has one.
        """
        if frame := instruction.attribute("stack_frame_id", r"\d+"):
            return self.source_lines.get(int(frame), "")
        if (fused := self.fused(instruction)) is None:
            return ""
        inside = reversed(fused.instructions.values())
        return next((line for instruction in inside if (line := self.line(instruction))), "")


def read_program(hlo_text: str) -> Program:
    """Read the text from `program_text`; raises ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in hlo_text.splitlines():
        line = _COMMENT.sub("", line)
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match["name"], Computation(match["name"]))
            entry = match["name"] if match["entry"] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            parts = match.groupdict()
            is_root = parts.pop("root") is not None
            current.instructions[parts["name"]] = Instruction(**parts, is_root=is_root)
    if not entry:
        raise ValueError(
            f"HLO text: expected a computation that starts with ENTRY, got {hlo_text[:60]!r}. "
            f"Pass the text from compiled.as_text()."
        )
    header = hlo_text.lstrip().partition("\n")[0]
    return Program(
        computations,
        entry,
        num_partitions=_number(header, "num_partitions", absent=1),
        num_replicas=_number(header, "replica_count", absent=1),
        source_lines=read_source_lines(hlo_text),
    )


def array_bytes(array: str) -> int:
    """Bytes of an array such as `bf16[256,1024]`; a dynamic size `<=8` counts as its bound."""
    match = _ARRAY.fullmatch(array)
    if match is None or not (bits := _bits(match[1])):
        raise ValueError(f"HLO text: expected an array such as bf16[8,128], got {array!r}.")
    return math.ceil(math.prod(array_sizes(array)) * bits / 8)


def array_sizes(array: str) -> list[int]:
    """Sizes of an array such as `bf16[256,1024]`; a dynamic size `<=8` counts as its bound."""
    return [int(size) for size in re.findall(r"\d+", array.partition("[")[2])]


def array_dtype(array: str) -> str:
    """The dtype of an array such as `bf16[256,1024]`."""
    return array.partition("[")[0]


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of a `while` loop of `computation`, or None if the text does not prove a number.

    The compilers for CPU and GPU write the number down. The TPU's compiler does not, so the
    iterations of a loop that counts by one from one constant to another are computed here.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    roles = dict(loop.called())
    condition = program.computations[roles["condition"]]
    body = program.computations[roles["body"]]
    test = condition.root
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None

    counter, limit = test.operands
    index = _element(condition, counter)
    start = computation.origin(loop.operands[0])
    if index is None or not _counts_by_one(body, index):
        return None
    if start is None or start.opcode != "tuple":
        return None
    first, last = _constant(computation, start.operands[index]), _constant(condition, limit)
    return None if first is None or last is None else max(0, last - first)


def _counts_by_one(body: Computation, index: int) -> bool:
    """Whether the body adds one to this element of the loop's state."""
    if body.root.opcode != "tuple":
        return False
    counter = body.origin(body.root.operands[index])
    if counter is None or counter.opcode != "add":
        return False
    terms = counter.operands
    return any(
        _element(body, term) == index and _constant(body, step) == 1
        for term, step in (terms, terms[::-1])
    )


def _element(computation: Computation, name: str) -> int | None:
    """The index of a value in the computation's only parameter; None for another value."""
    instruction = computation.origin(name)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    source = computation.origin(instruction.operands[0])
    index = instruction.attribute("index", r"\d+")
    return int(index) if source and source.opcode == "parameter" and index else None


def _constant(computation: Computation, name: str) -> int | None:
    instruction = computation.origin(name)
    if instruction is None or instruction.opcode != "constant":
        return None
    is_whole = re.fullmatch(r"-?\d+", instruction.arguments) is not None
    return int(instruction.arguments) if is_whole else None


def _bits(dtype: str) -> int:
    """Bits of one element: the first number in its name (`f8e4m3fn` has 8), 8 for `pred`."""
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else {"pred": 8}.get(dtype, 0)


def read_source_lines(hlo_text: str) -> dict[int, str]:
    """The source line of each frame, by the frame's number; empty if the text has no tables.

    An instruction names a stack frame, and a table of frames names places in files. The reported
    frame is the innermost one below the folder of this package, such as
    `modelzoo/cache/pages.py:160`. If there is none, it is the innermost frame, with the file's
    bare name.
    """
    tables = _tables(hlo_text)
    files = {number: text.strip('"') for number, text in tables["FileNames"].items()}
    places = {
        number: (files[_number(text, "file_name_id")], _number(text, "line"))
        for number, text in tables["FileLocations"].items()
    }
    frames = {
        # parents are counted from one, because 0 means that there is no parent
        number: (places[_number(text, "file_location_id")], _number(text, "parent_frame_id") - 1)
        for number, text in tables["StackFrames"].items()
    }
    return {number: _line(frames, number) for number in frames}


def _line(frames: dict[int, tuple[tuple[str, int], int]], number: int) -> str:
    """The innermost of a frame and its parents that is in this package, else the frame itself."""
    (name, line), parent = frames[number]
    fallback = f"{Path(name).name}:{line}"
    while not Path(name).is_relative_to(_ROOT):
        if parent not in frames:
            return fallback
        (name, line), parent = frames[parent]
    return f"{Path(name).relative_to(_ROOT).as_posix()}:{line}"


def _tables(hlo_text: str) -> dict[str, dict[int, str]]:
    """Entries of each section at the head of the text, by their numbers."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _SECTIONS}
    current = None
    for line in hlo_text.splitlines()[1:]:
        if line.startswith(("%", "ENTRY")):
            break
        if line in tables:
            current = line
        elif current and (entry := _ENTRY.match(line)):
            tables[current][int(entry[1])] = entry[2]
    return tables


def _number(text: str, name: str, absent: int = 0) -> int:
    match = re.search(rf"\b{name}=(\d+)", text)
    return int(match[1]) if match else absent
