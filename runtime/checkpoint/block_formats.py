"""Formats of quantised tensors: codes of few bits, and one scale for each block of codes.

Each format has these parts:

* `codes` and `scales`: the name suffixes and the types under which a file stores codes and scales.
* `scales_shape`: the shape of the scales for given codes; ValueError if the codes cannot be read.
* `numbers_shape`: the shape of the numbers, and the order of their axes in the codes.
* `boxes_to_read`: the boxes of codes and of scales that a box of numbers needs.
* `values`: the numbers of a box, as float32.

Does not know about files, and reads nothing. Guarantees: each value is the value of its code times
the scale of its block, in float32 and rounded once, whichever box contains it.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from ...modelzoo.families.quantisation import BlockFloat8, Quantisation
from ..files.optional_packages import require
from .tensor_source import Index, Interval

Shape = tuple[int, ...]
Box = tuple[Interval, ...]


@dataclass(frozen=True)
class StoredTensor:
    """The name suffix and the types under which a file stores the codes or scales of a tensor."""

    suffix: str
    """The suffix after the plain name of the quantised tensor."""
    types: tuple[str, ...]


def format_of(quantisation: Quantisation) -> "BlockFormat":
    """The format of a published quantisation."""
    if isinstance(quantisation, BlockFloat8):
        return Float8Blocks(quantisation)
    return Mxfp4Experts()


class Float8Blocks:
    """Matrices in float8_e4m3fn under their plain names, with a scale for each block of both axes.

    The last block of an axis may be smaller. DeepSeek publishes scales in float32, Qwen3 in
    bfloat16. The suffix says `inv` because the scale is the inverse of the scale of quantising.
    """

    codes = StoredTensor("", ("F8_E4M3",))
    scales = StoredTensor("_scale_inv", ("F32", "BF16"))

    def __init__(self, block: BlockFloat8):
        self._block = (block.rows, block.columns)
        self.name = f"F8_E4M3 by {block.rows}x{block.columns}"

    def scales_shape(self, codes_shape: Shape) -> Shape:
        if len(codes_shape) != 2:
            raise ValueError(f"expected rows and columns, got shape {codes_shape}")
        return tuple(
            -(-length // size) for length, size in zip(codes_shape, self._block, strict=True)
        )

    def numbers_shape(self, codes_shape: Shape) -> tuple[Shape, None]:
        return codes_shape, None

    def boxes_to_read(self, box: Box) -> tuple[Index, Index]:
        blocks = tuple(_blocks(i, size) for i, size in zip(box, self._block, strict=True))
        return _index(box), _index(blocks)

    def values(self, codes: np.ndarray, scales: np.ndarray, box: Box) -> np.ndarray:
        rows, columns = (
            np.arange(i.start, i.stop) // size - i.start // size
            for i, size in zip(box, self._block, strict=True)
        )
        values = _float8_values()[codes.view(np.uint8)]
        values *= scales.astype(np.float32)[:, columns][rows]
        return values


class Mxfp4Experts:
    """Matrices of experts in float4_e2m1fn, with a scale (float8_e8m0fnu) for each 32 inputs.

    Codes have the shape `[expert, output, block, byte]`; a byte has two codes, the first in its low
    half. The numbers have the shape `[expert, input, output]`, as in transformers. A scale of 255
    means that all numbers of its block are NaN. Sources: "OCP Microscaling Formats (MX)
    Specification" 1.0, and transformers' `integrations/mxfp4.py` for the order of the codes.
    """

    name = "MXFP4"
    codes = StoredTensor("_blocks", ("U8",))
    scales = StoredTensor("_scales", ("U8",))

    BLOCK = 32
    BLOCK_BYTES = BLOCK // 2

    def scales_shape(self, codes_shape: Shape) -> Shape:
        if len(codes_shape) != 4 or codes_shape[-1] != self.BLOCK_BYTES:
            raise ValueError(
                f"expected experts, outputs, blocks and {self.BLOCK_BYTES} bytes, "
                f"got shape {codes_shape}"
            )
        return codes_shape[:-1]

    def numbers_shape(self, codes_shape: Shape) -> tuple[Shape, tuple[int, ...]]:
        experts, outputs, blocks, _ = codes_shape
        return (experts, blocks * self.BLOCK, outputs), (0, 2, 1)

    def boxes_to_read(self, box: Box) -> tuple[Index, Index]:
        experts, inputs, outputs = box
        blocks = _index((experts, outputs, _blocks(inputs, self.BLOCK)))
        return (*blocks, slice(0, self.BLOCK_BYTES)), blocks

    def values(self, codes: np.ndarray, scales: np.ndarray, box: Box) -> np.ndarray:
        float8_e8m0fnu = require("ml_dtypes", "hf").float8_e8m0fnu
        values = _float4_pairs()[codes].view(np.float32)
        values *= scales.view(float8_e8m0fnu).astype(np.float32)[..., None]
        experts, outputs, num_blocks, _ = values.shape
        values = values.reshape(experts, outputs, num_blocks * self.BLOCK).transpose(0, 2, 1)
        inputs = box[1]
        return values[:, inputs.as_slice(inputs.start // self.BLOCK * self.BLOCK)]


BlockFormat = Float8Blocks | Mxfp4Experts


@cache
def _float8_values() -> np.ndarray:
    """The value of each byte; a table is several times faster than the cast of ml_dtypes."""
    return (
        np.arange(256, dtype=np.uint8).view(require("ml_dtypes", "hf").float8_e4m3fn).astype("f4")
    )


@cache
def _float4_pairs() -> np.ndarray:
    """The two float32 values of each byte, low half first, as one integer of eight bytes."""
    bytes_ = np.arange(256, dtype=np.uint8)
    halves = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1)
    values = halves.view(require("ml_dtypes", "hf").float4_e2m1fn).astype(np.float32)
    return values.view(np.uint64)[:, 0]


def _blocks(positions: Interval, size: int) -> Interval:
    """The blocks that contain an interval of positions of an axis."""
    return Interval(positions.start // size, -(-positions.stop // size))


def _index(box: Box) -> Index:
    return tuple(interval.as_slice() for interval in box)
