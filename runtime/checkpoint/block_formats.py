"""Formats of quantised tensors: codes of few bits, with the scales and zero points of blocks.

A format has these parts:

* `suffixes`: the name suffixes and the types under which a file stores the arrays of a tensor.
* `bind`: the tensor with these arrays; ArrayMismatch if they do not belong together.

A `CodedTensor` says what a plan may keep of it, and reads one *part* of a box of its numbers: the
numbers themselves (`values`), or their codes, scales, offsets or groups, each with the shape of the
box. Does not know about files. Guarantees: a number is `(code - zero point) * scale` in
float32, rounded once, whichever box contains it, and equals `code * scale + offset` for the codes
and offsets of the parts if scales have 16 bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

import numpy as np

from ...modelzoo.families.quantisation import (
    Awq,
    BlockFloat8,
    CompressedTensors,
    Gptq,
    Quantisation,
)
from ...modelzoo.weight_formats import WeightFormat
from ..files.optional_packages import require
from .packed_words import Packing
from .tensor_source import Box, Index, Interval, TensorInfo

Shape = tuple[int, ...]
Part = Literal["values", "codes", "scales", "offsets", "groups"]
Fetch = Callable[[str, Index | None], np.ndarray]
"""Reads a box of the stored array of a role; the whole array for None."""
CODES, SCALES, ZEROS, GROUPS = "codes", "scales", "zero points", "groups"
"""The roles of stored arrays."""
_FLOATS = ("F32", "BF16", "F16")


class ArrayMismatch(ValueError):
    """The stored array of a role that does not belong to the others."""

    def __init__(self, role: str, problem: str):
        self.role = role
        super().__init__(problem)


@dataclass(frozen=True)
class Stored:
    """The name suffix and the types under which a file stores an array of a tensor."""

    suffix: str
    """The suffix after the common beginning of the names."""
    types: tuple[str, ...]
    is_optional: bool = False


@dataclass(frozen=True)
class KeptCodes:
    """The codes of a tensor that a plan may keep."""

    format: WeightFormat
    """The format, without the size of groups."""
    blocks: tuple[int, ...]
    """The numbers along each axis that share a scale; 0 for all."""

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in self.blocks if size > 1)
        form = replace(self.format, scales="")
        return f"{form} (blocks of {sizes})" if sizes else str(form)


class CodedTensor(Protocol):
    """A tensor with the arrays of its codes."""

    @property
    def kept(self) -> KeptCodes | None:
        """The codes that a plan may keep; None for none."""
        ...

    @property
    def shape(self) -> Shape:
        """The shape of the numbers."""
        ...

    @property
    def axis_order(self) -> tuple[int, ...] | None:
        """See `TensorInfo.axis_order`."""
        ...

    def read(self, fetch: Fetch, box: Box, part: Part) -> np.ndarray:
        """Read a part of a box of the numbers."""
        ...


class BlockFormat(Protocol):
    """A format of quantised tensors."""

    @property
    def name(self) -> str:
        """The name of the format in reports."""
        ...

    @property
    def plain(self) -> str:
        """The suffix of the name of the numbers, after the common beginning of the names."""
        ...

    @property
    def suffixes(self) -> Mapping[str, Stored]:
        """The stored arrays by role; `CODES` and `SCALES` are always there."""
        ...

    @property
    def unused(self) -> tuple[str, ...]:
        """Suffixes of arrays that weights do not need."""
        ...

    def bind(self, infos: Mapping[str, TensorInfo]) -> CodedTensor:
        """The tensor with these arrays; ArrayMismatch if they do not belong together."""
        ...


def format_of(quantisation: Quantisation) -> BlockFormat:
    """The format of a published quantisation."""
    match quantisation:
        case BlockFloat8(rows, columns):
            return Float8Blocks(rows, columns)
        case Gptq():
            return GptqFormat(quantisation)
        case Awq(group):
            return AwqFormat(group)
        case CompressedTensors():
            return CompressedFormat(quantisation)
    return Mxfp4Experts()


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
            stored[axis] = self.packing.words(packed)
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
    """Whether stored groups may have inputs of any positions."""
    is_symmetric: bool = True
    """Whether all zero points must be `center`."""

    @property
    def axis_order(self) -> tuple[int, ...] | None:
        return (1, 0) if self.codes.is_transposed else None

    @property
    def kept(self) -> KeptCodes | None:
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
        if part == "scales":
            return scales
        zeros = None
        if self.zeros is not None:
            zeros = as_float32(self._by_block(fetch, ZEROS, self.zeros, box)).astype(np.int32)
            zeros = zeros + (self.zero_bias - self.center)
            if self.is_symmetric and zeros.any():
                problem = "expected equal zero points of a symmetric format, got others"
                raise ArrayMismatch(ZEROS, problem)
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
        """The entry of its block for each number of a box."""
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


def _expect(infos: Mapping[str, TensorInfo], role: str, *shapes: Shape) -> None:
    """Refuse an array with another shape than these."""
    got = infos[role].shape
    if got not in shapes:
        expected = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ArrayMismatch(
            role, f"expected shape {expected} for codes of {infos[CODES].shape}, got {got}"
        )


def _matrix_shape(info: TensorInfo) -> tuple[int, int]:
    if len(info.shape) != 2:
        raise ArrayMismatch(CODES, f"expected rows and columns, got shape {info.shape}")
    rows, columns = info.shape
    return rows, columns


class Float8Blocks:
    """Matrices in float8_e4m3fn under their plain names, with a scale for each block of both axes.

    The last block of an axis may be smaller. DeepSeek publishes scales in float32, Qwen3 in
    bfloat16. The suffix says `inv` because the scale is the inverse of the scale of quantising.
    """

    plain = ""
    suffixes: Mapping[str, Stored] = {
        CODES: Stored("", ("F8_E4M3",)),
        SCALES: Stored("_scale_inv", ("F32", "BF16")),
    }
    unused = ()

    def __init__(self, rows: int, columns: int):
        self._block = (rows, columns)
        self.name = f"F8_E4M3 by {rows}x{columns}"

    def bind(self, infos: Mapping[str, TensorInfo]) -> CodedMatrix:
        shape = _matrix_shape(infos[CODES])
        _expect(infos, SCALES, _num_blocks(shape, self._block))
        return CodedMatrix(shape, self._block, ("float8_e4m3fn", infos[SCALES].dtype.name))


class GptqFormat:
    """Integers of 4 or 8 bits in words along inputs, with zero points in words along outputs.

    Arrays have the axes `[inputs, outputs]`. The first version of the format stores zero points
    less one. With act-order, `g_idx` has the group of each input. Source: `qlinear_cuda_old.py` of
    AutoGPTQ, and `convert_gptq_v1_to_v2_format` of GPTQModel.
    """

    plain = ".weight"
    suffixes: Mapping[str, Stored] = {
        CODES: Stored(".qweight", ("I32",)),
        SCALES: Stored(".scales", _FLOATS),
        ZEROS: Stored(".qzeros", ("I32",)),
        GROUPS: Stored(".g_idx", ("I32",), is_optional=True),
    }
    unused = ()

    def __init__(self, quantisation: Gptq):
        self._quantisation = quantisation
        self.name = f"GPTQ {quantisation.bits} bit" + _in_groups(quantisation.group)

    def bind(self, infos: Mapping[str, TensorInfo]) -> CodedMatrix:
        quantisation = self._quantisation
        packing = Packing(quantisation.bits)
        words, outputs = _matrix_shape(infos[CODES])
        inputs = words * packing.per_word
        groups, outputs_in_words = _num_blocks(
            (inputs, outputs), (quantisation.group or inputs, packing.per_word)
        )
        _expect(infos, SCALES, (groups, outputs))
        _expect(infos, ZEROS, (groups, outputs_in_words))
        if GROUPS in infos:
            _expect(infos, GROUPS, (inputs,))
        elif quantisation.is_ordered:
            raise ArrayMismatch(GROUPS, "expected the group of each input, got no such tensor")
        transposed = StoredMatrix(is_transposed=True)
        return CodedMatrix(
            (outputs, inputs),
            (1, quantisation.group),
            (_integers(quantisation.bits, quantisation.is_symmetric), infos[SCALES].dtype.name),
            StoredMatrix(is_transposed=True, packing=packing, packs_first=True),
            transposed,
            StoredMatrix(is_transposed=True, packing=packing),
            _center(quantisation.bits, quantisation.is_symmetric),
            quantisation.zero_bias,
            GROUPS in infos,
            quantisation.is_ordered,
            quantisation.is_symmetric,
        )


class AwqFormat:
    """4-bit integers and zero points in words along outputs, in the order of AWQ's kernel.

    Arrays have the axes `[inputs, outputs]`. Source: `awq/utils/packing_utils.py` of AutoAWQ.
    """

    plain = ".weight"
    suffixes: Mapping[str, Stored] = {
        CODES: Stored(".qweight", ("I32",)),
        SCALES: Stored(".scales", _FLOATS),
        ZEROS: Stored(".qzeros", ("I32",)),
    }
    unused = ()
    packing = Packing(4, places=(0, 4, 1, 5, 2, 6, 3, 7))

    def __init__(self, group: int):
        self._group = group
        self.name = "AWQ 4 bit" + _in_groups(group)

    def bind(self, infos: Mapping[str, TensorInfo]) -> CodedMatrix:
        inputs, words = _matrix_shape(infos[CODES])
        outputs = words * self.packing.per_word
        groups = -(-inputs // (self._group or inputs))
        _expect(infos, SCALES, (groups, outputs))
        _expect(infos, ZEROS, (groups, words))
        packed = StoredMatrix(is_transposed=True, packing=self.packing)
        return CodedMatrix(
            (outputs, inputs),
            (1, self._group),
            (_integers(4, is_symmetric=False), infos[SCALES].dtype.name),
            packed,
            StoredMatrix(is_transposed=True),
            packed,
            is_symmetric=False,
        )


class CompressedFormat:
    """Integers or float8_e4m3fn, alone or in words along inputs, of `compressed-tensors`.

    A scale is for the matrix, for an output, for a group of inputs, or for a block of both axes.
    Packed integers, and their zero points in words along outputs, have half of the range added.
    Source: `compressors/pack_quantized/helpers.py` of the package.
    """

    plain = ""
    unused = (
        ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point",
        ".k_scale", ".v_scale", ".q_scale", "_shape",
    )  # fmt: skip
    """Scales of activations, which are not quantised here, and shapes."""

    def __init__(self, quantisation: CompressedTensors):
        self._quantisation = quantisation
        bits, packed = quantisation.bits, quantisation.is_packed
        types = ("F8_E4M3",) if quantisation.is_float else ("I8",)
        self.suffixes: dict[str, Stored] = {
            CODES: Stored("_packed", ("I32",)) if packed else Stored("", types),
            SCALES: Stored("_scale", _FLOATS),
            # left out if all are zeros
            ZEROS: Stored("_zero_point", ("I32",) if packed else types, is_optional=True),
            GROUPS: Stored("_g_idx", ("I32",), is_optional=True),
        }
        kind = "FP8" if quantisation.is_float else f"int{bits}"
        rows, columns = quantisation.block or (1, 0)
        blocks = f" by {rows}x{columns}" if rows > 1 else _in_groups(columns)
        self.name = f"compressed {kind}{blocks}"

    def bind(self, infos: Mapping[str, TensorInfo]) -> CodedMatrix:
        quantisation = self._quantisation
        packing = Packing(quantisation.bits) if quantisation.is_packed else None
        outputs, columns = _matrix_shape(infos[CODES])
        inputs = columns * (packing.per_word if packing else 1)
        shape = outputs, inputs
        block = quantisation.block
        if block is not None:
            scales = _num_blocks(shape, block)
            _expect(infos, SCALES, scales)
        else:
            whole = ((), (1,), (1, 1))
            _expect(infos, SCALES, (outputs, 1), (outputs,), *whole)
            is_whole = infos[SCALES].shape in whole and outputs > 1
            block, scales = (0 if is_whole else 1, 0), (1 if is_whole else outputs, 1)
        is_flat = len(infos[SCALES].shape) < 2
        zeros = None
        if ZEROS in infos:
            zeros = StoredMatrix(is_flat=is_flat)
            shapes = [scales, infos[SCALES].shape]
            if packing:
                zeros = StoredMatrix(packing=packing, packs_first=True)
                shapes = [(-(-scales[0] // packing.per_word), scales[1])]
            _expect(infos, ZEROS, *shapes)
        if GROUPS in infos:
            _expect(infos, GROUPS, (inputs,))
        is_symmetric = quantisation.is_symmetric or ZEROS not in infos
        center = _center(quantisation.bits, is_symmetric) if packing else 0
        codes = _integers(quantisation.bits, is_symmetric)
        if quantisation.is_float:
            codes = "float8_e4m3fn"
        return CodedMatrix(
            shape,
            block,
            (codes, infos[SCALES].dtype.name),
            StoredMatrix(packing=packing),
            StoredMatrix(is_flat=is_flat),
            zeros,
            center,
            has_groups=GROUPS in infos,
            is_ordered=GROUPS in infos,
            is_symmetric=is_symmetric,
        )


def _center(bits: int, is_symmetric: bool) -> int:
    """The number to subtract from codes without a sign: none for four bits with zero points.

    Codes of eight bits are stored with a sign. Codes of four bits have a dtype without one.
    """
    return 2 ** (bits - 1) if is_symmetric or bits == 8 else 0


def _integers(bits: int, is_symmetric: bool) -> str:
    """The dtype of codes less their center."""
    return f"{'int' if is_symmetric or bits == 8 else 'uint'}{bits}"


def _in_groups(group: int) -> str:
    return f" in groups of {group}" if group else ""


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
        size = Mxfp4Experts.BLOCK
        blocks = _index((experts, outputs, _blocks(inputs, size)))
        cut = inputs.as_slice(inputs.start // size * size)
        if part == "offsets":
            return np.zeros([len(i) for i in box], np.float32)
        if part == "groups":
            groups = np.arange(inputs.start, inputs.stop) // size
            return np.broadcast_to(groups[None, :, None], [len(i) for i in box])
        scales = _float8_e8m0_values()[fetch(SCALES, blocks)] if part != "codes" else None
        if part == "scales":
            assert scales is not None
            return scales.repeat(size, axis=-1).transpose(0, 2, 1)[:, cut]
        pairs = fetch(CODES, (*blocks, slice(0, size // 2)))
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1)
        codes = codes.reshape(*pairs.shape[:3], size).view(_ml_dtype("float4_e2m1fn"))
        if scales is not None:
            codes = as_float32(codes)
            codes *= scales[..., None]
        return codes.reshape(*pairs.shape[:2], -1).transpose(0, 2, 1)[:, cut]


class Mxfp4Experts:
    """Matrices of experts in float4_e2m1fn, with a scale (float8_e8m0fnu) for each 32 inputs.

    Codes have the shape `[expert, output, block, byte]`; a byte has two codes, the first in its low
    half. The numbers have the shape `[expert, input, output]`, as in transformers. A scale of 255
    means that all numbers of its block are NaN. Sources: "OCP Microscaling Formats (MX)
    Specification" 1.0, and transformers' `integrations/mxfp4.py` for the order of the codes.
    """

    name = "MXFP4"
    plain = ""
    suffixes: Mapping[str, Stored] = {
        CODES: Stored("_blocks", ("U8",)),
        SCALES: Stored("_scales", ("U8",)),
    }
    unused = ()

    BLOCK = 32
    BLOCK_BYTES = BLOCK // 2

    def bind(self, infos: Mapping[str, TensorInfo]) -> Mxfp4Tensor:
        shape = infos[CODES].shape
        if len(shape) != 4 or shape[-1] != self.BLOCK_BYTES:
            raise ArrayMismatch(
                CODES,
                f"expected experts, outputs, blocks and {self.BLOCK_BYTES} bytes, "
                f"got shape {shape}",
            )
        _expect(infos, SCALES, shape[:-1])
        return Mxfp4Tensor(shape)


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
    return bytes_.view(_ml_dtype(dtype)).astype(np.float32)


@cache
def _float8_e8m0_values() -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(_ml_dtype("float8_e8m0fnu")).astype(np.float32)


def _ml_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(require("ml_dtypes", "hf"), name))


def _num_blocks(shape: tuple[int, int], block: tuple[int, int]) -> Shape:
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


def _blocks(positions: Interval, size: int) -> Interval:
    """The blocks that contain an interval of positions of an axis."""
    return Interval(positions.start // size, -(-positions.stop // size))


def _index(box: Box) -> Index:
    return tuple(interval.as_slice() for interval in box)
