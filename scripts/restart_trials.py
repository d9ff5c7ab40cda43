"""Restart jobs on other hosts beside live, dead and paused owners of their locks.

    python scripts/restart_trials.py model --trials 100 --commands 12 --output benchmarks/restarts

`model` is a small model on disk. In every trial, a job takes the lock of its output, and at a
random moment it is killed, paused or left alone. Then one process, or ten at once, start the same
job on another host, on this one, or in another container of this machine. A paused owner wakes
later. Names of hosts and machines are simulated (`restart_process.py`); processes, files, signals
and all waits are real. Some trials run the command `noria batch`, the others its job with a
stand-in for the model. Several trials run at the same time, as they mostly wait.

A trial fails if two processes have the lock at once, a row that a paused owner wrote after its
successor had the lock is in a journal that a successor reads, the job of a process ends with
another code or message than promised, the same command does not succeed at the end, or its output
differs from that of an undisturbed job.
"""

import argparse
import itertools
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import trial_jobs
from trial_jobs import masked, wait_until

from noria.runtime.batch.lock import SILENCE_SECONDS

PROGRAM = Path(__file__).with_name("restart_process.py")
REFUSAL = "holds it and is running"
LOSS = "has taken over the output"
STOPS = {
    "live": None,
    "killed": signal.SIGKILL,
    "paused": signal.SIGSTOP,
    "naps": signal.SIGSTOP,
}
END_SECONDS = 600.0
"""The time within which every process must end."""
STEP_SECONDS = 0.15
"""Seconds of a step of the stand-in, whose job has about 25 steps."""
COMMAND_ROWS = 400


class Owner(NamedTuple):
    """The end of an owner, and the place of those that start the same job after it."""

    name: str
    event: str
    """A key of `STOPS`: `naps` is a pause that may be too short for a successor."""
    takers: str
    """`here`, `container` or `elsewhere`."""


OWNERS = (
    Owner("live", "live", "elsewhere"),
    Owner("killed, on this machine", "killed", "here"),
    Owner("killed, in another container of this machine", "killed", "container"),
    Owner("killed, on another host", "killed", "elsewhere"),
    Owner("paused, wakes beside its successor", "paused", "elsewhere"),
    Owner("paused, wakes after a random time", "naps", "elsewhere"),
)


class Event(NamedTuple):
    """A line that a process has noted."""

    moment: float
    word: str
    pid: int
    file: int


@dataclass
class Trial:
    """One owner and those that come after it."""

    owner: str
    job: str
    """`noria batch` or `stand-in`."""
    takers: int
    owner_code: int = 0
    codes: list[int] = field(default_factory=list)
    """The exit codes of the takers."""
    seconds: float | None = None
    """Seconds until the first taker had the lock that it asked for; None if the owner finished."""
    late_rows: int = 0
    """Rows that the paused owner wrote after its successor had the lock."""
    broken: list[str] = field(default_factory=list)
    """The promises that were broken."""


class Job(NamedTuple):
    """A job that trials run: its input, its undisturbed output and the seconds that it takes."""

    name: str
    arguments: Sequence[str]
    """The words of the command; `OUT` stands for the output."""
    code: int
    whole: str
    seconds: float
    """Seconds for which the undisturbed job has the lock."""


class Folder:
    """The files of one trial, and its processes."""

    def __init__(self, path: Path, job: Job, cache: Path, silence: float):
        path.mkdir()
        self.output = path / "out.jsonl"
        self._events, self._job, self._silence = path / "events", job, silence
        self._events.touch()
        self._variables = trial_jobs.environment(cache)

    def start(self, host: str, machine: str) -> subprocess.Popen[str]:
        """Start the job in a process on a host."""
        place = (str(self._events), host, machine, str(self._silence))
        words = [str(self.output) if word == "OUT" else word for word in self._job.arguments]
        program = (str(PROGRAM),)
        return trial_jobs.start([*place, *words], self._variables, program=program)

    def events(self) -> list[Event]:
        """All events so far."""
        lines = [line.split() for line in self._events.read_text().splitlines()]
        return [Event(float(line[0]), line[1], *map(int, line[2:])) for line in lines]

    def pause(
        self,
        kind: Owner,
        others: Sequence[subprocess.Popen[str]],
        draw: random.Random,
        seconds: float,
    ) -> float:
        """The seconds after which a paused owner wakes, perhaps after a successor has the lock."""
        if kind.event == "naps":
            return draw.uniform(0, self._silence + seconds)
        pids = [other.pid for other in others]
        wait_until(
            lambda: self.taken_by(pids) or all(other.poll() is not None for other in others),
            END_SECONDS,
            "a successor",
        )
        return draw.uniform(0, seconds)

    def moment(self, word: str, pid: int) -> float:
        """The moment of the first event of a kind in a process."""
        events = self.events()
        return next(event.moment for event in events if (event.word, event.pid) == (word, pid))

    def taken_by(self, pids: Collection[int]) -> Event | None:
        """The first take of the lock by one of some processes."""
        takes = (event for event in self.events() if event.word == "take" and event.pid in pids)
        return next(takes, None)


