"""Reads the collectives of a compiled program: arrays, mesh axes and bytes.

They are read from the text of the executable, so they show the compiler's decisions, on CPU, TPU
and GPU alike. Knows nothing of models, links or seconds; knows the names and sizes of mesh axes.
Guarantees: every collective that the entry reaches is reported once for each place from which it is
called; an asynchronous collective is reported once, into however many parts it is split;
communication whose bytes are unknown (`send`, `ragged-all-to-all`) is an error. The communication
of a custom call (a kernel) is not in the text, and so not reported.

`num_bytes` are the bytes of the whole array along the communicated dimension, on each device and in
each execution: an all-reduce counts its operand, a reduce-scatter its input, an all-gather its
output. So an all-reduce has the same bytes as each of the two collectives of which it consists.

Device numbers in the text are positions in the mesh, row-major, and not device ids. The axes of a
collective are those along which the devices of a group differ. Usually a group is a whole line or
plane of the mesh; if the compiler uses a part of an axis, `group_size` shows it.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .hlo_text import Computation, Instruction, Program, array_bytes, read_program, trip_count

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_UNREAD = ("collective-broadcast", "ragged-all-to-all", "send", "recv")

_GROUP_LIST = r"\{(?:\{[\d,]*\},?)*\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_MESH = r"mesh\[[^\]]*\](?:, device_ids=\([^ ]*\))? \{[^}]*\}"


@dataclass(frozen=True)
class Collective:
    """One collective of a program, at one of the places where it runs."""

    kind: str
    """One of `KINDS`."""
    mesh_axes: tuple[str, ...]
    """Mesh axes, in the order of the mesh."""
    group_size: int
    """Number of devices that take part together; 2 for a permute, a device and its peer."""
    arrays: tuple[str, ...]
    """The operands, such as `bf16[256,1024]`; several if collectives were combined."""
    num_bytes: int
    loops: tuple[int | None, ...]
    """Trip counts of the loops around it, outermost first; None if the text does not prove a
    count."""
    is_conditional: bool
    """Whether it is in a branch, which need not run."""
    name: str
    computation: str
    source: str
    """The operation of the traced function; empty if the compiler kept none."""

    @property
    def times(self) -> int:
        """Executions in one call of the program; a loop of unknown length counts once."""
        return math.prod(count for count in self.loops if count is not None)


def read_collectives(hlo_text: str, mesh_sizes: Mapping[str, int]) -> list[Collective]:
    """Read all collectives between two or more devices, in the order of the text.

    Args:
      hlo_text: The text from `program_text`.
      mesh_sizes: Sizes of the program's mesh axes, in order.

    Raises:
      ValueError: The program is for another number of devices, or its communication is unknown.
    """
    program = read_program(hlo_text)
    num_devices = math.prod(mesh_sizes.values())
    if (program.num_partitions, program.num_replicas) != (num_devices, 1):
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh_sizes.items())
        raise ValueError(
            f"HLO text: expected a program for the {num_devices} devices of the mesh ({sizes}), "
            f"got one of {program.num_partitions} partitions and {program.num_replicas} replicas. "
            f"Pass the mesh that it was compiled for."
        )
    collectives = (
        _describe(program.computations[site.computation], instruction, site, mesh_sizes)
        for site, instruction in _visit(program, _CallSite(program.entry))
    )
    return [collective for collective in collectives if collective.mesh_axes]


@dataclass(frozen=True)
class _CallSite:
    """A computation, and the path of calls from the entry to it."""

    computation: str
    loops: tuple[int | None, ...] = ()
    is_conditional: bool = False
    is_fused: bool = False
    source: str = ""


def _visit(program: Program, site: _CallSite) -> Iterator[tuple[_CallSite, Instruction]]:
    """Visit the collectives of a computation and of its callees, once for each call."""
    computation = program.computations[site.computation]
    for instruction in computation.instructions.values():
        # the second half of an asynchronous pair may name the computation of its first half
        if instruction.opcode.endswith(("-done", "-update")):
            continue
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            if not _is_continued(computation, instruction):
                yield site, instruction
            continue
        if kind in _UNREAD and "is_host_transfer=true" not in instruction.attributes:
            raise ValueError(
                f"HLO text: expected collectives among {', '.join(KINDS)}; got {kind} "
                f"(%{instruction.name}). Compile without the option or operation that makes it."
            )
        yield from _visit_called(program, site, instruction)


def _visit_called(
    program: Program, site: _CallSite, caller: Instruction
) -> Iterator[tuple[_CallSite, Instruction]]:
    loops = site.loops
    if caller.opcode == "while":
        # the condition counts as often as the body, although it runs once more
        computation = program.computations[site.computation]
        loops = (*loops, trip_count(program, computation, caller))
    for _, name in caller.called():
        inside = replace(
            site,
            computation=name,
            loops=loops,
            is_conditional=site.is_conditional or caller.opcode == "conditional",
            is_fused=caller.opcode == "fusion",
            source=caller.source or site.source,
        )
        yield from _visit(program, inside)


def _is_continued(computation: Computation, collective: Instruction) -> bool:
    """Whether this is a later part of a TPU collective that was started elsewhere.

    The TPU's compiler spreads a collective over several fusions, which start it, carry it beside a
    product, and end it. Each fusion repeats the collective; in the first fusion it is the operand
    of a start.
    """
    if '"async_collective_fusion_config"' not in collective.attributes:
        return False
    return not any(
        collective.name in user.operands
        and 'custom_call_target="AsyncCollectiveStart"' in user.attributes
        for user in computation.instructions.values()
    )


def _describe(
    computation: Computation,
    instruction: Instruction,
    site: _CallSite,
    mesh_sizes: Mapping[str, int],
) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    groups = _groups(instruction, math.prod(mesh_sizes.values()))
    group_size = max(map(len, groups), default=0)
    arrays = _operand_arrays(computation, instruction)
    # NOTE: bytes come from the operands only, because the result of a start holds operands, too
    num_bytes = sum(map(array_bytes, arrays)) * (group_size if kind == "all-gather" else 1)
    if kind == "all-reduce" and site.is_fused and _is_sliced(computation, instruction):
        kind = "reduce-scatter"
    return Collective(
        kind=kind,
        mesh_axes=_axes_within(groups, mesh_sizes),
        group_size=group_size,
        arrays=arrays,
        num_bytes=num_bytes,
        loops=site.loops,
        is_conditional=site.is_conditional,
        name=instruction.name,
        computation=computation.name,
        source=instruction.source or site.source,
    )


def _operand_arrays(computation: Computation, instruction: Instruction) -> tuple[str, ...]:
    operands = [computation.instructions.get(name) for name in instruction.operands]
    if not operands or None in operands:
        raise ValueError(
            f"HLO text: expected names of instructions of %{computation.name} as operands of "
            f"%{instruction.name}, got {instruction.arguments!r}. Pass the text unabridged."
        )
    return tuple(array for operand in operands if operand for array in operand.arrays)


def _is_sliced(computation: Computation, all_reduce: Instruction) -> bool:
    """Whether a fused all-reduce is the TPU's form of a reduce-scatter.

    Such a fusion reduces, and keeps a slice of each result; only the slice is ever computed.
    """
    instructions = computation.instructions.values()
    results = {all_reduce.name}
    for instruction in instructions:
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] == all_reduce.name:
            results.add(instruction.name)
    return any(
        instruction.opcode == "dynamic-slice" and instruction.operands[0] in results
        for instruction in instructions
    )


def _axes_within(groups: Sequence[Sequence[int]], mesh_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ.

    On a mesh of data=2, tensor=4, device 6 is at (1, 2): the group [2, 6] runs along data, the
    group [4, 5, 6, 7] along tensor, and the pair [3, 4] along both.
    """
    is_within = np.zeros(len(mesh_sizes), bool)
    for group in groups:
        coordinates = np.array(np.unravel_index(group, tuple(mesh_sizes.values())))
        is_within |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(axis for axis, within in zip(mesh_sizes, is_within, strict=True) if within)


