"""Calls a handler of XLA's foreign functions with buffers between pages that nobody may touch."""

import ctypes
import mmap
from typing import Any, NamedTuple

import numpy as np

PAGE = mmap.PAGESIZE
DTYPES = {"float32": 11, "int32": 4, "bfloat16": 16, "int8": 2}
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded(NamedTuple):
    """An array in memory of its own, and that memory."""

    array: np.ndarray
    memory: mmap.mmap


def guarded(array: np.ndarray, *, at_end: bool) -> Guarded:
    """Copy an array to memory whose pages before and after it cannot be read or written.

    It touches the page after it, or the one before it.
    """
    size = -(-max(array.nbytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    offset = PAGE + (size - array.nbytes if at_end else 0)
    copy = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    for page in (base, base + PAGE + size):
        assert _libc.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0
    return Guarded(copy, memory)


def _words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def call(address: int, arguments: list[np.ndarray], results: list[np.ndarray]) -> str | None:
    """Call the handler at an address as XLA does, with one thread.

    Returns:
      The message of the error that the handler makes; None without one.
    """
    errors: list[str] = []

    def create(given: int) -> int:
        message = ctypes.c_char_p(ctypes.c_int64.from_address(given + 16).value).value
        errors.append((message or b"").decode())
        return 1

    def num_threads(given: int) -> int:
        ctypes.c_int64.from_address(ctypes.c_int64.from_address(given + 24).value).value = 1
        return 0

    functions = _FUNCTION(create), _FUNCTION(num_threads)
    api = np.zeros(32, np.int64)
    for place, function in zip((48, 144), functions, strict=True):
        api[place // 8] = ctypes.cast(function, ctypes.c_void_p).value
    kept: list[Any] = [api]

    def pointers(arrays: list[np.ndarray]) -> tuple[int, int]:
        buffers = []
        for array in arrays:
            sizes = _words(*array.shape) if array.ndim else _words(0)
            kind = DTYPES[array.dtype.name]
            buffer = _words(48, 0, kind, _address(array), array.ndim, _address(sizes))
            kept.extend((sizes, buffer))
            buffers.append(_address(buffer))
        table = _words(*buffers)
        kept.append(table)
        return len(arrays), _address(table)

    frame = np.zeros(24, np.int64)
    frame[2], frame[4] = _address(api), 3
    for place, arrays in ((5, arguments), (10, results)):
        frame[place + 2], frame[place + 4] = pointers(arrays)
    failed = _FUNCTION(address)(_address(frame))
    assert bool(failed) == bool(errors)
    return errors[0] if errors else None
