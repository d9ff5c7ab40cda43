"""The runs of a job in its manifest: times, seconds, rows, tokens, ends, and their sums."""

import itertools
import json
import signal
import socket
from collections import Counter
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_model import FakeGenerator, FakeModel, settings, write_input
from faulty_disk import Crash, FaultyDisk

from noria.runtime.batch import job_runs, row_runner
from noria.runtime.batch.job_runs import PhaseClock, runs_of, sums_of_runs
from noria.runtime.batch.merge import merge
from noria.runtime.batch.run import run_job
from noria.runtime.errors import JobError
from noria.runtime.process.stop_signals import StopNow, StopSignals
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.part import Part

NUM_TOKENS = 13
"""Tokens in every answer of the fake model."""
EPOCH = 1_700_000_000.0


class Clock:
    """A clock that only work moves: a build takes 10 s, and a step takes 1 s."""

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        now = SimpleNamespace(time=lambda: EPOCH + self.seconds, monotonic=lambda: self.seconds)
        for module in (job_runs, row_runner):
            monkeypatch.setattr(module, "time", now)


class Generator(FakeGenerator):
    def __init__(self, clock: Clock, stop_after: float = float("inf")):
        super().__init__()
        self._clock, self._stop_after = clock, stop_after

    def step(self):
        self._clock.seconds += 1
        if self.num_steps >= self._stop_after:
            raise StopNow(15)
        return super().step()


class Model(FakeModel):
    def __init__(self, clock: Clock, generator: Generator | None = None, **options):
        super().__init__(generator or Generator(clock), **options)
        self._clock = clock

    def build(self, *arguments, phases, **options):
        phases.enter("build")
        self._clock.seconds += 10
        return super().build(*arguments, phases=phases, **options)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def source(tmp_path) -> Path:
    return write_input(tmp_path / "in.jsonl")


def run(source: Path, output: Path, clock: Clock, model=None, disk=None, **changes) -> int:
    return run_job(
        settings(source, output, **changes),
        model or Model(clock),
        progress=Progress(is_quiet=True),
        disk=disk,
        phases=PhaseClock(lambda: clock.seconds),
    )


def manifest_of(output: Path) -> dict:
    return json.loads(output.with_name(f"{output.name}.manifest.json").read_text())


def rows_and_tokens(output: Path) -> Counter:
    """Count the rows in a journal, and the tokens of their answers."""
    journal, counts = output.with_name(f"{output.name}.journal"), Counter()
    for record in journal.read_bytes().splitlines() if journal.exists() else ():
        facts, _, line = record[9:].partition(b"\t")
        if json.loads(facts)["kind"] == "row":
            body = (json.loads(line)["response"] or {}).get("body", {})
            counts += Counter(rows=1, tokens=body.get("usage", {}).get("completion_tokens", 0))
    return counts


def test_a_job_that_is_resumed_five_times_states_every_run_and_their_sums(tmp_path, source, clock):
    output, found, seconds = tmp_path / "out.jsonl", [Counter()], []
    ends = [
        lambda: run(source, output, clock, disk=FaultyDisk(26, Crash()), price_per_hour=36.0),
        lambda: run(source, output, clock, Model(clock, Generator(clock, 3)), price_per_hour=36.0),
        lambda: run(
            source, output, clock, Model(clock, failure=OSError("no\ndisk")), price_per_hour=36.0
        ),
        lambda: run(source, output, clock, Model(clock, Generator(clock, 2)), price_per_hour=36.0),
        lambda: run(source, output, clock, disk=FaultyDisk(22, Crash()), price_per_hour=72.0),
    ]
    for end in ends:
        start = clock.seconds
        with pytest.raises((Crash, StopNow, JobError)):
            end()
        seconds.append(clock.seconds - start)
        found.append(rows_and_tokens(output))
        clock.seconds += 1000  # the job waits for its next run
    start = clock.seconds
    assert run(source, output, clock, price_per_hour=72.0) == 1
    seconds.append(clock.seconds - start)
    manifest = manifest_of(output)
    runs = manifest["runs"]
    assert [run["end"] for run in runs] == [
        "killed", "error: stopped by SIGTERM", "error: no", "error: stopped by SIGTERM", "killed",
        "finished",
    ]  # fmt: skip
    of_runs = [now - before for before, now in itertools.pairwise(found)]
    assert sum(count["rows"] > 0 for count in of_runs) == 4
    assert [(run["rows"], run["output_tokens"]) for run in runs[:5]] == [
        (count["rows"], count["tokens"]) for count in of_runs
    ]
    # the journal of the last run is gone: it ran the rest
    assert sum(run["output_tokens"] for run in runs) == manifest["output_tokens"]
    assert runs[-1]["output_tokens"] == manifest["output_tokens"] - found[-1]["tokens"] > 0
    # a killed run is known until its last row: its steps after that left nothing
    walls = [
        sum(run[f"{phase}_seconds"] for phase in ("scan", "load", "build", "run")) for run in runs
    ]
    for run_, wall, spent in zip(runs, walls, seconds, strict=True):
        assert wall == pytest.approx(spent) or (
            run_["end"] == "killed" and spent - 3 < wall < spent
        )
        assert run_["build_seconds"] == 10 and run_["host"] == socket.gethostname()
        times = [datetime.fromisoformat(run_[key]) for key in ("started_at", "ended_at")]
        assert (times[1] - times[0]).total_seconds() == pytest.approx(wall, abs=0.002)
    assert datetime.fromisoformat(runs[0]["started_at"]).timestamp() == EPOCH
    assert manifest["wall_seconds"] == pytest.approx(sum(walls))
    assert manifest["build_seconds"] == 60
    rate = manifest["output_tokens"] / sum(run["run_seconds"] for run in runs)
    assert manifest["output_tokens_per_second"] == pytest.approx(rate)
    assert manifest["price"] == pytest.approx((36 * sum(walls[:4]) + 72 * sum(walls[4:])) / 3600)
    assert manifest["elapsed_seconds"] == pytest.approx(5000 + sum(seconds), abs=0.01)


