"""Codes, scales and offsets of the blocks of GGUF tensors.

A number of a block is `code * scale + offset`. Blocks of 256 numbers have a scale for each 16 or 32
numbers, and some types also have an offset. These scales and offsets are integers times factors of
the block. The layouts of blocks are those of `ggml-quants.h` of llama.cpp and of `gguf.quants`.
Knows nothing of files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....modelzoo.weights.weight_formats import WeightFormat


@dataclass(frozen=True)
class BlockCodes:
    """The codes of blocks, and the numbers of the groups of each block."""

    codes: np.ndarray
    """`[..., blocks, numbers of a block]`."""
    scales: np.ndarray
    """`[..., blocks, groups of a block]`, in float32."""
    offsets: np.ndarray | None = None


@dataclass(frozen=True)
class GGUFCodes:
    """The codes of a type of tensors."""

    format: WeightFormat
    unpack: Callable[[np.ndarray], BlockCodes]
    """The codes of blocks of bytes, `[..., blocks, bytes of a block]`."""


def _q8_0(blocks: np.ndarray) -> BlockCodes:
    return BlockCodes(blocks[..., 2:].view(np.int8), _float16(blocks, 0))


def _q4_0(blocks: np.ndarray) -> BlockCodes:
    return BlockCodes(_signed(_halves(blocks[..., 2:], 16), 8), _float16(blocks, 0))


def _q4_1(blocks: np.ndarray) -> BlockCodes:
    return BlockCodes(_halves(blocks[..., 4:], 16), _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: np.ndarray) -> BlockCodes:
    codes = _halves(blocks[..., 6:], 16) | _bits(blocks[..., 2:6]) << 4
    return BlockCodes(_signed(codes, 16), _float16(blocks, 0))


def _q5_1(blocks: np.ndarray) -> BlockCodes:
    codes = _halves(blocks[..., 8:], 16) | _bits(blocks[..., 4:8]) << 4
    return BlockCodes(_signed(codes, 0), _float16(blocks, 0), _float16(blocks, 2))


def _q4_k(blocks: np.ndarray) -> BlockCodes:
    return BlockCodes(_halves(blocks[..., 16:], 32), *_scales_and_minima(blocks))


def _q5_k(blocks: np.ndarray) -> BlockCodes:
    fifth = _planes(blocks[..., 16:48], 1, range(8)).reshape(*blocks.shape[:-1], -1)
    codes = _halves(blocks[..., 48:], 32) | fifth << 4
    return BlockCodes(_signed(codes, 0), *_scales_and_minima(blocks))


def _q6_k(blocks: np.ndarray) -> BlockCodes:
    low = _halves(blocks[..., :128], 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32)
    high = _planes(high, 3, (0, 2, 4, 6)).reshape(low.shape)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _float16(blocks, 208)
    return BlockCodes(_signed(low | high << 4, 32), scales)


CODES = {
    "Q8_0": GGUFCodes(WeightFormat("int8", 32, "float16"), _q8_0),
    "Q4_0": GGUFCodes(WeightFormat("int4", 32, "float16"), _q4_0),
    "Q4_1": GGUFCodes(WeightFormat("uint4", 32, "float16", has_offsets=True), _q4_1),
    "Q5_0": GGUFCodes(WeightFormat("int8", 32, "float16"), _q5_0),
    "Q5_1": GGUFCodes(WeightFormat("int8", 32, "float16", has_offsets=True), _q5_1),
    "Q4_K": GGUFCodes(WeightFormat("uint4", 32, "float32", has_offsets=True), _q4_k),
    "Q5_K": GGUFCodes(WeightFormat("int8", 32, "float32", has_offsets=True), _q5_k),
    "Q6_K": GGUFCodes(WeightFormat("int8", 16, "float32"), _q6_k),
}
"""The codes by name of the type; other types have plain numbers."""


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """The number at a byte of each block, as float32 with an axis of size one."""
    two = np.ascontiguousarray(blocks[..., at : at + 2])
    return two.view("<f2").astype(np.float32)


def _signed(codes: np.ndarray, center: int) -> np.ndarray:
    return codes.astype(np.int8) - np.int8(center)


def _planes(packed: np.ndarray, mask: int, shifts: range | tuple[int, ...]) -> np.ndarray:
    """The bits of each byte at each shift, with a new axis of shifts before the axis of bytes."""
    of_shifts = np.array(shifts, np.uint8)[:, None]
    return packed[..., None, :] >> of_shifts & np.uint8(mask)


def _halves(packed: np.ndarray, run: int) -> np.ndarray:
    """The low halves of each run of bytes, followed by its high halves."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return _planes(runs, 15, (0, 4)).reshape(*packed.shape[:-1], -1)


def _bits(packed: np.ndarray) -> np.ndarray:
    """The bits of bytes, the lowest first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and offsets of eight groups: integers of six bits times factors of the block."""
    scales, minima, high = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([scales & 63, high & 15 | scales >> 2 & 48], axis=-1)
    minima = np.concatenate([minima & 63, high >> 4 | minima >> 2 & 48], axis=-1)
    return scales * _float16(blocks, 0), -(minima * _float16(blocks, 2))
