"""Read parts (boxes) of published tensors, and rearrange them into parts of parameters.

`TensorSource` is the interface of all formats. `AxisPattern` parses patterns such as
"`(k g h) d -> d k g h`", and computes the shape of the parameter and the box of the tensor that a
box of the parameter needs. Does not know about file formats, devices or families.

Guarantees: `AxisPattern.read(source, name, index)` equals the whole tensor reshaped, transposed,
repeated and then indexed. It reads one contiguous box of the tensor, which may be larger than the
result where several names share an axis.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import numpy as np

from ...modelzoo.families.mapping import TensorPart

Index = tuple[slice, ...]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor as `TensorSource.read` returns it, and its form in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    stored_as: str
    """The name of the type in the format, such as `BF16` or `Q4_1`."""
    num_bytes: int
    """The number of bytes in the file."""
    axis_order: tuple[int, ...] | None = None
    """The axes in the order of the file, major to minor; None means the order of the shape."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class TensorSource(Protocol):
    """The tensors of a checkpoint. Arrays are copies: they never refer to the file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        ...

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor, or the box of it that `index`, slices of step 1, selects."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class RowSelection:
    """A source with one tensor: some rows of each block of a tensor, under the same name."""

    def __init__(self, source: TensorSource, name: str, rows: tuple[int, int], block: int | None):
        self._source = source
        self._first, end = rows
        self._count = end - self._first
        info = source.tensors[name]
        if not info.shape or end > info.shape[0]:
            raise ValueError(f"expected at least {end} rows, got shape {info.shape}")
        self._block = block or info.shape[0]
        if info.shape[0] % self._block:
            raise ValueError(f"expected a multiple of {block} rows, got shape {info.shape}")
        num_rows = info.shape[0] // self._block * self._count
        self.tensors = {name: replace(info, shape=(num_rows, *info.shape[1:]))}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        shape = self.tensors[name].shape
        rows, *rest = intervals(index or (slice(None),) * len(shape), shape)
        if not len(rows):
            return np.empty([0, *map(len, rest)], self.tensors[name].dtype)
        span = Interval(self._row_of(rows.start), self._row_of(rows.stop - 1) + 1)
        array = self._source.read(name, tuple(i.as_slice() for i in (span, *rest)))
        if len(span) == len(rows):
            return array
        wanted = [self._row_of(row) - span.start for row in range(rows.start, rows.stop)]
        return array[wanted]

    def _row_of(self, row: int) -> int:
        """The index in the whole tensor of a selected row."""
        return row // self._count * self._block + self._first + row % self._count

    def close(self) -> None:
        """Do nothing: the owner of the whole tensor's source closes it."""


class StackedTensors:
    """A source with one tensor: tensors of one shape, stacked along a new first axis.

    Its dtype holds all values of the stacked tensors.
    """

    def __init__(self, source: TensorSource, name: str, members: Sequence[str]):
        self._source = source
        self._members = members
        infos = [source.tensors[member] for member in members]
        ((shape, _),) = Counter(info.shape for info in infos).most_common(1)
        for member, info in zip(members, infos, strict=True):
            if info.shape != shape:
                raise ValueError(f"expected {shape} of each to stack, got {member} {info.shape}")
        stacked = TensorInfo(
            shape=(len(members), *shape),
            dtype=_common_dtype([info.dtype for info in infos]),
            stored_as="/".join(sorted({info.stored_as for info in infos})),
            num_bytes=sum(info.num_bytes for info in infos),
        )
        self.tensors = {name: stacked}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        info = self.tensors[name]
        stack, *rest = intervals(index or (slice(None),) * len(info.shape), info.shape)
        inner = tuple(interval.as_slice() for interval in rest)
        result = np.empty([len(stack), *map(len, rest)], info.dtype)
        for row, member in zip(result, self._members[stack.as_slice()], strict=True):
            row[...] = self._source.read(member, inner)
        return result

    def close(self) -> None:
        """Do nothing: the owner of the members' source closes it."""