def test_the_time_until_a_kill_before_the_first_row_is_kept_for_the_same_job(
    tmp_path, source, clock
):
    """No plan is recorded then, so another job may use the output: it has its own runs."""
    for options, num_runs in [({}, 2), ({"configuration": {"model": "other"}}, 1)]:
        output = tmp_path / f"{num_runs}.jsonl"
        with pytest.raises(StopNow):
            run(source, output, clock, Model(clock, failure=StopNow(15)))
        assert run(source, output, clock, **options) == 1
        runs = manifest_of(output)["runs"]
        assert [run["build_seconds"] for run in runs] == [10] * num_runs
        assert [run["rows"] for run in runs] == [*[0] * (num_runs - 1), 42]


def test_a_run_that_is_ended_from_another_thread_has_its_signal(
    tmp_path, source, clock, monkeypatch
):
    class Forced(BaseException):
        """Stands for the end of the process."""

    actions: list = []
    monkeypatch.setattr("noria.runtime.process.stop_signals._at_forced_end", actions)
    stop = StopSignals()

    class Ending(Model):
        def build(self, *arguments, **options):
            stop.requested = signal.SIGTERM
            for action in actions:
                action(75)
            raise Forced

    output = tmp_path / "out.jsonl"
    with pytest.raises(Forced):
        run_job(
            settings(source, output), Ending(clock), progress=Progress(is_quiet=True), stop=stop
        )
    lines = output.with_name("out.jsonl.journal").read_bytes().splitlines()
    assert json.loads(lines[-1][9:])["run"]["end"] == "SIGTERM"


def test_a_row_that_repeats_another_has_no_tokens_of_the_run(tmp_path, clock):
    rows = [{"id": f"q{i}", "prompt": "same", "seed": 1, "temperature": 0} for i in range(4)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    assert run(source, output, clock) == 0
    manifest = manifest_of(output)
    (only,) = manifest["runs"]
    assert manifest["rows"]["repeated"] == 3 and only["rows"] == 4
    assert manifest["output_tokens"] == 4 * NUM_TOKENS and only["output_tokens"] == NUM_TOKENS
    assert manifest["output_tokens_per_second"] == NUM_TOKENS / manifest["run_seconds"]


def test_merged_parts_have_the_sums_of_all_their_runs(tmp_path, source, clock):
    outputs = [tmp_path / f"{index}.jsonl" for index in range(2)]
    with pytest.raises(Crash):
        run(source, outputs[0], clock, disk=FaultyDisk(24, Crash()), part=Part(0, 2))
    for index, output in enumerate(outputs):
        run(source, output, clock, part=Part(index, 2), price_per_hour=36.0)
    merge(outputs, tmp_path / "merged.jsonl", progress=Progress(is_quiet=True))
    merged, parts = manifest_of(tmp_path / "merged.jsonl"), [manifest_of(path) for path in outputs]
    assert [len(part["runs"]) for part in merged["parts"]] == [2, 1] and len(runs_of(merged)) == 3
    for key in ("scan_seconds", "load_seconds", "build_seconds", "run_seconds", "wall_seconds"):
        assert merged[key] == sum(part[key] for part in parts)
    tokens = sum(part["output_tokens_per_second"] * part["run_seconds"] for part in parts)
    assert merged["output_tokens"] == pytest.approx(tokens)
    assert merged["output_tokens_per_second"] == pytest.approx(tokens / merged["run_seconds"])
    # the price of the run that was killed is not known, so that of the job is not known
    assert parts[0]["price"] is None and parts[1]["price"] > 0 and merged["price"] is None
    assert merged["elapsed_seconds"] == pytest.approx(clock.seconds)


def test_a_clock_that_is_set_back_takes_no_seconds_from_a_run(tmp_path, source, clock):
    run_ = job_runs.JobRun(EPOCH, "host", "1 process", phase="run", until=EPOCH + 10)
    run_.count({"finished_at": EPOCH + 12, "output_tokens": 5})
    run_.count({"finished_at": EPOCH - 3600, "output_tokens": 5})
    run_.count({"output_tokens": 5})  # an answer of a finished job, which an update keeps
    assert (run_.rows, run_.output_tokens, run_.seconds["run"]) == (2, 10, 2)
    assert run_.until == EPOCH + 12


def test_without_runs_neither_rate_nor_price_is_known():
    sums = sums_of_runs([])
    assert sums["output_tokens_per_second"] is None and sums["price"] is None


def test_tokens_in_no_time_have_no_rate():
    """The clock of the machine may be set back while a run computes its only rows."""
    run_ = job_runs.JobRun(EPOCH, "host", "1 process", phase="run", until=EPOCH)
    run_.count({"finished_at": EPOCH - 60, "output_tokens": 5})
    assert sums_of_runs([run_.figures()])["output_tokens_per_second"] is None
