"""A plain quantiser of cache entries in numpy: the reference of tests of caches in codes."""

import ml_dtypes
import numpy as np

DTYPES = {
    "int8": (np.int8, 127),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448),
    "int4": (ml_dtypes.int4, 7),
}


def encode(
    x: np.ndarray, axis: int, codes: str, scales: np.dtype, splits: tuple[int, ...] = ()
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the codes of entries, and the scales of each part of their features."""
    dtype, largest = DTYPES[codes]
    if codes == "int4":
        x = rotate(x, axis, splits)
    found = [_encode_part(part, axis, dtype, largest, scales) for part in np.split(x, splits, axis)]
    return np.concatenate([part for part, _ in found], axis), [scale for _, scale in found]


def decode(codes: np.ndarray, scales: list[np.ndarray], axis: int, splits=()) -> np.ndarray:
    """Return the values of entries in codes, in float32."""
    parts = np.split(codes.astype(np.float32), splits, axis)
    pairs = zip(parts, scales, strict=True)
    values = [part * np.expand_dims(scale.astype(np.float32), axis) for part, scale in pairs]
    x = np.concatenate(values, axis)
    return rotate(x, axis, splits) if codes.dtype == ml_dtypes.int4 else x


def pair(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return bytes of two codes of int4 each."""
    lower, upper = (x.astype(np.int8).view(np.uint8) for x in (lower, upper))
    return (upper * 16 + lower % 16).view(np.int8)


def in_blocks(codes: np.ndarray) -> np.ndarray:
    """Return codes with entries and features last in blocks of features, an axis before entries."""
    size = 128 if codes.shape[-1] % 128 == 0 else codes.shape[-1]
    return np.stack(np.split(codes, codes.shape[-1] // size, axis=-1), axis=-3)


def rotate(x: np.ndarray, axis: int, splits: tuple[int, ...] = ()) -> np.ndarray:
    """Return the fast Walsh-Hadamard transform of blocks of features, which is its own inverse.

    The size of a block is the largest power of two that divides the features of every part.
    """
    sizes = np.diff((0, *splits, x.shape[axis])).tolist()
    block = max(n for n in (2**i for i in range(10)) if all(size % n == 0 for size in sizes))
    blocks = np.moveaxis(x, axis, -1).reshape(-1, block).astype(np.float64)
    half = 1
    while half < block:
        pairs = blocks.reshape(-1, block // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        blocks = np.stack([first + second, first - second], axis=2).reshape(-1, block)
        half *= 2
    rotated = (blocks / np.sqrt(block)).astype(np.float32)
    return np.moveaxis(rotated.reshape(np.moveaxis(x, axis, -1).shape), -1, axis)


def _encode_part(x, axis, dtype, largest, scales):
    scale = (np.abs(x).max(axis) * np.float32(1 / largest)).astype(scales)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)
    rounded = np.clip(x / np.expand_dims(divisor, axis), -largest, largest)
    return (rounded if dtype == ml_dtypes.float8_e4m3fn else np.rint(rounded)).astype(dtype), scale
