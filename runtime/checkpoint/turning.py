"""Fill boxes of parameters with pieces of published tensors, in several threads.

Each piece is read as it is in the file, and its axes are turned on the way into a box. `HostBox` is
a box in the memory of the host; `device_boxes.DeviceBoxes` are boxes on devices. Does not know
about file formats, families or jax. Guarantees: each thread holds one piece at a time, and
`MAX_THREADS` bounds their number.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from ..devices.machine import usable_cores
from .axis_pattern import Turn
from .tensor_source import Index, TensorSource

MAX_THREADS = 8
ALIGNMENT = 64
STRIP_ROWS = 128
"""The rows of a piece that are turned at once."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that is read at once, and its place in the box that it helps to fill."""

    tensors: TensorSource
    tensor: str
    index: Index
    turn: Turn
    start: tuple[int, ...]
    """The position of its first element in the filled box."""

    def read_bits(self, dtype: np.dtype) -> np.ndarray:
        """Read the piece as it is in the tensor, and return its bits in a dtype."""
        return _as_bits(self.tensors.read(self.tensor, self.index).astype(dtype, copy=False))


def in_threads(write: Callable[[Any], None], pieces: Iterable[Any]) -> None:
    """Call a function for each of some pieces, or groups of pieces, in several threads."""
    pieces = iter(pieces)
    first = list(islice(pieces, 2))
    if len(first) < 2:
        deque(map(write, first), maxlen=0)
        return
    with ThreadPoolExecutor(min(usable_cores() or 1, MAX_THREADS)) as pool:
        deque(pool.map(write, chain(first, pieces)), maxlen=0)


class HostBox:
    """A box in the memory of the host, with zeros where no piece is written."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype):
        self.array = aligned_zeros(shape, dtype)

    def write(self, piece: Piece) -> None:
        """Read a piece, turn it, and write it."""
        turned = piece.turn(piece.read_bits(self.array.dtype))
        outer = len(piece.start) - turned.ndim
        box = (slice(i, i + n) for i, n in zip(piece.start[outer:], turned.shape, strict=True))
        _copy(turned, _as_bits(self.array)[(*piece.start[:outer], *box, ...)])


def _as_bits(array: np.ndarray) -> np.ndarray:
    """View an array as unsigned integers, which are copied faster than the types of ml_dtypes."""
    return array.view(f"u{array.itemsize}")


def _copy(turned: np.ndarray, into: np.ndarray) -> None:
    """Copy in strips of `STRIP_ROWS` rows, of which the processor's caches hold a line each."""
    axes = [axis for axis in range(turned.ndim) if turned.shape[axis] > 1]
    axes.sort(key=lambda axis: turned.strides[axis])
    if not axes:
        into[...] = turned
        return
    row = 1  # the number of elements that are adjacent in the memory of the array that was read
    for axis in axes:
        if turned.strides[axis] == row * turned.itemsize:
            row *= turned.shape[axis]
    major, length = axes[-1], turned.shape[axes[-1]]
    step = max(1, length * STRIP_ROWS * row // turned.size)
    for start in range(0, length, step):
        strip = (slice(None),) * major + (slice(start, start + step),)
        into[strip] = turned[strip]


def aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros at a multiple of `ALIGNMENT`, which jax on the CPU uses without a copy."""
    # zeros cost no more than empty memory: the system provides large arrays as zeroed pages
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