def find_breaches(events: Iterable[Event], gone: int | None) -> tuple[list[str], int]:
    """Check that one process at a time wrote; return what was wrong, and the number of late rows.

    Args:
        events: All events of a trial.
        gone: The owner that was killed or paused, which may lose the lock without a release.
    """
    wrong, owner = [], None
    files: dict[int, set[int]] = {}
    late: list[Event] = []
    for event in events:
        if event.word == "take":
            if owner not in (None, gone):
                wrong.append(f"processes {owner} and {event.pid} had the lock")
            owner = event.pid
        elif event.word == "release":
            owner = None if owner == event.pid else owner
        elif event.word != "row":
            continue
        elif event.pid == owner:
            files.setdefault(event.pid, set()).add(event.file)
        elif event.pid == gone:
            late.append(event)
        else:
            wrong.append(f"process {event.pid} wrote a row without the lock")
    read = set().union(*(own for pid, own in files.items() if pid != gone))
    if any(event.file in read for event in late):
        wrong.append("a late row is in a journal that is read")
    return wrong, len(late)


def run_trial(folder: Folder, job: Job, kind: Owner, takers: int, draw: random.Random) -> Trial:
    """Run one trial."""
    trial = Trial(kind.name, job.name, takers)
    owner = folder.start("host0", "machine0")
    wait_until(lambda: folder.taken_by([owner.pid]) or owner.poll() is not None, 120, "a lock")
    time.sleep(draw.uniform(0, job.seconds))
    stop = STOPS[kind.event]
    if stop is not None and owner.poll() is None:
        owner.send_signal(stop)
    if stop == signal.SIGKILL:
        owner.wait()
    host = "host0" if kind.takers == "here" else "host{}"
    machine = "machine{}" if kind.takers == "elsewhere" else "machine0"
    numbers = range(1, takers + 1)
    others = [folder.start(host.format(one), machine.format(one)) for one in numbers]
    pids = [other.pid for other in others]
    if stop == signal.SIGSTOP:
        time.sleep(folder.pause(kind, others, draw, job.seconds))
        owner.send_signal(signal.SIGCONT)
    said = [other.communicate(timeout=END_SECONDS)[1] for other in others]
    last = owner.communicate(timeout=END_SECONDS)[1]
    trial.owner_code, trial.codes = owner.returncode, [other.returncode for other in others]
    if owner.returncode != job.code and (take := folder.taken_by(pids)) is not None:
        trial.seconds = round(take.moment - folder.moment("ask", take.pid), 2)
    trial.broken, trial.late_rows = find_breaches(folder.events(), owner.pid if stop else None)
    ends = [
        (kind, trial.owner_code, last),
        *((None, *end) for end in zip(trial.codes, said, strict=True)),
    ]
    trial.broken += filter(None, (wrong_end(job, *end) for end in ends))
    again = folder.start("host99", "machine99")
    text = again.communicate(timeout=END_SECONDS)[1]
    if again.returncode != job.code:
        trial.broken.append(f"at the end the command failed: {text}")
    elif masked(folder.output) != job.whole:
        trial.broken.append("the output differs")
    return trial


def wrong_end(job: Job, kind: Owner | None, code: int, said: str) -> str:
    """The end of an owner, or of a taker, if it is none of those that are promised."""
    last = (said.splitlines() or [""])[-1]
    allowed = {(job.code, "")}
    if kind is None:
        allowed.add((2, REFUSAL))
    elif STOPS[kind.event] == signal.SIGKILL:
        allowed.add((-signal.SIGKILL, ""))
    elif STOPS[kind.event] == signal.SIGSTOP:
        allowed.add((75, LOSS))
    if any(code == right and text in last for right, text in allowed):
        return ""
    return f"{'a taker' if kind is None else 'the owner'} ended with {code}: {said}"


def undisturbed(name: str, arguments: Sequence[str], code: int, folder: Path, cache: Path) -> Job:
    """Run a job alone; return it with its output and its seconds."""
    alone = Folder(folder, Job(name, arguments, code, "", 0), cache, SILENCE_SECONDS)
    process = alone.start("host0", "machine0")
    _, said = process.communicate(timeout=300)
    if process.returncode != code:
        raise RuntimeError(f"expected an undisturbed job to end with {code}, got: {said}")
    moments = {event.word: event.moment for event in alone.events()}
    seconds = moments["release"] - moments["take"]
    return Job(name, arguments, code, masked(alone.output), seconds)


