"""Reads the call frames of XLA's foreign functions, in functions that numba compiles.

A frame is a C structure of `xla/ffi/api/c_api.h`, which jaxlib ships. The offsets below are those
of all `VERSIONS` of this interface, as the C compiler lays them out on 64-bit systems.

Knows nothing of kernels or threads.
"""

# numba is an extra
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import NamedTuple

from . import VERSIONS
from .memory import call_address, load32, load64, native, store32, store64

_EXTENSION, _API, _CONTEXT = 8, 16, 24
_ARGUMENTS, _RESULTS = 40, 80
"""The offsets in a frame of the lists of arguments and of results."""
_COUNT, _BUFFERS = 16, 32
"""The offsets in such a list of the number of buffers and of their pointers."""
_DTYPE, _DATA, _RANK, _SIZES = 16, 24, 32, 40
_ERROR_CREATE, _SCHEDULE, _NUM_THREADS = 48, 136, 144
_METADATA = 1
"""The kind of the extension with which XLA asks for the version of a handler."""
_INVALID_ARGUMENT = 3
DTYPES = {"int8": 2, "int32": 4, "float32": 11, "bfloat16": 16}
"""XLA's numbers of dtypes."""
_MOST_AXES = 7
_BFLOAT16, _INT8 = DTYPES["bfloat16"], DTYPES["int8"]
_MOST_BUFFERS = 8


class Buffer(NamedTuple):
    """The dtype and rank that a kernel expects of an argument or a result."""

    dtype: str
    rank: int


@native(inline="always")
def _buffer(frame: int, buffers: int, index: int) -> int:
    return load64(load64(frame + buffers + _BUFFERS) + 8 * index)


@native(inline="always")
def argument(frame: int, index: int) -> int:
    """The address of an argument."""
    return load64(_buffer(frame, _ARGUMENTS, index) + _DATA)


@native(inline="always")
def result(frame: int, index: int) -> int:
    """The address of a result."""
    return load64(_buffer(frame, _RESULTS, index) + _DATA)


@native(inline="always")
def size(frame: int, index: int, axis: int) -> int:
    """The size of an axis of an argument."""
    return load64(load64(_buffer(frame, _ARGUMENTS, index) + _SIZES) + 8 * axis)


@native(inline="always")
def result_size(frame: int, index: int, axis: int) -> int:
    """The size of an axis of a result."""
    return load64(load64(_buffer(frame, _RESULTS, index) + _SIZES) + 8 * axis)


@native(inline="always")
def _dtype(frame: int, index: int) -> int:
    return load32(_buffer(frame, _ARGUMENTS, index) + _DTYPE)


@native(inline="always")
def is_narrow(frame: int, index: int) -> bool:
    """Whether an argument is in bfloat16."""
    return _dtype(frame, index) == _BFLOAT16


@native(inline="always")
def is_coded(frame: int, index: int) -> bool:
    """Whether an argument is in int8."""
    return _dtype(frame, index) == _INT8


@native
def is_question(frame: int) -> bool:
    """Whether XLA asks for the version of the handler; answers if so."""
    extension = load64(frame + _EXTENSION)
    if extension == 0:
        return False
    if load32(extension + 8) == _METADATA:
        metadata = load64(extension + 24)
        store32(metadata + 24, VERSIONS[0][0])
        store32(metadata + 28, VERSIONS[0][1])
        store32(metadata + 32, 0)
    return True


def packed(buffers: Sequence[Buffer]) -> int:
    """The dtype and rank of each buffer, in a byte of an integer for `fits`."""
    assert all(buffer.rank <= _MOST_AXES for buffer in buffers), "a rank has three bits"
    kinds = [(DTYPES[buffer.dtype] << 3) | buffer.rank for buffer in buffers]
    assert len(kinds) <= _MOST_BUFFERS, "an integer has eight bytes"
    padding = [0] * (_MOST_BUFFERS - len(kinds))
    return int.from_bytes(bytes([*kinds, *padding]), "little", signed=True)


@native
def _fit(frame: int, buffers: int, expected: int) -> bool:
    count = load64(frame + buffers + _COUNT)
    if count > _MOST_BUFFERS:
        return False
    for index in range(_MOST_BUFFERS):
        kind = 0
        if index < count:
            buffer = _buffer(frame, buffers, index)
            rank = load64(buffer + _RANK)
            if rank > _MOST_AXES:
                return False
            kind = (load32(buffer + _DTYPE) << 3) | rank
        if kind != (expected >> (8 * index)) & 255:
            return False
    return True


@native
def fits(frame: int, arguments: int, results: int) -> bool:
    """Whether a frame has buffers of the numbers, dtypes and ranks that `packed` has noted."""
    return _fit(frame, _ARGUMENTS, arguments) and _fit(frame, _RESULTS, results)


@native
def refuse(frame: int, scratch: int, message: int) -> int:
    """Make an error of XLA with the message at an address, for a handler to return."""
    store64(scratch, 32)
    store64(scratch + 8, 0)
    store64(scratch + 16, message)
    store64(scratch + 24, _INVALID_ARGUMENT)
    return call_address(load64(load64(frame + _API) + _ERROR_CREATE), (scratch,))


@native
def num_threads(frame: int, scratch: int) -> int:
    """The threads of XLA's pool; `scratch` has 48 bytes."""
    store64(scratch, 32)
    store64(scratch + 8, 0)
    store64(scratch + 16, load64(frame + _CONTEXT))
    store64(scratch + 24, scratch + 40)
    store64(scratch + 40, 1)
    call_address(load64(load64(frame + _API) + _NUM_THREADS), (scratch,))
    return load64(scratch + 40)


@native
def schedule(frame: int, scratch: int, task: int, data: int) -> None:
    """Run the C function `task` with `data` on a thread of XLA's pool."""
    store64(scratch, 40)
    store64(scratch + 8, 0)
    store64(scratch + 16, load64(frame + _CONTEXT))
    store64(scratch + 24, task)
    store64(scratch + 32, data)
    call_address(load64(load64(frame + _API) + _SCHEDULE), (scratch,))
