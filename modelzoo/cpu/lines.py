"""Moves of bfloat16 numbers.

For a write, and for a gather in a loop, XLA for the CPU converts the whole array to float32.

Knows nothing of what lines hold.
"""

# numba is an extra
# pyright: reportMissingImports=false

from . import PUT_LINES, PUT_RANK, TAKE_PAIRS
from .frames import Buffer, argument, result, result_size, size
from .memory import load32, native, store32
from .threads import Kernel

_UNIT_LINES = 32


def take_kernel() -> Kernel:
    """The kernel that reads pairs of numbers.

    Its arguments are an array `[V, D]` and places `[M, W]` of its pairs. The result is `[M, 2 W]`.
    A place that is not in the array is an error of the caller; nothing outside is read.
    """

    def count(frame: int) -> int:
        M, W = size(frame, 1, 0), size(frame, 1, 1)
        fits = result_size(frame, 0, 0) == M and result_size(frame, 0, 1) == 2 * W
        has_pairs = size(frame, 0, 0) * size(frame, 0, 1) >= 2
        return (M + _UNIT_LINES - 1) // _UNIT_LINES if fits and has_pairs else -1

    def run(frame: int, unit: int) -> int:
        M, W = size(frame, 1, 0), size(frame, 1, 1)
        last = size(frame, 0, 0) * size(frame, 0, 1) // 2 - 1
        for i in range(unit * _UNIT_LINES * W, min(M, (unit + 1) * _UNIT_LINES) * W):
            place = min(max(load32(argument(frame, 1) + 4 * i), 0), last)
            store32(result(frame, 0) + 4 * i, load32(argument(frame, 0) + 4 * place))
        return 0

    array = Buffer("bfloat16", 2)
    return Kernel(TAKE_PAIRS, (array, Buffer("int32", 2)), (array,), count, run)


def put_kernel() -> Kernel:
    """The kernel that writes lines.

    Its arguments are an array of rank 5, lines `[M, W]` and their places `[M]`. The result is the
    first argument, in place. It has lines of W numbers, and a line whose place is not in it is
    dropped. W is even.
    """

    @native
    def num_lines(frame):
        """The lines of the array, or -1 if it has no whole number of them."""
        numbers, W = 1, size(frame, 1, 1)
        for axis in range(PUT_RANK):
            numbers *= size(frame, 0, axis)
        return numbers // W if W > 0 and W % 2 == 0 and numbers % W == 0 else -1

    def count(frame: int) -> int:
        M = size(frame, 1, 0)
        fits = size(frame, 2, 0) == M and num_lines(frame) >= 0
        # in place, so it has the size of the argument
        fits &= result(frame, 0) == argument(frame, 0)
        return (M + _UNIT_LINES - 1) // _UNIT_LINES if fits else -1

    def run(frame: int, unit: int) -> int:
        N, num_bytes, M = num_lines(frame), 2 * size(frame, 1, 1), size(frame, 1, 0)
        for line in range(unit * _UNIT_LINES, min(M, (unit + 1) * _UNIT_LINES)):
            place = load32(argument(frame, 2) + 4 * line)
            if 0 <= place < N:
                to = argument(frame, 0) + place * num_bytes
                of = argument(frame, 1) + line * num_bytes
                for i in range(0, num_bytes, 4):
                    store32(to + i, load32(of + i))
        return 0

    array = Buffer("bfloat16", PUT_RANK)
    arguments = array, Buffer("bfloat16", 2), Buffer("int32", 1)
    return Kernel(PUT_LINES, arguments, (array,), count, run)