def run_trials(model: Path, count: int, commands: int, seed: int, silence: float) -> list[Trial]:
    """Run all trials, several at a time, and print each one that breaks a promise."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = folder / "cache"
        jobs = make_jobs(model, folder, cache, bool(commands))

        def run(number: int) -> Trial:
            job = jobs[number < commands]
            draw = random.Random(f"{seed} {number}")
            kind = OWNERS[number % len(OWNERS)]
            takers = 10 if number // len(OWNERS) % 5 == 1 else 1
            place = Folder(folder / f"trial{number}", job, cache, silence)
            trial = run_trial(place, job, kind, takers, draw)
            if trial.broken:
                print("broken:", trial, flush=True)
            return trial

        # commands need the processor, the others mostly wait
        with ThreadPoolExecutor(2) as few, ThreadPoolExecutor(10) as many:
            first = list(few.map(run, range(commands)))
            return [*first, *many.map(run, range(commands, count))]


def make_jobs(model: Path, folder: Path, cache: Path, has_commands: bool) -> list[Job]:
    """The job with a stand-in for the model, and the command."""
    source = folder / "in.jsonl"
    source.write_text("".join(f'{{"id": "{row}", "prompt": "row {row}"}}\n' for row in range(100)))
    words = ("stand-in", str(source), "OUT", str(STEP_SECONDS))
    jobs = [undisturbed("stand-in", words, 0, folder / "stand-in", cache)]
    if has_commands:
        rows = trial_jobs.write_rows(folder / "rows.jsonl", COMMAND_ROWS)
        words = trial_jobs.batch(model, rows, Path("OUT"))
        # run twice: the second one finds its programs in the cache, as the trials do
        undisturbed("noria batch", words, 0, folder / "first", cache)
        jobs.append(undisturbed("noria batch", words, 0, folder / "second", cache))
    return jobs


def report(trials: Sequence[Trial], silence: float) -> str:
    """The record as Markdown."""
    kept = sum(not trial.broken for trial in trials)
    commands = sum(trial.job == "noria batch" for trial in trials)
    lines = [
        "# Restarts beside an owner of the lock",
        "",
        f"{kept} of {len(trials)} restarts kept all promises, "
        f"{trial_jobs.made_by('restart_trials.py')}. {commands} of them run `noria batch`, the "
        "others its whole job with a stand-in for model and device. The lock of a silent owner is "
        f"taken over after {silence:g} s.",
        "",
        "| owner | job | trials | with ten takers | taken over | median seconds | 90 % | most |"
        " codes of owners | codes of takers | late rows |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|---|--:|",
    ]
    for kind, job in itertools.product(OWNERS, ("noria batch", "stand-in")):
        some = [trial for trial in trials if (trial.owner, trial.job) == (kind.name, job)]
        if not some:
            continue
        seconds = [trial.seconds for trial in some if trial.seconds is not None]
        figures = "- | - | -"
        if seconds:
            shares = (trial_jobs.share(seconds, 0.9), max(seconds))
            figures = " | ".join(f"{one:.1f}" for one in (statistics.median(seconds), *shares))
        cells = (
            kind.name,
            job,
            len(some),
            sum(trial.takers > 1 for trial in some),
            len(seconds),
            figures,
            counted(trial.owner_code for trial in some),
            counted(itertools.chain.from_iterable(trial.codes for trial in some)),
            sum(trial.late_rows for trial in some),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "Seconds are from the moment at which a process asks for the lock to the moment at which "
        "it has it. Owners with code 0 had finished. Late rows are those that an owner wrote after "
        "its successor had the lock; none of them is in a journal that is read. After each trial, "
        "the same command ended with the code and the output of an undisturbed job.",
        "",
    ]
    return "\n".join(lines)


def counted(codes: Iterable[int]) -> str:
    """Exit codes and their numbers."""
    counts = sorted(Counter(codes).items())
    return ", ".join(f"{code}: {count}" for code, count in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path)
    add("--trials", type=int, default=100)
    add("--commands", type=int, default=12, help="trials that run noria batch")
    add("--seed", type=int, default=7)
    add("--silence", type=float, default=SILENCE_SECONDS, help="seconds until a lock is taken over")
    add("--output", type=Path, help="path without suffix of .json and .md")
    options = parser.parse_args()
    silence = options.silence
    trials = run_trials(options.model, options.trials, options.commands, options.seed, silence)
    trial_jobs.write_record(options.output, report(trials, silence), [*map(asdict, trials)])
    if any(trial.broken for trial in trials):
        sys.exit(1)


if __name__ == "__main__":
    main()
