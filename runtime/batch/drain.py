"""Decides before every step whether a job continues, drains its rows in flight, or stops.

If several processes run the job, process 0 decides for all of them, whichever received the signal.
"""

import time

from ..pods.peers import GO, Peers, StepDirective
from ..process.stop_signals import StopSignals


class Drain:
    """Decides before every step whether a job continues, drains its rows in flight, or stops."""

    def __init__(self, stop: StopSignals, peers: Peers):
        self._stop = stop
        self._peers = peers
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
            self._deadline = now + self._stop.grace_seconds
        return StepDirective("drain" if now < self._deadline else "stop", signal_name)
