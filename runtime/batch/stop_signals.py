"""Handles SIGTERM, SIGHUP and Ctrl-C of a job: the first signal drains it, the second ends it.

While rows are in flight, the first signal only sets `requested`, and the job lets these rows
finish. At any other time, and on a second signal, `StopNow` is raised at the current instruction,
and the command exits without waiting for graphs that compile or load. The files are then as after a
kill, which the journal survives.

SIGHUP is sent when a terminal or an SSH connection is closed. Under `nohup` it has no effect.

If several processes run the job, process 0 decides for all of them, whichever received the signal.

Does not know about rows or journals. Guarantees: the previous handlers are restored.
"""

import signal
import time
from types import FrameType, TracebackType

from ..errors import EXIT_INTERRUPTED, EXIT_RESUMABLE
from ..pods.peers import GO, Peers, StepDirective

EXIT_CODES = {
    signal.SIGTERM: EXIT_RESUMABLE,
    signal.SIGHUP: EXIT_RESUMABLE,
    signal.SIGINT: EXIT_INTERRUPTED,
}


class StopNow(BaseException):
    """The immediate end of a job. Not an Exception, so that no library can catch it by accident."""

    def __init__(self, signal_number: int):
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = EXIT_CODES[signal.Signals(signal_number)]


class StopSignals:
    """A context manager that installs the handlers; use it in the main thread.

    Attributes:
        requested: The first signal; None before it.
        can_drain: Whether rows are in flight, so that the first signal must not end the job.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.can_drain = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in EXIT_CODES:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first, self.requested = self.requested is None, self.requested or signal.Signals(number)
        if not is_first or not self.can_drain:
            # Python ignores the exception in a callback of the garbage collector; as `requested` is
            # set, the next step then drains
            raise StopNow(number)


class Drain:
    """Decides before every step whether a job continues, drains its rows in flight, or stops."""

    def __init__(self, stop: StopSignals, peers: Peers, grace_seconds: float):
        self._stop = stop
        self._peers = peers
        self._grace_seconds = grace_seconds
        self._deadline: float | None = None
        stop.can_drain = True

    def next_directive(self) -> StepDirective:
        """The directive for the next step, which is the same on all processes."""
        requested = self._stop.requested
        own_signal = None if requested is None else requested.name
        signal_name = own_signal or self._peers.remote_signal
        directive = GO if signal_name is None else self._drain(signal_name)
        return self._peers.exchange_directive(directive, own_signal)

    def end(self) -> None:
        """Record that no rows are in flight: from now on a signal ends the job immediately."""
        self._stop.can_drain = False

    def _drain(self, signal_name: str) -> StepDirective:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._grace_seconds
        return StepDirective("drain" if now < self._deadline else "stop", signal_name)
