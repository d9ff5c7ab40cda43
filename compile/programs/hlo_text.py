"""The text of a compiled program, read into computations and instructions.

Knows nothing of meshes, collectives or models, and of an instruction only its shape, its operation
and the names of its operands; the rest of the line stays text, to be asked for by name. Guarantees:
every instruction of every computation is found under its name, and a loop's trip count is a number
that the text proves, or None.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .source_lines import read_source_lines

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
        """The arrays of its result without their layouts, such as `bf16[256,1024]`."""
        return tuple(f"{dtype}[{sizes}]" for dtype, sizes, _ in _ARRAY.findall(self.shape))

    @property
    def memory_spaces(self) -> tuple[int, ...]:
        """Where each of the arrays lies, as layouts say: 0, if they do not, is main memory."""
        found = (re.search(r"S\((\d+)\)", layout) for _, _, layout in _ARRAY.findall(self.shape))
        return tuple(int(space[1]) if space else 0 for space in found)

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.arguments))

    @property
    def source(self) -> str:
        """What the compiler says it comes from, such as `jit(f)/while/body/dot_general`."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def kernel_cost(self) -> dict[str, int] | None:
        """The operations and bytes that a kernel declares, if it does."""
        found = _KERNEL_COST.search(self.attributes)
        return {name: int(x) for name, x in json.loads(found[1]).items()} if found else None

    def attribute(self, name: str, pattern: str) -> str | None:
        """The part of the attributes that reads `name=pattern`, without the name."""
        found = re.search(rf"\b{name}=({pattern})", self.attributes)
        return found[1] if found else None

    def called(self) -> Iterator[tuple[str, str]]:
        """The computations it runs: the attribute that names each one, and its name."""
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
        return next(one for one in self.instructions.values() if one.is_root)

    def origin(self, name: str) -> Instruction | None:
        """The instruction of this name, or what it is a copy of."""
        found = self.instructions.get(name)
        while found is not None and found.opcode == "copy":
            found = self.instructions.get(found.operands[0])
        return found


@dataclass(frozen=True)
class Program:
    """The computations of a module, and the one it starts with."""

    computations: dict[str, Computation]
    entry: str
    num_partitions: int
    num_replicas: int
    source_lines: Mapping[int, str]
    """Lines of source by the number of the frame that instructions name."""

    def line(self, instruction: Instruction) -> str:
        """The line of source that an instruction comes from; empty where none is known.

        A fusion without one has that of its root, or of the last instruction in it that has one.
        """
        if frame := instruction.attribute("stack_frame_id", r"\d+"):
            return self.source_lines.get(int(frame), "")
        fused = dict(instruction.called()).get("calls")
        if fused is None:
            return ""
        inside = reversed(self.computations[fused].instructions.values())
        return next((line for one in inside if (line := self.line(one))), "")


def read_program(hlo_text: str) -> Program:
    """Read the text that `compiled.as_text()` gives."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in hlo_text.splitlines():
        line = _COMMENT.sub("", line)
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found["name"], Computation(found["name"]))
            entry = found["name"] if found["entry"] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            parts = found.groupdict()
            is_root = parts.pop("root") is not None
            current.instructions[parts["name"]] = Instruction(**parts, is_root=is_root)
    if not entry:
        raise ValueError(
            f"HLO text: expected a computation that starts with ENTRY, got {hlo_text[:60]!r}. "
            f"Pass what compiled.as_text() gives."
        )
    header = hlo_text.lstrip().partition("\n")[0]
    return Program(
        computations,
        entry,
        num_partitions=_header_number(header, "num_partitions"),
        num_replicas=_header_number(header, "replica_count"),
        source_lines=read_source_lines(hlo_text),
    )


def array_bytes(array: str) -> int:
    """Bytes of an array such as `bf16[256,1024]`; of a dynamic size `<=8`, the bound."""
    found = _ARRAY.fullmatch(array)
    if found is None or not (bits := _bits(found[1])):
        raise ValueError(f"HLO text: expected an array such as bf16[8,128], got {array!r}.")
    return math.ceil(math.prod(array_sizes(array)) * bits / 8)


def array_sizes(array: str) -> list[int]:
    """Sizes of an array such as `bf16[256,1024]`; of a dynamic one `<=8`, the bound."""
    return [int(size) for size in re.findall(r"\d+", array.partition("[")[2])]


def array_dtype(array: str) -> str:
    """The dtype of an array such as `bf16[256,1024]`."""
    return array.partition("[")[0]


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of this `while` of `computation` runs, or None where that is open.

    The CPU's and the GPU's compilers write it down. The TPU's does not, so a loop that counts up
    from one constant to another, by one, is counted here.
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
    """Whether this element of a loop's state leaves the body as itself plus one."""
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
    """Which element of the computation's only parameter this value is, if it is one."""
    found = computation.origin(name)
    if found is None or found.opcode != "get-tuple-element":
        return None
    source, index = computation.origin(found.operands[0]), found.attribute("index", r"\d+")
    return int(index) if source and source.opcode == "parameter" and index else None


def _constant(computation: Computation, name: str) -> int | None:
    found = computation.origin(name)
    is_whole = found and found.opcode == "constant" and re.fullmatch(r"-?\d+", found.arguments)
    return int(found.arguments) if found and is_whole else None


def _header_number(header: str, name: str) -> int:
    """A number of the module's first line; what is 1 is left out of the text."""
    found = re.search(rf"\b{name}=(\d+)", header)
    return int(found[1]) if found else 1


def _bits(dtype: str) -> int:
    """Bits of one element: the first number in its name (`f8e4m3fn` has 8), 8 for `pred`."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else {"pred": 8}.get(dtype, 0)
