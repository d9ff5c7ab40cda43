"""A plain quantiser of cache entries in numpy: the reference of tests of caches in codes."""

import ml_dtypes
import numpy as np

DTYPES = {"int8": (np.int8, 127), "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448)}


def encode(
    x: np.ndarray, axis: int, codes: str, scales: np.dtype, splits: tuple[int, ...] = ()
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the codes of entries, and the scales of each part of their features."""
    dtype, largest = DTYPES[codes]
    found = [_encode_part(part, axis, dtype, largest, scales) for part in np.split(x, splits, axis)]
    return np.concatenate([part for part, _ in found], axis), [scale for _, scale in found]


def decode(codes: np.ndarray, scales: list[np.ndarray], axis: int, splits=()) -> np.ndarray:
    """Return the values of entries in codes, in float32."""
    parts = np.split(codes.astype(np.float32), splits, axis)
    pairs = zip(parts, scales, strict=True)
    values = [part * np.expand_dims(scale.astype(np.float32), axis) for part, scale in pairs]
    return np.concatenate(values, axis)


def _encode_part(x, axis, dtype, largest, scales):
    scale = (np.abs(x).max(axis) * np.float32(1 / largest)).astype(scales)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)
    rounded = np.clip(x / np.expand_dims(divisor, axis), -largest, largest)
    return (np.rint(rounded) if dtype == np.int8 else rounded).astype(dtype), scale
