"""Makes a handler of XLA's foreign functions from a kernel that works in units.

The units of a call are computed by the thread that calls and by threads of XLA's own pool, each of
which takes the next unit when it is free. A thread that starts late finds nothing left to do, and
touches neither arguments nor results then. The result of a unit does not depend on its thread.

Knows nothing of what kernels compute. Guarantees: a handler checks the number, dtype and rank of
all buffers, and their sizes by the kernel's own function, before any is read or written.
"""

# numba is an extra
# pyright: reportMissingImports=false

from typing import Any, NamedTuple

from numba import types

from .frames import Buffer, checker, is_question, num_threads, refuser, schedule
from .memory import (
    address_of,
    atomic_add,
    c_function,
    call_address,
    free,
    load64,
    malloc,
    native,
    sched_yield,
    store64,
)

_NEXT, _DONE, _OWNERS, _COUNT, _FRAME, _SCRATCH = 0, 64, 128, 192, 200, 208
"""Offsets in the memory of a call: counters that several threads change are on lines of the cache
of their own."""
_CALL_BYTES = 256
_SPINS = 2000
"""The number of times that the caller asks for the end before it gives its core to others."""


class Kernel(NamedTuple):
    """A kernel, as functions that numba compiles."""

    name: str
    """Its name among XLA's foreign functions."""
    arguments: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    count: Any
    """The number of units of a frame, or -1 if the sizes of its buffers do not belong together."""
    run: Any
    """Computes a unit of a frame, given by its index."""


class Compiled(NamedTuple):
    """The C functions of a kernel."""

    handler: Any
    task: Any
    """The function that threads of the pool run; the handler names it."""


@native
def _release(call: int) -> None:
    """Give up a call; its last owner frees its memory."""
    if atomic_add(call + _OWNERS, -1) == 1:
        call_address(free(), call)


def _compile_task(run: Any) -> Any:
    """Compile the function that computes units of a call until there are none left."""

    @native
    def work(call: int) -> None:
        total = load64(call + _COUNT)
        unit = atomic_add(call + _NEXT, 1)
        while unit < total:
            run(load64(call + _FRAME), unit)
            atomic_add(call + _DONE, 1)
            unit = atomic_add(call + _NEXT, 1)
        _release(call)

    @c_function(types.void(types.intp))
    def task(call):
        work(call)

    return task


def compile_kernel(kernel: Kernel) -> Compiled:
    """Compile the handler of a kernel."""
    count, task = kernel.count, _compile_task(kernel.run)
    fits = checker(kernel.arguments, kernel.results)
    expected = ", ".join(f"{buffer.dtype} of rank {buffer.rank}" for buffer in kernel.arguments)
    refuse_kinds = refuser(f"{kernel.name}: expected arguments {expected}, got others")
    refuse_sizes = refuser(f"{kernel.name}: the sizes of its arguments do not belong together")
    task_address = address_of(task.native_name)

    @c_function(types.intp(types.intp))
    def handler(frame):
        if is_question(frame):
            return 0
        call = call_address(malloc(), _CALL_BYTES)
        scratch = call + _SCRATCH
        total = -1
        is_fit = fits(frame)
        if is_fit:
            total = count(frame)
        if total < 0:
            error = refuse_sizes(frame, scratch) if is_fit else refuse_kinds(frame, scratch)
            call_address(free(), call)
            return error
        threads = max(1, min(num_threads(frame, scratch), total))
        store64(call + _NEXT, 0)
        store64(call + _DONE, 0)
        store64(call + _COUNT, total)
        store64(call + _FRAME, frame)
        # the caller waits, so it is an owner once more
        store64(call + _OWNERS, threads + 1)
        for _ in range(threads - 1):
            schedule(frame, scratch, task_address(), call)
        # the C function, so that the kernel is compiled once
        call_address(task_address(), call)
        spins = 0
        while atomic_add(call + _DONE, 0) < total:
            spins += 1
            if spins > _SPINS:
                call_address(sched_yield(), 0)
        _release(call)
        return 0

    return Compiled(handler, task)
