"""Keeps XLA's alarms about slow operations off the terminal while graphs compile.

XLA and its plugins write alarms as errors to file descriptor 2, each with a log of its own, and no
setting silences them alone. So after a moment of compiling, this descriptor leads to a child
process, which passes on everything else (`alarm_filter`). A thread could not do it: what a crash
writes last would be lost with the thread.

In a pod, messages take this way from the start to the end, because Gloo and jax's client write
there too.

Does not know what is compiled. Guarantees: nothing is lost but what the filter removes; afterwards
the descriptor is what it was.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..process.standard_streams import native_outputs

START_SECONDS = 0.5
"""The time after which the child is started. No alarm comes within a second, and most compiles are
faster."""
_END_SECONDS = 1.0
_left: list["subprocess.Popen[bytes]"] = []
"""The children that had not ended by then."""
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def without_alarms() -> Iterator[None]:
    """Compile, or run a pod, without alarms.

    Calls within others, or at the same time, have no effect.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        yield
        return
    detour = _Detour()
    timer = threading.Timer(START_SECONDS, detour.begin)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        detour.end()
        _ONE_AT_A_TIME.release()


class _Detour:
    """The way of messages through the child process."""

    def __init__(self) -> None:
        self._terminal, self._child = -1, None

    def begin(self) -> None:
        with suppress(OSError):  # without standard error, or without room for a process
            self._terminal = os.dup(2)
            script = str(Path(__file__).with_name("alarm_filter.py"))
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # it passes on what comes after Ctrl-C
            )
            assert self._child.stdin is not None
            for descriptor in native_outputs:
                os.dup2(self._child.stdin.fileno(), descriptor)

    def end(self) -> None:
        if self._child is not None:
            assert self._child.stdin is not None
            for descriptor in native_outputs:
                os.dup2(self._terminal, descriptor)
            self._child.stdin.close()
            try:
                self._child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                # a process that was started meanwhile may still write to the child
                _left[:] = [self._child, *(child for child in _left if child.poll() is None)]
        if self._terminal >= 0:
            os.close(self._terminal)
