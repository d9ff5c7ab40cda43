"""The watch that the processes of a pod keep on each other.

Every process tells all others, about twice a second, that it lives, which signal it got, and in the
end how it ended. It does so from a thread of its own, so a collective or a compiler may take as
long as it likes. A process that is killed, stopped or cut off falls silent; one that fails says so.
Either way the others say whom they lost, and end: in a collective that one member has left they
would wait for ever.

Ages are measured on this process's clock between answers of the store, so clocks need not agree.

Knows nothing of jobs or jax; the store is given. Guarantees: when a process has been silent for
the limit, every other one has named it on stderr and ended within `MARGIN_SECONDS` more.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..console import tell
from ..errors import EXIT_RESUMABLE
from .coordination import Coordination

MARGIN_SECONDS = 5.0
MAX_INTERVAL_SECONDS = 0.5
_FOLDER = "alive"
_LINGER_SECONDS = 3.0


class Verdict(NamedTuple):
    """Why this process must end."""

    reason: str
    exit_code: int


@dataclass
class _Member:
    """Another process, as last heard of."""

    changed: float
    told: dict[str, Any]


class Watchdog:
    """Says that this process lives, and ends it when another one does not.

    Args:
      store: Shared by all processes; its calls may fail or hang when process 0 does.
      limit: Seconds of silence after which a process counts as lost.
      end: What ends this process, given the exit code.
    """

    def __init__(
        self,
        store: Coordination,
        rank: int,
        size: int,
        limit: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ):
        self.on_abort: Callable[[], object] = lambda: None
        """What to do before this process is ended because of another one."""
        self.limit = limit
        self._store = store
        self._rank = rank
        self._clock = clock
        self._end = end
        self._interval = min(MAX_INTERVAL_SECONDS, limit / 5)
        self._signal: str | None = None
        self._beats = 0
        self._ending: dict[str, Any] | None = None
        self._wake = threading.Event()
        self._published = threading.Event()
        self._answered = clock()
        self._others = {
            other: _Member(self._answered, {}) for other in range(size) if other != rank
        }

    def start(self) -> None:
        for task in (self._beat, self._watch):
            threading.Thread(target=task, name=f"noria {task.__name__}", daemon=True).start()

    def report_signal(self, signal: str | None) -> None:
        """Tell the others soon of the signal that this process got, if it did."""
        if signal != self._signal:
            self._signal = signal
            self._wake.set()

    @property
    def remote_signal(self) -> str | None:
        """The signal that another process got, the lowest of them."""
        signals = (member.told.get("signal") for member in self._others.values())
        return next(filter(None, signals), None)

    def leave(self) -> None:
        """Tell the others that this process ends as it should; it is watched no longer."""
        self._announce({"failed": None})

    def fail(self, reason: str, exit_code: int) -> None:
        """Tell the others why this process ends; they follow."""
        self._end_all(f"process {self._rank} ended: {reason}", exit_code)

    def await_verdict(self) -> None:
        """Give the watch the time to find out whom this process lost; if so, it ends here."""
        time.sleep(self.limit + MARGIN_SECONDS)

    def verdict(self) -> Verdict | None:
        """Why this process must end: another one did, or is lost."""
        for member in self._others.values():
            ending = member.told.get("end") or {}
            if reason := ending.get("failed"):
                return Verdict(reason, ending["exit_code"])
        for rank, member in self._others.items():
            # the store answers from process 0; while it does not, nobody else can be heard
            until = self._clock() if rank == 0 else self._answered
            silence = until - member.changed
            if silence > self.limit and not member.told.get("end"):
                return self._lost(f"process {rank} has been silent for {silence:.1f} s")
        return None

    def exchange(self) -> None:
        """Tell the others of this process, and hear of them."""
        ending, self._beats = self._ending, self._beats + 1
        told = {"beat": self._beats, "signal": self._signal, "end": ending}
        self._store.put(f"{_FOLDER}/{self._rank}", json.dumps(told).encode())
        heard = self._store.folder(_FOLDER)
        self._answered = self._clock()
        for rank, member in self._others.items():
            found = json.loads(heard.get(f"{_FOLDER}/{rank}", b"{}"))
            if found != member.told:
                member.told, member.changed = found, self._answered
        if ending is not None:
            self._published.set()

    def _beat(self) -> None:
        while not self._published.is_set():
            try:
                self.exchange()
            except RuntimeError:  # process 0 is gone; the watch sees how long it has been
                time.sleep(self._interval)
            self._wake.wait(self._interval)
            self._wake.clear()

    def _watch(self) -> None:
        while self._ending is None:
            before = self._clock()
            time.sleep(self._interval / 4)
            pause = self._clock() - before
            if pause > self.limit:  # the others have not waited, so nobody else is to blame
                verdict = self._lost(f"process {self._rank} was stopped for {pause:.1f} s itself")
            else:
                verdict = self.verdict()
            if verdict is not None and self._ending is None:
                tell(sys.stderr, f"noria: process {self._rank}: {verdict.reason}")
                with suppress(OSError):  # a full disk must not keep it alive
                    self.on_abort()
                self._end_all(verdict.reason, verdict.exit_code)
                self._end(verdict.exit_code)

    def _lost(self, what: str) -> Verdict:
        return Verdict(
            f"{what} (the limit is {self.limit:g} s). Finished rows are kept; run the same "
            "commands again.",
            EXIT_RESUMABLE,
        )

    def _end_all(self, reason: str, exit_code: int) -> None:
        """Pass a reason on; process 0 stays for a moment, as the store goes with it."""
        self._announce({"failed": reason, "exit_code": exit_code})
        deadline = self._clock() + _LINGER_SECONDS
        while self._rank == 0 and self._is_anyone_there() and self._clock() < deadline:
            time.sleep(self._interval / 4)

    def _announce(self, ending: dict[str, Any]) -> None:
        self._ending = ending
        self._wake.set()
        # the store may hang with its process; then there is nobody to tell
        self._published.wait(self._interval)

    def _is_anyone_there(self) -> bool:
        try:
            self.exchange()
        except RuntimeError:
            return False
        return not all(
            member.told.get("end") or self._answered - member.changed > self.limit
            for member in self._others.values()
        )
