"""Read boxes of tensors in codes from the stored arrays that each box needs.

A `CodedTensor` says what a plan may keep of it, and reads one *part* of a box of its numbers: the
numbers themselves (`values`), or their codes, scales, offsets or groups, each with the shape of the
box. Does not know about names, types or files. Guarantees: a number is `(code - zero point) *
scale` in float32, rounded once, whichever box contains it, and equals `code * scale + offset` for
the codes and offsets of the parts if scales have 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from ....modelzoo.weights.weight_formats import WeightFormat
from ...errors import UserError
from ...files.optional_packages import require
from ..tensor_source import Box, Index, Interval

WORD_BITS = 32


@dataclass(frozen=True)
class Packing:
    """A packing of codes of 4 or 8 bits without a sign in words of 32 bits along one axis."""

    bits: int
    places: tuple[int, ...] | None = None
    """The place of each code in its word, from the lowest bits; None for the order of codes."""

    @property
    def per_word(self) -> int:
        """The number of codes in a word."""
        return WORD_BITS // self.bits

    def unpack(self, words: np.ndarray, axis: int, codes: Interval) -> np.ndarray:
        """The codes of an interval along an axis as uint8, from the array of their words."""
        places = self.places or range(self.per_word)
        shape = [1] * words.ndim
        shape.insert(axis + 1, self.per_word)
        shifts = np.array([place * self.bits for place in places], np.uint32).reshape(shape)
        each = np.expand_dims(words.view(np.uint32), axis + 1) >> shifts
        each = (each & np.uint32(2**self.bits - 1)).astype(np.uint8)
        each = each.reshape(*words.shape[:axis], -1, *words.shape[axis + 1 :])
        first = codes.blocks(self.per_word).start * self.per_word
        return each[(slice(None),) * axis + (codes.as_slice(first),)]


Shape = tuple[int, ...]
Part = Literal["values", "codes", "scales", "offsets", "groups"]
Fetch = Callable[[str, Index | None], np.ndarray]
"""Reads a box of the stored array of a role; the whole array for None."""
CODES, SCALES, ZEROS, GROUPS = "codes", "scales", "zero points", "groups"
"""The roles of stored arrays."""
MXFP4_BLOCK = 32
"""The inputs of a block of MXFP4."""


class ArrayMismatch(UserError):
    """The stored array of a role that does not belong to the others."""

    def __init__(self, role: str, problem: str):
        self.role = role
        super().__init__(problem)


@dataclass(frozen=True)
class KeptCodes:
    """The codes of a tensor that a plan may keep."""

    format: WeightFormat
    """The format, without the size of groups."""
    blocks: tuple[int, ...]
    """The count of numbers that share a scale, for each axis; 0 for the whole axis."""

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in self.blocks if size > 1)
        form = replace(self.format, scales="")
        return f"{form} (blocks of {sizes})" if sizes else str(form)


@dataclass(frozen=True)
class StoredMatrix:
    """The form in which a matrix `[rows, columns]` is stored."""

    is_transposed: bool = False
    packing: Packing | None = None
    """The packing of words along the last stored axis, or along the first if `packs_first`."""
    packs_first: bool = False
    is_flat: bool = False
    """Whether the array has no axis of columns: a number for each row, or one for all."""

    def read(self, fetch: Callable[[Index | None], np.ndarray], box: Box) -> np.ndarray:
        """Read a box of rows and columns."""
        if self.is_flat:
            return fetch(None).reshape(-1, 1)[box[0].as_slice()]
        stored = list(box[::-1] if self.is_transposed else box)
        axis = 0 if self.packs_first else 1
        packed = stored[axis]
        if self.packing is not None:
            stored[axis] = packed.blocks(self.packing.per_word)
        array = fetch(_index(tuple(stored)))
        if self.packing is not None:
            array = self.packing.unpack(array, axis, packed)
        return array.T if self.is_transposed else array


PLAIN = StoredMatrix()


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix `[outputs, inputs]` in codes, with a scale for each block of both axes."""

    shape: Shape
    block: tuple[int, int]
    """The outputs and inputs of a block; 0 for all."""
    dtypes: tuple[str, str]
    """The dtypes of the codes and of the scales."""
    codes: StoredMatrix = PLAIN
    scales: StoredMatrix = PLAIN
    zeros: StoredMatrix | None = None
    """The form of zero points; None if all are `center`."""
    center: int = 0
    """The number to subtract from stored codes to get the codes of the part."""
    zero_bias: int = 0
    """The number to add to stored zero points."""
    has_groups: bool = False
    """Whether the group of each input is stored."""
    is_ordered: bool = False
    """Whether the inputs of a stored group may have any positions, and not only adjacent ones."""
    is_symmetric: bool = True
    """Whether all zero points must be `center`."""

    @property
    def axis_order(self) -> tuple[int, ...] | None:
        return (1, 0) if self.codes.is_transposed else None

    @property
    def kept(self) -> KeptCodes:
        codes, scales = self.dtypes
        has_offsets = self.zeros is not None and not self.is_symmetric
        form = WeightFormat(codes, 0, scales, has_offsets, self.is_ordered)
        return KeptCodes(form, self.block)

    def read(self, fetch: Fetch, box: Box, part: Part) -> np.ndarray:
        """Read a part of a box."""
        if part == "groups":
            return np.broadcast_to(self._groups(fetch, box[1]), [len(i) for i in box])
        if part == "codes":
            return self._codes(fetch, box)
        scales = self._by_block(fetch, SCALES, self.scales, box).astype(np.float32)
        zeros = None
        # a plan reads only codes and scales of a symmetric format, so zero points are checked here
        if self.zeros is not None and (part != "scales" or self.is_symmetric):
            zeros = as_float32(self._by_block(fetch, ZEROS, self.zeros, box)).astype(np.int32)
            zeros = zeros + (self.zero_bias - self.center)
            if self.is_symmetric and zeros.any():
                problem = "expected equal zero points of a symmetric format, got others"
                raise ArrayMismatch(ZEROS, problem)
        if part == "scales":
            return scales
        if part == "offsets":
            return np.zeros_like(scales) if zeros is None else scales * -zeros.astype(np.float32)
        values = as_float32(self._codes(fetch, box))
        if zeros is not None:
            values -= zeros
        values *= scales
        return values

    def _codes(self, fetch: Fetch, box: Box) -> np.ndarray:
        codes = self.codes.read(lambda index: fetch(CODES, index), box)
        if not self.center:
            return codes
        return (codes.astype(np.int16) - self.center).astype(np.int8)

    def _by_block(self, fetch: Fetch, role: str, stored: StoredMatrix, box: Box) -> np.ndarray:
        """For each number of a box, the entry of the block of this number."""
        rows, columns = (
            np.zeros(len(i), np.int64) if not size else np.arange(i.start, i.stop) // size
            for i, size in zip(box, self.block, strict=True)
        )
        if self.has_groups:
            columns = self._groups(fetch, box[1])
        blocks = tuple(Interval(int(x.min()), int(x.max()) + 1) for x in (rows, columns))
        array = stored.read(lambda index: fetch(role, index), blocks)
        return array[:, columns - blocks[1].start][rows - blocks[0].start]

    def _groups(self, fetch: Fetch, inputs: Interval) -> np.ndarray:
        """The group of each input."""
        if self.has_groups:
            groups = fetch(GROUPS, (inputs.as_slice(),)).astype(np.int64)
            num_groups = -(-self.shape[1] // (self.block[1] or self.shape[1]))
            if groups.min() < 0 or groups.max() >= num_groups:
                raise ArrayMismatch(GROUPS, f"expected groups below {num_groups}, got others")
            return groups
        return np.arange(inputs.start, inputs.stop) // (self.block[1] or inputs.stop)


@dataclass(frozen=True)
class Mxfp4Tensor:
    """The codes of the matrices of experts, `[expert, output, block, byte]`."""

    codes_shape: Shape
    axis_order = (0, 2, 1)
    kept = KeptCodes(WeightFormat("float4_e2m1fn", 0, "float8_e8m0fnu"), (1, 32, 1))

    @property
    def shape(self) -> Shape:
        experts, outputs, blocks, num_bytes = self.codes_shape
        return experts, blocks * num_bytes * 2, outputs

    def read(self, fetch: Fetch, box: Box, part: Part) -> np.ndarray:
        """Read a part of a box."""
        experts, inputs, outputs = box
        size = MXFP4_BLOCK
        blocks = _index((experts, outputs, inputs.blocks(size)))
        cut = inputs.as_slice(inputs.start // size * size)
        if part == "offsets":
            return np.zeros([len(i) for i in box], np.float32)
        if part == "groups":
            groups = np.arange(inputs.start, inputs.stop) // size
            return np.broadcast_to(groups[None, :, None], [len(i) for i in box])
        scales = None
        if part != "codes":
            scales = _small_float_values("float8_e8m0fnu")[fetch(SCALES, blocks)]
            if part == "scales":
                return scales.repeat(size, axis=-1).transpose(0, 2, 1)[:, cut]
        pairs = fetch(CODES, (*blocks, slice(0, size // 2)))
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1)
        codes = codes.reshape(*pairs.shape[:3], size).view(ml_dtype("float4_e2m1fn"))
        if scales is not None:
            codes = as_float32(codes)
            codes *= scales[..., None]
        return codes.reshape(*pairs.shape[:2], -1).transpose(0, 2, 1)[:, cut]


CodedTensor = CodedMatrix | Mxfp4Tensor
"""A tensor with the arrays of its codes: the shape of its numbers, the codes that a plan may keep,
and the order of axes in the file (see `TensorInfo`)."""


def as_float32(codes: np.ndarray) -> np.ndarray:
    """The values of codes; of small floats by a table, which is faster than a cast of ml_dtypes."""
    if codes.dtype.kind in "iu":
        return codes.astype(np.float32)
    return _small_float_values(codes.dtype.name)[codes.view(np.uint8)]


@cache
def _small_float_values(dtype: str) -> np.ndarray:
    """The value of each byte; bits above those of the type are not used."""
    bytes_ = np.arange(256, dtype=np.uint8)
    if dtype.startswith("float4"):
        bytes_ &= 15
    return bytes_.view(ml_dtype(dtype)).astype(np.float32)


def ml_dtype(name: str) -> np.dtype:
    """A dtype of the package ml_dtypes."""
    return np.dtype(getattr(require("ml_dtypes", "hf"), name))


def _index(box: Box) -> Index:
    return tuple(interval.as_slice() for interval in box)
