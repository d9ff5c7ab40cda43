"""The interface of all formats of tensors, and parts of tensors that are sources themselves.

`TensorSource` reads boxes of published tensors. Does not know about file formats, devices or
families.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
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
    """The tensors of a checkpoint, which several threads may read at once.

    Arrays are copies: they never refer to the file.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        ...

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor, or the box of it that `index`, slices of step 1, selects."""
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
        rows, *rest = intervals(index, self.tensors[name].shape)
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
        stack, *rest = intervals(index, info.shape)
        inner = tuple(interval.as_slice() for interval in rest)
        result = np.empty([len(stack), *map(len, rest)], info.dtype)
        for row, member in zip(result, self._members[stack.as_slice()], strict=True):
            row[...] = self._source.read(member, inner)
        return result


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

    def blocks(self, size: int) -> "Interval":
        """The blocks of a size that contain the interval."""
        return Interval(self.start // size, -(-self.stop // size))

    def relative_to(self, origin: int) -> "Interval":
        """The interval with positions counted from `origin`."""
        return Interval(self.start - origin, self.stop - origin)


Box = tuple[Interval, ...]
"""A range along each axis."""


def intervals(index: Sequence[slice] | None, shape: Sequence[int]) -> tuple[Interval, ...]:
    """Resolve slices of step 1 for a shape, or None for all of it; other steps raise IndexError."""
    if index is None:
        index = (slice(None),) * len(shape)
    if len(index) != len(shape):
        raise IndexError(f"expected {len(shape)} slices for shape {tuple(shape)}, got {len(index)}")
    resolved = []
    for part, size in zip(index, shape, strict=True):
        start, stop, step = part.indices(size)
        if step != 1:
            raise IndexError(f"expected slices of step 1, got {part}")
        resolved.append(Interval(start, max(stop, start)))
    return tuple(resolved)
