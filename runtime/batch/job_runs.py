"""The runs of a job: when, where and how long each of them ran, and what they add up to.

A job that is stopped and resumed has several runs. Each one is a record of the journal, written
when it begins, when a phase begins, and when it ends. A run that was killed has no end; it is known
until its last finished row.

Does not know about files. Guarantees: scan, load, build and run seconds add up to the wall time, as
the clock is in exactly one phase at any time; the figures of a job are sums over all its runs, so a
rate divides tokens by the seconds in which they were computed.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, get_args

from ..errors import JobError
from ..process.stop_signals import StopSignals, at_forced_end
from ..rows.figures import REPEATED
from .journal_records import FINISHED_AT, Phase

FINISHED, KILLED = "finished", "killed"
_MAX_REASON = 200
"""The characters of an error that the reason of an end keeps."""


class PhaseClock:
    """A stopwatch that is always in exactly one phase; it starts in `scan`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.on_enter: Callable[[Phase], object] = lambda phase: None
        """Called with every phase that begins."""
        self.start = self._since = clock()
        self.phase: Phase = "scan"
        self._seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin another phase."""
        now = self._clock()
        self._seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now
        self.on_enter(phase)

    def seconds(self) -> dict[Phase, float]:
        """The seconds of every phase until now."""
        self.enter(self.phase)
        return dict(self._seconds)


@dataclass
class JobRun:
    """One run of a job. Times are seconds since the epoch."""

    started: float
    host: str
    processes: str
    """The set-up of its processes, as in `Peers.setup`."""
    price_per_hour: float | None = None
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(get_args(Phase), 0.0))
    phase: Phase = "scan"
    until: float = 0.0
    """The time until which the run is known."""
    rows: int = 0
    """The rows that the run finished."""
    output_tokens: int = 0
    """The tokens that the run computed; a row that repeats another row has none."""
    end: str = KILLED
    """`finished`, the name of a signal, `error: ` and the error, or `killed` until it is known."""

    def take(self, phases: PhaseClock, end: str = KILLED) -> None:
        """Take the seconds of the clock, and the reason of the end if the run ends."""
        self.seconds, self.phase = phases.seconds(), phases.phase
        self.until, self.end = self.started + sum(self.seconds.values()), end

    def count(self, metrics: Mapping[str, float]) -> None:
        """Count a row with its figures; rows that an earlier run or job finished have no time."""
        if FINISHED_AT not in metrics:
            return
        self.rows += 1
        self.output_tokens += 0 if REPEATED in metrics else int(metrics.get("output_tokens", 0))
        # if the clock of the machine was set back, no time has passed
        passed = max(0.0, metrics[FINISHED_AT] - self.until)
        self.seconds[self.phase] += passed
        self.until += passed

    def figures(self) -> dict[str, Any]:
        """The run as a table of the manifest."""
        return {
            "started_at": _time_of_day(self.started),
            "ended_at": _time_of_day(self.until),
            "end": self.end,
            "host": self.host,
            "processes": self.processes,
            **{f"{phase}_seconds": self.seconds[phase] for phase in get_args(Phase)},
            "rows": self.rows,
            "output_tokens": self.output_tokens,
            "price_per_hour": self.price_per_hour,
        }


@contextmanager
def recorded_run(
    run: JobRun, phases: PhaseClock, record: Callable[[], object], stop: StopSignals
) -> Iterator[None]:
    """Record a run when it begins, when a phase begins, and when it ends with an error.

    Args:
        run: The run. Its normal end is recorded by the job itself.
        phases: The clock of the run.
        record: Writes the run to the journal.
        stop: The signals that may end it.
    """
    show_phase = phases.on_enter

    def enter(phase: Phase) -> None:
        show_phase(phase)
        if phase != run.phase:
            run.phase = phase  # first, as the clock enters its own phase again
            run.take(phases)
            record()

    def end(reason: str) -> None:
        phases.on_enter = show_phase
        run.take(phases, stop.requested.name if stop.requested else reason)
        # the disk may be full, which ended the run
        with suppress(OSError, JobError):
            record()

    run.take(phases)
    record()
    phases.on_enter = enter
    try:
        with at_forced_end(lambda code: end("error"), is_first=True):
            yield
    except BaseException as error:
        first_line = (str(error) or type(error).__name__).partition("\n")[0]
        end(f"error: {first_line}"[:_MAX_REASON])
        raise
    finally:
        phases.on_enter = show_phase


def new_run(phases: PhaseClock, processes: str, price_per_hour: float | None) -> JobRun:
    """Return the run that began when the clock was started, on this host."""
    started = time.time() - sum(phases.seconds().values())
    return JobRun(started, socket.gethostname(), processes, price_per_hour)


def runs_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs of a finished job, of all its parts, and of all its stages."""
    inside = [*manifest.get("parts", ()), *manifest.get("stages", ())]
    return [*manifest.get("runs", ()), *(run for part in inside for run in runs_of(part))]


def sums_of_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all runs together, for a manifest.

    `output_tokens_per_second` is the rate of one running job: runs that ran at the same time, as
    parts of one input do, add their seconds.
    """
    keys = [f"{phase}_seconds" for phase in get_args(Phase)]
    seconds = {key: sum(run[key] for run in runs) for key in keys}
    tokens, run_seconds = sum(run["output_tokens"] for run in runs), seconds["run_seconds"]
    times = [datetime.fromisoformat(run[key]) for run in runs for key in ("started_at", "ended_at")]
    return {
        **seconds,
        "wall_seconds": sum(seconds.values()),
        "elapsed_seconds": (max(times) - min(times)).total_seconds() if times else 0.0,
        "output_tokens_per_second": tokens / run_seconds if tokens and run_seconds else None,
        "price": _price(runs),
    }


def _price(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """The price of all runs; None if the price of one is not known, or no run is."""
    if not runs or any(run["price_per_hour"] is None for run in runs):
        return None
    hours = [sum(run[f"{phase}_seconds"] for phase in get_args(Phase)) / 3600 for run in runs]
    return sum(hour * run["price_per_hour"] for hour, run in zip(hours, runs, strict=True))


def _time_of_day(seconds: float) -> str:
    """A time as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