def _common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    """The common dtype, or a dtype that holds all values of the given dtypes."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    # start at float32, as numpy has no common dtype of float16 and bfloat16
    return reduce(np.promote_types, dtypes, np.dtype(np.float32))


def source_of(part: TensorPart, source: TensorSource) -> TensorSource:
    """The source from which a part is read; ValueError if a tensor has an unsuitable shape."""
    if part.stacked:
        return StackedTensors(source, part.tensor, part.tensors)
    return source if part.rows is None else RowSelection(source, part.tensor, part.rows, part.block)


@dataclass(frozen=True)
class Interval:
    """A half-open range of positions along an axis."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(self.stop - self.start, 0)

    def as_slice(self, origin: int = 0) -> slice:
        """The interval as a slice, with positions counted from `origin`."""
        return slice(self.start - origin, self.stop - origin)


Box = tuple[Interval, ...]
"""A range along each axis."""


def intervals(index: Sequence[slice], shape: Sequence[int]) -> tuple[Interval, ...]:
    """Resolve slices of step 1 for a shape; other steps raise IndexError."""
    if len(index) != len(shape):
        raise IndexError(f"expected {len(shape)} slices for shape {tuple(shape)}, got {len(index)}")
    resolved = []
    for part, size in zip(index, shape, strict=True):
        start, stop, step = part.indices(size)
        if step != 1:
            raise IndexError(f"expected slices of step 1, got {part}")
        resolved.append(Interval(start, max(stop, start)))
    return tuple(resolved)


