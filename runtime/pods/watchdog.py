"""Lets the processes of a pod detect that one of them is lost, and ends all of them.

Every process reports to all others, about twice a second, that it is alive, which signal it
received, and at the end how it ended. It reports from a separate thread, so a collective or a
compiler may run for any time. A process that is killed, stopped or cut off becomes silent; one that
fails reports its failure. In both cases the others name the lost process and end, because they
would wait forever in a collective that one process has left.

Silence is measured on this process's clock between answers of the store, so the clocks of the
processes may differ.

Does not know about jobs or jax; the store is given. Guarantees: if a process has been silent for
the limit, every other process names it on stderr and ends within `MARGIN_SECONDS` more.
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
LINGER_SECONDS = 3.0
_LAST_STAGE = 2


class Verdict(NamedTuple):
    """The reason why this process must end, and its exit code."""

    reason: str
    exit_code: int


@dataclass
class _Member:
    """The last report of another process, and the time at which it changed."""

    changed: float
    report: dict[str, Any]

    @property
    def has_ended(self) -> bool:
        """Whether it may be silent, as it failed, or knows that all have done their work."""
        return bool(self.report.get("end")) or self.report.get("stage") == _LAST_STAGE


class Watchdog:
    """Reports that this process is alive, and ends it if another process is lost.

    Args:
      store: The store shared by all processes; its calls may fail or hang if process 0 does.
      rank: The number of this process.
      size: The number of processes.
      limit: Seconds of silence after which a process counts as lost.
      clock: Monotonic seconds.
      end: Ends this process with an exit code.
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
        """The action to run before this process ends because another process is lost."""
        self.limit = limit
        self._store = store
        self._rank = rank
        self._clock = clock
        self._end = end
        self._interval = min(MAX_INTERVAL_SECONDS, limit / 5)
        self._signal: str | None = None
        self._beats = 0
        self._stage = 0
        """The stage of the normal end; 0 while this process works."""
        self._ending: dict[str, Any] | None = None
        self._wake = threading.Event()
        self._published = threading.Event()
        self._answered = clock()
        self._others = {
            other: _Member(self._answered, {}) for other in range(size) if other != rank
        }

    def start(self) -> None:
        """Start the threads that report and watch."""
        for task in (self._beat, self._watch):
            threading.Thread(target=task, name=f"noria {task.__name__}", daemon=True).start()

    def report_signal(self, signal: str | None) -> None:
        """Report to the others, without delay, a signal that this process received."""
        if signal != self._signal:
            self._signal = signal
            self._wake.set()

    @property
    def remote_signal(self) -> str | None:
        """A signal that another process received, the one of lowest rank; None if there is none."""
        signals = (member.report.get("signal") for member in self._others.values())
        return next(filter(None, signals), None)

    def finish(self) -> None:
        """Report that this process has done its work, and wait until all others have done theirs.

        If another one fails or is lost before, this process ends here. It may still fail itself.
        """
        self._reach(1)

    def leave(self) -> None:
        """Report that this process knows that all have done their work, and wait for the others.

        After that, no process watches another. Without this second report, a process that fails
        while it waits in `finish` could be waited for by one that has waited long enough.
        """
        self._reach(_LAST_STAGE)
        self._announce({"failed": None})

    def _reach(self, stage: int) -> None:
        """Report a stage of the normal end, and wait until all others have reached it.

        The threads go on to report and to watch, as while this process works.
        """
        self._stage = stage
        while not all(member.report.get("stage", 0) >= stage for member in self._others.values()):
            self._wake.set()
            time.sleep(self._interval / 4)

    def fail(self, reason: str, exit_code: int, *, linger: float = LINGER_SECONDS) -> None:
        """Report why this process ends; the others end too.

        Process 0 waits for at most `linger` seconds until the others have read it.
        """
        self._end_all(f"process {self._rank} ended: {reason}", exit_code, linger)

    def await_verdict(self) -> None:
        """Wait long enough to detect a lost process; if one is lost, this process ends here."""
        time.sleep(self.limit + MARGIN_SECONDS)

    def verdict(self) -> Verdict | None:
        """The verdict if another process has failed or is lost; None if none has."""
        for member in self._others.values():
            ending = member.report.get("end") or {}
            if reason := ending.get("failed"):
                return Verdict(reason, ending["exit_code"])
        for rank, member in self._others.items():
            # process 0 runs the store; while it does not answer, no other process can be heard
            until = self._clock() if rank == 0 else self._answered
            silence = until - member.changed
            if silence > self.limit and not member.has_ended:
                return self._lost(f"process {rank} has been silent for {silence:.1f} s")
        return None

    def exchange(self) -> None:
        """Store this process's report, and read the reports of the others."""
        ending, self._beats = self._ending, self._beats + 1
        own_report = {
            "beat": self._beats,
            "signal": self._signal,
            "stage": self._stage,
            "end": ending,
        }
        self._store.put(f"{_FOLDER}/{self._rank}", json.dumps(own_report).encode())
        reports = self._store.folder(_FOLDER)
        self._answered = self._clock()
        for rank, member in self._others.items():
            report = json.loads(reports.get(f"{_FOLDER}/{rank}", b"{}"))
            if report != member.report:
                member.report, member.changed = report, self._answered
        if ending is not None:
            self._published.set()

    def _beat(self) -> None:
        """Exchange reports at intervals until the end of this process is published."""
        while not self._published.is_set():
            try:
                self.exchange()
            except RuntimeError:  # process 0 is gone; `_watch` measures for how long
                time.sleep(self._interval)
            self._wake.wait(self._interval)
            self._wake.clear()

    def _watch(self) -> None:
        """End this process when there is a verdict."""
        while self._ending is None:
            before = self._clock()
            time.sleep(self._interval / 4)
            pause = self._clock() - before
            if pause > self.limit:  # the others count this process as lost, not the reverse
                verdict = self._lost(f"process {self._rank} was stopped for {pause:.1f} s itself")
            else:
                verdict = self.verdict()
            if verdict is not None and self._ending is None:
                tell(sys.stderr, f"noria: process {self._rank}: {verdict.reason}")
                with suppress(OSError):  # a full disk must not keep this process alive
                    self.on_abort()
                self._end_all(verdict.reason, verdict.exit_code, LINGER_SECONDS)
                self._end(verdict.exit_code)

    def _lost(self, what: str) -> Verdict:
        return Verdict(
            f"{what} (the limit is {self.limit:g} s). Finished rows are kept; run the same "
            "commands again.",
            EXIT_RESUMABLE,
        )

    def _end_all(self, reason: str, exit_code: int, linger: float) -> None:
        """Report the reason. Process 0 runs the store, so it waits for the others to read it."""
        self._announce({"failed": reason, "exit_code": exit_code})
        deadline = self._clock() + linger
        while self._rank == 0 and self._has_live_member() and self._clock() < deadline:
            time.sleep(self._interval / 4)

    def _announce(self, ending: dict[str, Any]) -> None:
        """Publish how this process ends."""
        self._ending = ending
        self._wake.set()
        # not longer: if process 0 is gone, the store hangs and no other process can read it
        self._published.wait(self._interval)

    def _has_live_member(self) -> bool:
        """Whether another process has neither ended nor become silent."""
        try:
            self.exchange()
        except RuntimeError:
            return False
        return not all(
            member.has_ended or self._answered - member.changed > self.limit
            for member in self._others.values()
        )
