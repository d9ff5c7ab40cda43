"""Formats of quantised tensors: codes of few bits, with the scales and zero points of blocks.

A format has these parts:

* `suffixes`: the name suffixes and the types under which a file stores the arrays of a tensor.
* `bind`: the tensor with these arrays; ArrayMismatch if they do not belong together.

Does not know about files, and reads nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from ....modelzoo.families.quantisation import (
    Awq,
    BlockFloat8,
    CompressedTensors,
    Gptq,
    Quantisation,
)
from ..tensor_source import TensorInfo
from .coded_tensors import (
    CODES,
    GROUPS,
    MXFP4_BLOCK,
    SCALES,
    ZEROS,
    ArrayMismatch,
    CodedMatrix,
    CodedTensor,
    Mxfp4Tensor,
    Packing,
    Shape,
    StoredMatrix,
)

_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Stored:
    """The name suffix and the types under which a file stores an array of a tensor."""

    suffix: str
    """The suffix after the common beginning of the names."""
    types: tuple[str, ...]
    is_optional: bool = False


class BlockFormat(ABC):
    """A format of quantised tensors."""

    name: str
    """The name of the format in reports."""
    plain = ""
    """The suffix of the plain name of a tensor, after the common beginning of the names."""
    suffixes: Mapping[str, Stored]
    """The stored arrays by role; `CODES` and `SCALES` are always there."""
    unused: tuple[str, ...] = ()
    """Suffixes of arrays that weights do not need."""

    @abstractmethod
    def bind(self, infos: Mapping[str, TensorInfo]) -> CodedTensor:
        """The tensor with these arrays; ArrayMismatch if they do not belong together."""


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


class Float8Blocks(BlockFormat):
    """Matrices in float8_e4m3fn under their plain names, with a scale for each block of both axes.

    The last block of an axis may be smaller. DeepSeek publishes scales in float32, Qwen3 in
    bfloat16. The suffix says `inv` because the scale is the inverse of the factor by which numbers
    were multiplied before they were rounded.
    """

    suffixes: Mapping[str, Stored] = {
        CODES: Stored("", ("F8_E4M3",)),
        SCALES: Stored("_scale_inv", ("F32", "BF16")),
    }

    def __init__(self, rows: int, columns: int):
        self._block = (rows, columns)
        self.name = f"F8_E4M3 by {rows}x{columns}"

    def bind(self, infos: Mapping[str, TensorInfo]) -> CodedMatrix:
        shape = _matrix_shape(infos[CODES])
        _expect(infos, SCALES, _num_blocks(shape, self._block))
        return CodedMatrix(shape, self._block, ("float8_e4m3fn", infos[SCALES].dtype.name))


class GptqFormat(BlockFormat):
    """Integers of 4 or 8 bits in words along inputs, with zero points in words along outputs.

    Arrays have the axes `[inputs, outputs]`. The first version of the format stores each zero point
    minus one. With act-order, `g_idx` has the group of each input. Source: `qlinear_cuda_old.py` of
    AutoGPTQ, and `convert_gptq_v1_to_v2_format` of GPTQModel.
    """

    plain = ".weight"
    suffixes: Mapping[str, Stored] = {
        CODES: Stored(".qweight", ("I32",)),
        SCALES: Stored(".scales", _FLOATS),
        ZEROS: Stored(".qzeros", ("I32",)),
        GROUPS: Stored(".g_idx", ("I32",), is_optional=True),
    }

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


class AwqFormat(BlockFormat):
    """4-bit integers and zero points in words along outputs, in the order of AWQ's kernel.

    Arrays have the axes `[inputs, outputs]`. Source: `awq/utils/packing_utils.py` of AutoAWQ.
    """

    plain = ".weight"
    suffixes: Mapping[str, Stored] = {
        CODES: Stored(".qweight", ("I32",)),
        SCALES: Stored(".scales", _FLOATS),
        ZEROS: Stored(".qzeros", ("I32",)),
    }
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


class CompressedFormat(BlockFormat):
    """Integers or float8_e4m3fn of `compressed-tensors`; integers may be in words along inputs.

    A scale is for the matrix, for an output, for a group of inputs, or for a block of both axes.
    Packed integers, and their zero points in words along outputs, are stored without a sign: half
    of the range is added to each. Source: `compressors/pack_quantized/helpers.py` of the package.
    """

    unused = (
        ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point",
        ".k_scale", ".v_scale", ".q_scale", "_shape",
    )  # fmt: skip
    """Scales of activations, which are not quantised here, and shapes."""

    def __init__(self, quantisation: CompressedTensors):
        self._quantisation = quantisation
        bits, packed = quantisation.bits, quantisation.is_packed
        types = ("F8_E4M3",) if quantisation.is_float else ("I8",)
        self.suffixes = {
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
        center = _center(quantisation.bits, is_symmetric)
        if packing is None:  # codes are stored with a sign
            center -= 2 ** (quantisation.bits - 1)
        codes = _integers(quantisation.bits, is_symmetric)
        if quantisation.is_float:
            center, codes = 0, "float8_e4m3fn"
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
    """The number to subtract from codes without a sign; 0 for four bits with zero points.

    Codes of eight bits are kept in int8, so they have a center even with zero points. Codes of four
    bits with zero points are kept in uint4.
    """
    return 2 ** (bits - 1) if is_symmetric or bits == 8 else 0


def _integers(bits: int, is_symmetric: bool) -> str:
    """The dtype of codes after their center is subtracted."""
    return f"{'int' if is_symmetric or bits == 8 else 'uint'}{bits}"


def _in_groups(group: int) -> str:
    return f" in groups of {group}" if group else ""


class Mxfp4Experts(BlockFormat):
    """Matrices of experts in float4_e2m1fn, with a scale (float8_e8m0fnu) for each 32 inputs.

    Codes have the shape `[expert, output, block, byte]`; a byte has two codes, the first in its low
    half. The numbers have the shape `[expert, input, output]`, as in transformers. A scale of 255
    means that all numbers of its block are NaN. Sources: "OCP Microscaling Formats (MX)
    Specification" 1.0, and transformers' `integrations/mxfp4.py` for the order of the codes.
    """

    name = "MXFP4"
    suffixes: Mapping[str, Stored] = {
        CODES: Stored("_blocks", ("U8",)),
        SCALES: Stored("_scales", ("U8",)),
    }

    def bind(self, infos: Mapping[str, TensorInfo]) -> Mxfp4Tensor:
        shape, num_bytes = infos[CODES].shape, MXFP4_BLOCK // 2
        if len(shape) != 4 or shape[-1] != num_bytes:
            raise ArrayMismatch(
                CODES,
                f"expected experts, outputs, blocks and {num_bytes} bytes, got shape {shape}",
            )
        _expect(infos, SCALES, shape[:-1])
        return Mxfp4Tensor(shape)


def _num_blocks(shape: tuple[int, int], block: tuple[int, int]) -> Shape:
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))
