"""Handles SIGTERM, SIGHUP and Ctrl-C: the first signal drains a job, the second ends it.

While rows are in flight, the first signal only sets `requested`, and the job lets these rows
finish. At any other time, and on a second signal, `StopNow` is raised at the current instruction,
and the command exits without waiting for graphs that compile or load. The files are then as after a
kill, which the journal survives.

Python runs a handler only between two instructions of the main thread, which may be inside native
code for minutes, and ignores the exception of a handler that runs in a callback. So a thread
receives the numbers of the signals, too. It ends the process if `StopNow` has not done so within
`END_SECONDS`. During an import the handler ends the process itself: an exception in the middle of
the start of an extension module can crash the process. Native code may also turn the exception into
an error of its own; the context ends with `StopNow` all the same.

SIGHUP is sent when a terminal or an SSH connection is closed. Under `nohup` it has no effect.

Does not know about rows or journals. Guarantees: a signal that must end the process does so; the
previous handlers are restored.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from ..console import tell
from ..errors import EXIT_INTERRUPTED, EXIT_RESUMABLE

EXIT_CODES = {
    signal.SIGTERM: EXIT_RESUMABLE,
    signal.SIGHUP: EXIT_RESUMABLE,
    signal.SIGINT: EXIT_INTERRUPTED,
}
END_SECONDS = 1.0
"""The time for a normal end after a signal; after it, the process ends wherever it is."""
_at_forced_end: list[Callable[[int], object]] = []


class StopNow(BaseException):
    """The immediate end of a job. Not an Exception, so that no library can catch it by accident."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_code = EXIT_CODES[signal.Signals(signal_number)]


@contextmanager
def at_forced_end(action: Callable[[int], object], *, is_first: bool = False) -> Iterator[None]:
    """Run an action before the process is ended by `end_process` while the context is open.

    An action gets the exit code. Actions run in the order of their contexts: a pod is told before a
    lock is released. An action that uses a locked file runs first, with `is_first`.
    """
    _at_forced_end.insert(0 if is_first else len(_at_forced_end), action)
    try:
        yield
    finally:
        _at_forced_end.remove(action)


class StopSignals:
    """A context manager that installs the handlers; outside the main thread it installs none.

    Attributes:
        grace_seconds: The time in which rows in flight may finish after the first signal.
        requested: The first signal; None before it.
        can_drain: Whether rows are in flight, so that the first signal must not end the job.
    """

    def __init__(self, grace_seconds: float = 20.0) -> None:
        self.grace_seconds = grace_seconds
        self.requested: signal.Signals | None = None
        self.can_drain = False
        self._raised: StopNow | None = None
        self._previous: dict[int, object] = {}
        self._writer: int | None = None
        self._previous_writer = -1

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in EXIT_CODES:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(
            target=self._watch, args=(reader,), name="noria signals", daemon=True
        ).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        if self._writer is not None:
            signal.set_wakeup_fd(self._previous_writer)
            os.close(self._writer)  # the thread that reads the pipe ends
            self._writer = None
        if self._raised is not None and error is not None and not isinstance(error, StopNow):
            raise self._raised from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first, self.requested = self.requested is None, self.requested or signal.Signals(number)
        if not is_first or not self.can_drain:
            self._raised = StopNow(number)
            if _is_import(frame):
                end_process(str(self._raised), self._raised.exit_code)
            raise self._raised

    def _watch(self, reader: int) -> None:
        """End the process after a signal that must end it, if nothing else has."""
        num_signals = 0
        while numbers := os.read(reader, 1):
            number = numbers[0]
            if number not in self._previous:
                continue
            num_signals += 1
            if num_signals > 1 or not self.can_drain:
                time.sleep(END_SECONDS)
                if self._writer is not None:
                    self.requested = self.requested or signal.Signals(number)
                    error = StopNow(number)
                    end_process(str(error), error.exit_code)
        os.close(reader)


def ignore_signals() -> None:
    """Ignore the signals from now on, as the work is done; has no effect outside the main thread.

    While Python ends, it replaces handlers by the default ones, with which a signal would replace
    the exit code. It leaves signals that are ignored alone.
    """
    if threading.current_thread() is threading.main_thread():
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_IGN)


def _is_import(frame: FrameType | None) -> bool:
    """Whether a module is being imported in a frame or in one of its callers."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def end_process(message: str, code: int) -> NoReturn:
    """End the process from anywhere, with a message, after the actions of `at_forced_end`."""
    for action in list(_at_forced_end):
        with suppress(Exception):
            action(code)
    tell(sys.stderr, f"noria: {message}")
    os._exit(code)
