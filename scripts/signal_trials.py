"""Send signals to jobs at random moments, and check exit codes, seconds and the resumed files.

    python scripts/signal_trials.py model --trials 300 --output benchmarks/signal_trials

`model` is a small model on disk. Each trial draws a signal, one process or two, and a compile cache
that is warm or empty. The moment is uniform between the moment at which the process handles signals
and the end of an undisturbed run. If the job was stopped, the same command runs again to its end,
unless the job has left no file, as then nothing is resumed. `--early` adds signals in the first
second, in which modules are imported: such a trial costs little.
A trial fails if a process ends with another code than promised, if it takes longer than the limit,
or if the output differs from that of the undisturbed run.

SIGHUP is also sent to jobs that `nohup` started: these must run to their ends. If process 1 of two
is stopped before process 0 listens, process 0 cannot know, and ends with code 2 after the limit of
the start, which is short here.
"""

import argparse
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import trial_jobs
from trial_jobs import masked

CODES = {"SIGTERM": 75, "SIGHUP": 75, "SIGINT": 130, "SIGHUP under nohup": 0}
LIMIT_SECONDS = 2.0
"""The time for the end of a process before rows run; with rows in flight, a call comes on top."""
CALL_SECONDS = 2.0
EARLY_SECONDS = 1.0
START_SECONDS = 20.0
"""The time for which process 0 waits for a process that was stopped before it could say so."""
ROWS = 400


@dataclass(frozen=True)
class Trial:
    """One signal, and what came of it."""

    signal: str
    processes: int
    is_cold: bool
    after: float
    """Seconds from the moment at which the process handles signals."""
    codes: list[int]
    seconds: float
    """Seconds from the signal to the end of the last process."""
    is_equal: bool

    @property
    def is_kept(self) -> bool:
        """Whether the promise was kept; a job may also have been complete before the signal."""
        *others, signalled = self.codes
        allowed = {CODES[self.signal], 0}
        limit = LIMIT_SECONDS + CALL_SECONDS + START_SECONDS * self.waited_in_vain
        in_time = self.signal.endswith("nohup") or self.seconds <= limit
        return signalled in allowed and set(others) <= allowed | {2} and in_time and self.is_equal

    @property
    def waited_in_vain(self) -> bool:
        """Whether process 0 was not told that process 1 was stopped."""
        return 2 in self.codes[:-1]


class Jobs:
    """Starts one job with new outputs and a cache, in one process or in two."""

    def __init__(self, model: Path, folder: Path, rows: int):
        self._model = model
        self._source = trial_jobs.write_rows(folder / "in.jsonl", rows)

    def start(
        self, output: Path, cache: Path, processes: int, before: Sequence[str] = ()
    ) -> list[subprocess.Popen[str]]:
        """Start all processes of a job; `before` is a command that starts the job's command."""
        job = trial_jobs.batch(self._model, self._source, output, processes)
        pod: list[list[str]] = [[]]
        if processes > 1:
            place = trial_jobs.free_address()
            limit = ("--start-timeout-seconds", str(START_SECONDS))
            pod = [
                [*trial_jobs.member(place, processes, rank), *limit] for rank in range(processes)
            ]
        variables = trial_jobs.environment(cache)
        silent = subprocess.DEVNULL
        return [trial_jobs.start([*job, *one], variables, before, stderr=silent) for one in pod]

    def run(self, output: Path, cache: Path, processes: int) -> float:
        """Run a job to its end; return its seconds from the moment at which it handles signals."""
        started = self.start(output, cache, processes)
        for process in started:
            wait_for_handlers(process)
        start = time.monotonic()
        codes = [process.wait(timeout=300) for process in started]
        if set(codes) != {0}:
            raise RuntimeError(f"expected an undisturbed job to end with 0, got {codes}.")
        return time.monotonic() - start


