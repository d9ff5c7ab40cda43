"""SIGTERM, SIGHUP and Ctrl-C for a job: the first drains it, the second ends it.

While rows are in flight a first signal only sets `requested`, and the job lets them finish. At any
other time, and on a second signal, `StopNow` is raised wherever the program is, and the command
leaves without waiting for graphs that are being compiled or loaded; the files are then as after a
kill, which the journal survives.

SIGHUP comes when a terminal or an SSH connection is closed. Under `nohup` it stays without effect.

Where several processes run the job, process 0 decides for all, whichever of them got the signal.

Knows nothing of rows or journals. Guarantees: the handlers that were there before are put back.
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
    """Ends the job at once. Not an Exception, so that no library's handler swallows it."""

    def __init__(self, signal_number: int):
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = EXIT_CODES[signal.Signals(signal_number)]


class StopSignals:
    """Context manager that holds the handlers; use it in the main thread."""

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
        if self.requested is not None or not self.can_drain:
            raise StopNow(number)
        self.requested = signal.Signals(number)


class Drain:
    """Which way a running job goes, step by step: on, to the end of its rows in flight, or out."""

    def __init__(self, stop: StopSignals, peers: Peers, grace_seconds: float):
        self._stop = stop
        self._peers = peers
        self._grace_seconds = grace_seconds
        self._deadline: float | None = None
        stop.can_drain = True

    def next_directive(self) -> StepDirective:
        """The word for the next step, which is the same on all processes."""
        requested = self._stop.requested
        own = None if requested is None else requested.name
        asked = own or self._peers.remote_signal
        return self._peers.exchange_directive(GO if asked is None else self._drain(asked), own)

    def end(self) -> None:
        """No rows are in flight: from now on a signal ends the job at once."""
        self._stop.can_drain = False

    def _drain(self, signal_name: str) -> StepDirective:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._grace_seconds
        return StepDirective("drain" if now < self._deadline else "stop", signal_name)