@dataclass(frozen=True)
class AxisPattern:
    """A mapping from the axes of a tensor to those of a parameter, such as `(k g h) d -> d k g h`.

    Each side is a sequence of groups. A group has the names that share one axis, major to minor. A
    literal `1` on the right is an empty group: an axis of size 1. A name that is on the right only
    is a repetition.
    """

    source: tuple[tuple[str, ...], ...]
    target: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, part: TensorPart) -> "AxisPattern":
        """Parse the pattern of a part.

        >>> AxisPattern.of(TensorPart("q", "(k h) d -> d k 1 h", (("h", 4),))).target
        (('d',), ('k',), (), ('h',))
        """
        sides = part.axes.split("->")
        if len(sides) != 2:
            raise ValueError(f"axis pattern {part.axes!r}: expected one '->', got {len(sides) - 1}")
        source, target = (_parse_side(side, part.axes) for side in sides)
        left, right = _flat(source), _flat(target)
        if () in source:
            raise ValueError(f"axis pattern {part.axes!r}: expected a literal 1 on the right only")
        repeated = set(right) - set(left)
        if sorted({*left, *repeated}) != sorted(right) or len(set(left)) != len(left):
            raise ValueError(
                f"axis pattern {part.axes!r}: expected each name once on each side, or once on the "
                f"right to repeat, got {left} and {right}"
            )
        if missing := sorted(repeated - dict(part.sizes).keys()):
            raise ValueError(
                f"axis pattern {part.axes!r}: expected a size for {missing}, got none: a name on "
                f"the right only is a repetition, and its size is the number of repetitions"
            )
        return cls(source, target, part.sizes)

    def parameter_shape(self, tensor_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the parameter's shape for a tensor's shape; ValueError if they do not match."""
        sizes = self._resolve(tensor_shape, self.source)
        return tuple(math.prod(sizes[name] for name in group) for group in self.target)

    def read(self, source: TensorSource, name: str, index: Index | None = None) -> np.ndarray:
        """Read the box `index` of the parameter from the tensor `name`.

        There are three steps: (1) The box in target axes becomes an interval of each name. (2) The
        intervals of a source group become one interval of the group's axis, which is read. (3) The
        array is cut, transposed, repeated and grouped, and cut again where an interval was widened.
        """
        sizes = self._resolve(source.tensors[name].shape, self.source)
        target_shape = [math.prod(sizes[n] for n in group) for group in self.target]
        wanted = intervals(index or (slice(None),) * len(target_shape), target_shape)
        if not all(map(len, wanted)):
            return np.empty([len(i) for i in wanted], source.tensors[name].dtype)

        name_intervals = _split_all(self.target, wanted, sizes)
        boxes = [_cover(group, name_intervals, sizes) for group in self.source]
        array = source.read(name, tuple(box.as_slice() for box in boxes))

        read_intervals = _split_all(self.source, boxes, sizes)
        names, target = _flat(self.source), _flat(self.target)
        array = array.reshape([len(read_intervals[n]) for n in names])
        array = array[tuple(name_intervals[n].as_slice(read_intervals[n].start) for n in names)]
        array = array.transpose([names.index(n) for n in target if n in names])
        array = array.reshape([len(name_intervals[n]) if n in names else 1 for n in target])
        array = np.broadcast_to(array, [len(name_intervals[n]) for n in target])
        array = array.reshape(
            [math.prod(len(name_intervals[n]) for n in group) for group in self.target]
        )
        return array[
            tuple(
                interval.as_slice(_offset(group, name_intervals, sizes))
                for group, interval in zip(self.target, wanted, strict=True)
            )
        ]

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        """Return the tensor that becomes a whole parameter; of repetitions the first is taken."""
        sizes = self._resolve(parameter.shape, self.target)
        names, wanted = _flat(self.target), _flat(self.source)
        array = parameter.reshape([sizes[name] for name in names])
        array = array[tuple(slice(None) if name in wanted else 0 for name in names)]
        kept = [name for name in names if name in wanted]
        array = array.transpose([kept.index(name) for name in wanted])
        return array.reshape([math.prod(sizes[name] for name in group) for group in self.source])

    def join_last(self) -> "AxisPattern":
        """The pattern of an array that has one axis in place of the names of the last source axis.

        The scales of a weight are such an array: its groups replace the input features, which are
        the last axis of a published matrix, and adjacent axes of the parameter.
        """
        *others, last = self.source
        target = [group for group in self.target if not group or not set(group) <= set(last)]
        first = next(i for i, group in enumerate(self.target) if set(group) & set(last))
        target.insert(first, last[:1])
        sizes = tuple((name, size) for name, size in self.sizes if name not in last)
        return AxisPattern((*others, last[:1]), tuple(target), sizes)

    def pieces(
        self, info: TensorInfo, box: tuple[Interval, ...], max_elements: int
    ) -> Iterator[tuple[Interval, ...]]:
        """Cut a box of the parameter into pieces, each of which reads at most `max_elements`.

        The box is cut along axes that are major in the file, so that each piece is a few long runs.
        """
        if not all(map(len, box)):
            return
        sizes = self._resolve(info.shape, self.source)
        name_intervals = _split_all(self.target, box, sizes)
        size = max(
            math.prod(len(_cover(group, name_intervals, sizes)) for group in self.source),
            math.prod(map(len, box)),
        )
        stored = (self.source[axis] for axis in info.axis_order or range(len(info.shape)))
        major = (axis for name in _flat(stored) for axis, g in enumerate(self.target) if name in g)
        axis = next((axis for axis in major if len(box[axis]) > 1), None)
        if size <= max_elements or axis is None:
            yield box
            return
        step = max(1, len(box[axis]) * max_elements // size)
        for start in range(box[axis].start, box[axis].stop, step):
            piece = Interval(start, min(start + step, box[axis].stop))
            rest = (*box[:axis], piece, *box[axis + 1 :])
            yield from self.pieces(info, rest, max_elements)

    def _resolve(self, shape: Sequence[int], groups: Sequence[tuple[str, ...]]) -> dict[str, int]:
        """The sizes of all names, from the given sizes and a shape of one of the two sides."""
        if len(shape) != len(groups):
            raise ValueError(f"expected {len(groups)} axes, got shape {tuple(shape)}")
        given = dict(self.sizes)
        sizes = {name: given[name] for name in _flat(self.target) if name in given}
        for group, length in zip(groups, shape, strict=True):
            unknown = [name for name in group if name not in given]
            known = math.prod(given[name] for name in group if name in given)
            if len(unknown) > 1:
                raise ValueError(f"expected at most one name of {group} without a size")
            if known == 0 or length % known or (not unknown and length != known):
                multiple = "a multiple of " if unknown else ""
                raise ValueError(f"expected axis ({' '.join(group)}) of {multiple}{known}, "
                                 f"got {length}")  # fmt: skip
            sizes |= {name: given.get(name, length // known) for name in group}
        return sizes


def _parse_side(text: str, axes: str) -> tuple[tuple[str, ...], ...]:
    tokens = re.findall(r"\([^()]*\)|[^\s()]+", text)
    if "".join(tokens).replace(" ", "") != text.replace(" ", ""):
        raise ValueError(f"axis pattern {axes!r}: expected names and one level of parentheses")
    groups = []
    for token in tokens:
        names = token.strip("()").split()
        groups.append(() if names == ["1"] else tuple(names))
        if any(not name.isidentifier() for name in groups[-1]) or not names:
            raise ValueError(f"axis pattern {axes!r}: expected names, got {token!r}")
    return tuple(groups)


def _flat(groups: Iterable[tuple[str, ...]]) -> list[str]:
    return [name for group in groups for name in group]


def _split_all(
    groups: Iterable[tuple[str, ...]], box: Iterable[Interval], sizes: Mapping[str, int]
) -> dict[str, Interval]:
    """Intervals of all names whose product contains a box."""
    result: dict[str, Interval] = {}
    for group, interval in zip(groups, box, strict=True):
        result |= _split(group, interval, sizes)
    return result


def _split(
    group: tuple[str, ...], interval: Interval, sizes: Mapping[str, int]
) -> dict[str, Interval]:
    """Intervals of a group's names whose product contains an interval of the group's axis.

    Example with the sizes k=4, h=8: [8, 24) of (k h) is k [1, 3), h [0, 8). [9, 24) has the same
    result, and is cut later. [10, 12) is k [1, 2), h [2, 4): inside one k, the minor names form an
    axis.
    """
    result: dict[str, Interval] = {}
    for position, name in enumerate(group):
        minor = math.prod(sizes[n] for n in group[position + 1 :])
        major = Interval(interval.start // minor, -(-interval.stop // minor))
        result[name] = major
        if len(major) > 1:
            result |= {n: Interval(0, sizes[n]) for n in group[position + 1 :]}
            break
        interval = Interval(
            interval.start - major.start * minor, interval.stop - major.start * minor
        )
    return result


def _cover(
    group: tuple[str, ...], name_intervals: Mapping[str, Interval], sizes: Mapping[str, int]
) -> Interval:
    """Return an interval of a group's axis that contains the intervals of its names.

    It is the smallest one that is itself a product of intervals of the names.
    """
    first = _offset(group, name_intervals, sizes)
    last = 0
    for name in group:
        last = last * sizes[name] + name_intervals[name].stop - 1
    return _widen(group, Interval(first, last + 1), sizes)


def _widen(group: tuple[str, ...], interval: Interval, sizes: Mapping[str, int]) -> Interval:
    """Widen an interval of a group's axis to a product of intervals of its names."""
    box = _split(group, interval, sizes)
    first = _offset(group, box, sizes)
    return Interval(first, first + math.prod(len(box[name]) for name in group))


def _offset(
    group: tuple[str, ...], name_intervals: Mapping[str, Interval], sizes: Mapping[str, int]
) -> int:
    """The position, along the group's axis, of the first element of the names' intervals."""
    offset = 0
    for name in group:
        offset = offset * sizes[name] + name_intervals[name].start
    return offset