def wait_for_handlers(process: subprocess.Popen[str]) -> None:
    """Wait until a process handles SIGTERM, or has ended."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
        if caught is not None and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.001)


def run_trials(
    model: Path, count: int, early: int, rows: int, seed: int, processes: Sequence[int]
) -> Iterator[Trial]:
    """Run trials, the early ones first."""
    draw = random.Random(seed)
    # a job of an interrupted trial may still write
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        jobs, warm = Jobs(model, folder, rows), folder / "warm"
        whole, longest = {}, {}
        for size in processes:
            output = folder / f"whole{size}.jsonl"
            longest[size, True] = jobs.run(output, warm, size)
            whole[size] = masked(output)
            longest[size, False] = jobs.run(folder / f"again{size}.jsonl", warm, size)
        for number in range(-early, count):
            size, is_cold = draw.choice(processes), draw.random() < 0.3
            output = folder / f"out{number}.jsonl"
            cache = folder / f"cache{number}" if is_cold else warm
            kind, after = draw.choice(list(CODES)), draw.uniform(0, longest[size, is_cold])
            if number < 0:
                kind, after = draw.choice(list(CODES)[:3]), draw.uniform(0, EARLY_SECONDS)
            codes, seconds = _disturbed(jobs, output, cache, size, kind, after)
            is_begun = any(folder.glob(f"{output.name}*"))
            if is_begun and not output.exists():
                jobs.run(output, cache, size)
            equal = not is_begun or masked(output) == whole[size]
            yield Trial(kind, size, is_cold, after, codes, seconds, equal)


def _disturbed(
    jobs: Jobs, output: Path, cache: Path, size: int, kind: str, after: float
) -> tuple[list[int], float]:
    """Start a job and send a signal to its last process; return exit codes and seconds."""
    before = ("nohup",) if kind.endswith("nohup") else ()
    started = jobs.start(output, cache, size, before)
    for process in started:
        wait_for_handlers(process)
    time.sleep(after)
    start = time.monotonic()
    started[-1].send_signal(signal.Signals[kind.partition(" ")[0]])
    codes = [process.wait(timeout=300) for process in started]
    return codes, time.monotonic() - start


def report(trials: Sequence[Trial]) -> str:
    """The record as Markdown."""
    lines = [
        "# Signals at random moments",
        "",
        f"{sum(trial.is_kept for trial in trials)} of {len(trials)} signals were answered as "
        f"promised, {trial_jobs.made_by('signal_trials.py')}.",
        "",
        "| signal | processes | trials | stopped | complete | not told | median seconds | most |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in CODES:
        for size in sorted({trial.processes for trial in trials}):
            some = [t for t in trials if t.signal == kind and t.processes == size]
            if not some:
                continue
            stopped = [t for t in some if set(t.codes) != {0}]
            told = [t for t in stopped or some if not t.waited_in_vain]
            seconds = [t.seconds for t in told or stopped]
            figures = f"{statistics.median(seconds):.2f} | {max(seconds):.2f}"
            in_vain = sum(t.waited_in_vain for t in some)
            counts = f"{len(some)} | {len(stopped)} | {len(some) - len(stopped)} | {in_vain}"
            lines.append(f"| {kind} | {size} | {counts} | {figures} |")
    lines += [
        "",
        "Seconds are from the signal to the end of all processes, of the stopped jobs. Not told: "
        "process 1 was stopped before process 0 listened, which waited until its limit of "
        f"{START_SECONDS:g} s, and ended with code 2; without these seconds.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path)
    add("--trials", type=int, default=300)
    add("--early", type=int, default=0, help="further trials, with signals during imports")
    add("--rows", type=int, default=ROWS)
    add("--seed", type=int, default=7)
    add("--processes", type=int, nargs="*", default=[1, 2])
    add("--output", type=Path, help="path without suffix of .json and .md")
    options = parser.parse_args()
    sizes = options.processes
    counts = options.trials, options.early, options.rows
    trials: list[Trial] = []
    with suppress(KeyboardInterrupt):  # the record then has the trials so far
        for trial in run_trials(options.model, *counts, options.seed, sizes):
            trials.append(trial)
            if not trial.is_kept:
                print("broken:", trial, flush=True)
    trial_jobs.write_record(options.output, report(trials), [*map(asdict, trials)])
    if not all(trial.is_kept for trial in trials):
        sys.exit(1)


if __name__ == "__main__":
    main()
