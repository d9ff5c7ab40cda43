"""Makes a handler of XLA's foreign functions from a kernel that works in units.

The units of a call are computed by the thread that calls and by threads of XLA's own pool, each of
which takes the next unit when it is free. A thread that starts late finds nothing left to do, and
touches neither arguments nor results then. The result of a unit does not depend on its thread.

Knows nothing of what kernels compute. Guarantees: a handler checks the number, dtype and rank of
all buffers, and their sizes by the kernel's own function, before any is read or written.
"""

# numba is an extra
# pyright: reportMissingImports=false

from functools import cache
from typing import Any, NamedTuple

from .frames import Buffer, fits, is_question, num_threads, packed, refuse, schedule
from .memory import (
    address_of,
    atomic_add,
    c_function,
    call_address,
    caller,
    free,
    load64,
    malloc,
    native,
    on_stack,
    sched_yield,
    store64,
    text,
)

_NEXT, _DONE, _OWNERS, _COUNT, _FRAME, _RUN = 0, 64, 128, 192, 200, 208
_FAILED, _SCRATCH = 216, 224
"""Offsets in the memory of a call: counters that several threads change are on lines of the cache
of their own."""
_CALL_BYTES = 272
_SPINS = 2000
"""The number of times that the caller asks for the end before it gives its core to others."""


class Kernel(NamedTuple):
    """A kernel, as functions of integers that numba has not compiled."""

    name: str
    """Its name among XLA's foreign functions."""
    arguments: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    count: Any
    """The number of units of a frame, or -1 if the sizes of its buffers do not belong together."""
    run: Any
    """Computes a unit of a frame, given by its index, and returns 0, or 1 if memory lacked."""


@native
def _release(call: int) -> None:
    """Give up a call; its last owner frees its memory."""
    if atomic_add(call + _OWNERS, -1) == 1:
        call_address(free(), (call,))


def _work(call: int) -> int:
    """Compute units of a call until there are none left, as threads of the pool do."""
    total = load64(call + _COUNT)
    unit = atomic_add(call + _NEXT, 1)
    while unit < total:
        if call_address(load64(call + _RUN), (load64(call + _FRAME), unit)) != 0:
            store64(call + _FAILED, 1)
        atomic_add(call + _DONE, 1)
        unit = atomic_add(call + _NEXT, 1)
    _release(call)
    return 0


@cache
def _handle() -> Any:
    """The handler of all kernels, which differ by its last six arguments."""
    no_memory = text("noria: no memory for a call")
    work, work_address = caller(_work), address_of(c_function(_work).native_name)

    def handle(
        frame: int, count: int, run: int, arguments: int, results: int, kinds: int, sizes: int
    ) -> int:
        if is_question(frame):
            return 0
        call = call_address(malloc(), (_CALL_BYTES,))
        if call == 0:
            return refuse(frame, on_stack((0, 0, 0, 0)), no_memory())
        scratch = call + _SCRATCH
        total, is_fit = -1, fits(frame, arguments, results)
        if is_fit:
            total = call_address(count, (frame,))
        if total < 0:
            error = refuse(frame, scratch, sizes if is_fit else kinds)
            call_address(free(), (call,))
            return error
        threads = max(1, min(num_threads(frame, scratch), total))
        store64(call + _NEXT, 0)
        store64(call + _DONE, 0)
        store64(call + _COUNT, total)
        store64(call + _FRAME, frame)
        store64(call + _RUN, run)
        store64(call + _FAILED, 0)
        # the caller waits, so it is an owner once more
        store64(call + _OWNERS, threads + 1)
        for _ in range(threads - 1):
            schedule(frame, scratch, work_address(), call)
        work((call,))
        spins = 0
        while atomic_add(call + _DONE, 0) < total:
            spins += 1
            if spins > _SPINS:
                call_address(sched_yield(), (0,))
        failed = load64(call + _FAILED)
        _release(call)
        return refuse(frame, on_stack((0, 0, 0, 0)), no_memory()) if failed else 0

    return caller(handle)


def compile_kernel(kernel: Kernel) -> str:
    """Compile the handler of a kernel, a C function, and return its name in object code."""
    expected = ", ".join(f"{buffer.dtype} of rank {buffer.rank}" for buffer in kernel.arguments)
    kinds = text(f"{kernel.name}: expected arguments {expected}, got others")
    sizes = text(f"{kernel.name}: the sizes or rows of its arguments do not belong together")
    count, run = (
        address_of(c_function(function).native_name) for function in (kernel.count, kernel.run)
    )
    handle, arguments, results = _handle(), packed(kernel.arguments), packed(kernel.results)

    def handler(frame: int) -> int:
        return handle((frame, count(), run(), arguments, results, kinds(), sizes()))

    return c_function(handler).native_name