def _groups(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """The groups of devices that communicate, from any of the four notations."""
    if text := instruction.attribute("source_target_pairs", _GROUP_LIST):
        return _listed(text)
    if text := instruction.attribute("replica_groups", _GROUP_LIST):
        return _listed(text) or [list(range(num_devices))]
    if text := instruction.attribute("replica_groups", _IOTA):
        sizes, _, order = text.partition("<=")
        return _iota(order).reshape(_numbers(sizes)).tolist()
    if text := instruction.attribute("replica_groups", _MESH):
        return _mesh_groups(text)
    raise ValueError(
        f"HLO text: expected groups of %{instruction.name} as {{{{0,1}},{{2,3}}}}, [2,4]<=[8] or "
        f"mesh['a'=2,'b'=4] {{'b'}}, got {instruction.attributes[:80]!r}."
    )


def _listed(text: str) -> list[list[int]]:
    """`{{0,1},{2,3}}` -> [[0, 1], [2, 3]]; `{}` -> []."""
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: 0, 1, 2, ... as an array of this shape, transposed -> [[0, 4], [1, 5], ..]."""
    sizes, _, axes = text.partition("T")
    numbers = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return numbers.transpose(_numbers(axes)) if axes else numbers


def _mesh_groups(text: str) -> list[list[int]]:
    """Groups along axes, or parts of axes, of a mesh that the compiler chose.

    `mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a':(2)2}`:

      (1) In the order of that mesh the devices are [[0, 2], [1, 3], [4, 6], [5, 7]].
      (2) `(2)2` is the part of axis a with 2 steps and 2 outer steps: the last binary digit of an
          index along a, which is 0, 1, 2 or 3.
      (3) Devices with equal indices apart from this digit form a group: [0, 1], [2, 3], [4, 5], [6,
        7].
    """
    mesh, _, along = text.rpartition(" {")
    sizes = {name: int(size) for name, size in re.findall(r"([\w.-]+)'?=(\d+)", mesh)}
    ids = re.search(r"device_ids=\((.*)\)", mesh)
    if ids is None:
        devices = np.arange(math.prod(sizes.values()))
    else:
        is_iota = ids[1].startswith("[")
        devices = _iota(ids[1]).reshape(-1) if is_iota else np.array(_numbers(ids[1]))

    indices = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for name, outside, steps in re.findall(r"([\w.-]+)'?(?::\((\d+)\)(\d+))?[,}]", along):
        num_steps = int(steps or sizes[name])
        stride = sizes[name] // (int(outside or 1) * num_steps)
        indices[name] = indices[name] - indices[name] // stride % num_steps * stride
    group_of = np.ravel_multi_index(tuple(indices.values()), tuple(sizes.values())).reshape(-1)
    return [devices[group_of == group].tolist() for group in np.unique(group_of)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
