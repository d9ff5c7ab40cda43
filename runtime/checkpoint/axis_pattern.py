"""Rearrange boxes of published tensors into parts of parameters.

`AxisPattern` parses patterns such as "`(k g h) d -> d k g h`", and computes the shape of the
parameter and the box of the tensor that a box of the parameter needs. A `Turn` makes the box of the
parameter from the box of the tensor, in numpy or in jax. Does not know about file formats, devices
or families.

Guarantees: `AxisPattern.read(source, name, index)` equals the whole tensor reshaped, transposed,
repeated and then indexed. It reads one contiguous box of the tensor, which may be larger than the
result where several names share an axis.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...modelzoo.families.mapping import TensorPart
from .tensor_source import Box, Index, Interval, TensorInfo, TensorSource, intervals


@dataclass(frozen=True)
class Turn:
    """The steps that make a box of a parameter from a box of a tensor.

    Boxes of the same size at other places have an equal turn, so one compiled program serves all.
    """

    read: tuple[int, ...]
    """The sizes of the tensor's names in the array that was read."""
    cut: Box
    """The range of each of these names that is used."""
    order: tuple[int, ...]
    """The order of the tensor's names in the parameter."""
    with_ones: tuple[int, ...]
    """The sizes of the parameter's names, with 1 for names that repeat the array."""
    repeated: tuple[int, ...]
    """The sizes of the parameter's names."""
    grouped: tuple[int, ...]
    """The sizes of the parameter's axes."""
    box: Box
    """The range of each of these axes that is used."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box of the parameter."""
        return tuple(map(len, self.box))

    def __call__(self, array: Any) -> Any:
        """Return the box of the parameter, of numpy or of jax as the box of the tensor is."""
        array = array.reshape(self.read)[_index(self.cut)].transpose(self.order)
        array = array.reshape(self.with_ones)
        array = array.__array_namespace__().broadcast_to(array, self.repeated)
        return array.reshape(self.grouped)[_index(self.box)]


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
        """Read the box `index` of the parameter from the tensor `name`."""
        info = source.tensors[name]
        wanted = intervals(index, self.parameter_shape(info.shape))
        if not all(map(len, wanted)):
            return np.empty([len(i) for i in wanted], info.dtype)
        published, turn = self.plan(info.shape, wanted)
        return turn(source.read(name, published))

    def plan(self, tensor_shape: Sequence[int], wanted: Box) -> tuple[Index, Turn]:
        """The box of the tensor that a box of the parameter needs, and what makes one the other.

        There are three steps: (1) The box in target axes becomes an interval of each name. (2) The
        intervals of a source group become one interval of the group's axis, which is to be read.
        (3) The array is cut, transposed, repeated and grouped, and cut again where an interval was
        widened.
        """
        sizes = self._resolve(tensor_shape, self.source)
        name_intervals = _split_all(self.target, wanted, sizes)
        boxes = [_cover(group, name_intervals, sizes) for group in self.source]
        read_intervals = _split_all(self.source, boxes, sizes)
        names, target = _flat(self.source), _flat(self.target)
        turn = Turn(
            read=tuple(len(read_intervals[n]) for n in names),
            cut=tuple(name_intervals[n].relative_to(read_intervals[n].start) for n in names),
            order=tuple(names.index(n) for n in target if n in names),
            with_ones=tuple(len(name_intervals[n]) if n in names else 1 for n in target),
            repeated=tuple(len(name_intervals[n]) for n in target),
            grouped=tuple(
                math.prod(len(name_intervals[n]) for n in group) for group in self.target
            ),
            box=tuple(
                interval.relative_to(_offset(group, name_intervals, sizes))
                for group, interval in zip(self.target, wanted, strict=True)
            ),
        )
        return tuple(box.as_slice() for box in boxes), turn

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

    def pieces(self, info: TensorInfo, box: Box, max_elements: int) -> Iterator[Box]:
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
        # pieces of one size, so that few programs turn them on devices
        step = -(-len(box[axis]) // -(-len(box[axis]) // step))
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


def _index(box: Box) -> tuple[Any, ...]:
    """The index of a box; the ellipsis keeps an array without axes an array."""
    return (*(interval.as_slice() for interval in box), ...)


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
        major = interval.blocks(minor)
        result[name] = major
        if len(major) > 1:
            result |= {n: Interval(0, sizes[n]) for n in group[position + 1 :]}
            break
        interval = interval.relative_to(major.start * minor)
    return result


def _cover(
    group: tuple[str, ...], name_intervals: Mapping[str, Interval], sizes: Mapping[str, int]
) -> Interval:
    """Return an interval of a group's axis that contains the intervals of its names.

    It is the smallest one that is itself a product of intervals of the names.
    """
    last = 0
    for name in group:
        last = last * sizes[name] + name_intervals[name].stop - 1
    box = _split(group, Interval(_offset(group, name_intervals, sizes), last + 1), sizes)
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
