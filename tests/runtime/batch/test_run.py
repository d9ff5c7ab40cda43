"""The batch job end to end over a fake model: outcomes, resuming, faults, signals."""

import contextlib
import errno
import io
import itertools
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fake_model as fake
import pytest
from fake_model import masked, run, write_input
from faulty_disk import Crash, FaultyDisk
from file_identity import identity

from noria.runtime.batch.run import run_job
from noria.runtime.engine.metrics import RunFigures
from noria.runtime.errors import (
    EXIT_RESUMABLE,
    JobError,
    JournalError,
    JournalWriteError,
    OutputIsLocked,
    RowError,
    UnusableFile,
    UserError,
)
from noria.runtime.errors import message as message_of
from noria.runtime.pods.peers import Peers
from noria.runtime.process.stop_signals import StopSignals
from noria.runtime.progress.progress import Progress
from noria.runtime.request import RequestOutput
from noria.runtime.rows.part import Part


@pytest.fixture
def reference(tmp_path):
    """An input and the output of an uninterrupted run."""
    input_path = write_input(tmp_path / "in.jsonl")
    run(input_path, tmp_path / "reference.jsonl")
    return input_path, masked(tmp_path / "reference.jsonl")


def outcomes(path: Path):
    records = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return {
        record["custom_id"]: (record["error"] or {}).get("code")
        or record["response"]["body"].get("error", {}).get("code")
        for record in records
    }, records


def test_every_row_is_one_line_in_input_order(tmp_path):
    input_path = write_input(tmp_path / "in.jsonl")
    assert (
        run(
            input_path,
            tmp_path / "out.jsonl",
            config_keys_ignored=("zeta = 1",),
            tensors_not_read={"mtp.*": 2},
        )
        == 1
    )
    codes, records = outcomes(tmp_path / "out.jsonl")
    assert len(records) == 45
    assert [r["custom_id"] for r in records][:8] == [
        "q0", "q1", "q2", None, "q1", "row-5", "q3", "q4",
    ]  # fmt: skip
    assert codes[None] == "invalid_json"
    assert codes["row-5"] == "unknown_parameter"
    assert codes["huge"] == "invalid_token_id"
    assert codes["bad"] == "nonfinite_logits"
    assert codes["q1"] == "duplicate_custom_id", "the later of the two lines"
    assert records[1]["error"] is None and records[1]["response"]["status_code"] == 200
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["rows"]["ok"] == 40 and manifest["rows"]["errors"] == 5
    assert manifest["config_keys_ignored"] == ["zeta = 1"]
    assert manifest["tensors_not_read"] == {"mtp.*": 2}
    total = sum(manifest[f"{phase}_seconds"] for phase in ("scan", "load", "build", "run"))
    assert total == pytest.approx(manifest["wall_seconds"], abs=1e-9)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "in.jsonl", "out.jsonl", "out.jsonl.manifest.json",
    ]  # fmt: skip


def test_a_complete_job_run_again_does_nothing(tmp_path):
    input_path = write_input(tmp_path / "in.jsonl")
    run(input_path, tmp_path / "out.jsonl")
    before = identity(tmp_path / "out.jsonl")
    model = fake.FakeModel()
    assert run(input_path, tmp_path / "out.jsonl", model) == 1
    assert model.num_builds == model.num_texts == 0
    assert identity(tmp_path / "out.jsonl") == before


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5])
def test_any_number_of_rows_is_a_job(tmp_path, num_rows):
    (tmp_path / "in.jsonl").write_text("".join('{"prompt": "hello"}\n' for _ in range(num_rows)))
    model = fake.FakeModel()
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model) == 0
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == num_rows
    assert model.num_builds == min(num_rows, 1)


def test_error_rows_go_to_the_error_file_when_there_is_one(tmp_path):
    input_path = write_input(tmp_path / "in.jsonl")
    run(input_path, tmp_path / "out.jsonl", error_file=tmp_path / "err.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 40
    assert (tmp_path / "err.jsonl").read_bytes().count(b"\n") == 5


def test_on_error_raise_stops_at_the_first_bad_row_before_any_build(tmp_path):
    model = fake.FakeModel()
    with pytest.raises(JobError, match=r"line 4.*invalid_json") as caught:
        run(write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", model, on_error="raise")
    assert caught.value.exit_code == 1 and model.num_builds == 0


@pytest.mark.parametrize(("phase", "code"), [("load", 3), ("build", 4)])
def test_the_exit_code_says_whether_loading_or_compiling_failed(tmp_path, phase, code):
    model = fake.FakeModel(failure=UserError("no such tensor"), failure_phase=phase)
    with pytest.raises(JobError, match="no such tensor") as caught:
        run(write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", model)
    assert caught.value.exit_code == code


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError])
@pytest.mark.parametrize("phase", ["load", "build"])
def test_a_bug_in_a_build_is_no_error_of_the_job(tmp_path, kind, phase):
    model = fake.FakeModel(failure=kind("shapes"), failure_phase=phase)
    with pytest.raises(kind, match="shapes"):
        run(write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", model)


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError])
def test_a_bug_in_the_rows_keeps_those_that_have_finished(tmp_path, reference, kind):
    class Broken(fake.FakeGenerator):
        def step(self):
            if self.num_steps == 6:
                raise kind("shapes")
            return super().step()

    input_path, expected = reference
    output = tmp_path / "out.jsonl"
    with pytest.raises(kind):
        run(input_path, output, fake.FakeModel(Broken()))
    model = fake.FakeModel()
    assert run(input_path, output, model) == 1
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["rows"]["kept_from_earlier_runs"] > 5 and masked(output) == expected
    assert manifest["runs"][0]["end"].startswith("error: ")


def test_a_compile_in_the_rows_is_an_error_that_costs_no_row(tmp_path, reference):
    input_path, expected = reference
    output = tmp_path / "out.jsonl"
    model = fake.FakeModel(fake.FakeGenerator(num_compiles=2))
    for _ in range(2):  # the second time the job is complete
        with pytest.raises(JobError, match=r"no compile after the build, got 2") as caught:
            run(input_path, output, model)
        assert caught.value.exit_code == 4
        assert masked(output) == expected
        assert not (tmp_path / "out.jsonl.journal").exists()
    assert model.num_builds == 1


def test_a_crash_at_any_disk_operation_changes_nothing_in_the_end(tmp_path, reference):
    input_path, expected = reference
    counter = FaultyDisk(0)
    run(input_path, tmp_path / "count.jsonl", disk=counter)
    for at in range(1, counter.calls + 1):
        output = tmp_path / f"{at}.jsonl"
        with pytest.raises(Crash):
            run(input_path, output, disk=FaultyDisk(at, Crash(), tear=at % 2 == 0))
        assert run(input_path, output) == 1
        assert masked(output) == expected, f"after a crash at operation {at}"
        assert not output.with_name(f"{at}.jsonl.journal").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_or_failing_disk_is_a_clear_error_and_loses_nothing(tmp_path, reference, number):
    input_path, expected = reference
    counter = FaultyDisk(0)
    run(input_path, tmp_path / "count.jsonl", disk=counter)
    for at in range(1, counter.calls + 1, 3):
        output = tmp_path / f"{at}.jsonl"
        error = OSError(number, os.strerror(number))
        with pytest.raises((JobError, OSError)):
            run(input_path, output, disk=FaultyDisk(at, error, tear=True))
        assert run(input_path, output) == 1
        assert masked(output) == expected


def test_a_write_error_names_the_journal_and_the_remedy(tmp_path):
    input_path = write_input(tmp_path / "in.jsonl")
    full = FaultyDisk(9, OSError(errno.ENOSPC, "No space left on device"), tear=True)
    with pytest.raises(JournalWriteError, match=r"No space left.*run the same command") as caught:
        run(input_path, tmp_path / "out.jsonl", disk=full)
    assert caught.value.exit_code == 75
    assert message_of(caught.value).startswith(
        f"{tmp_path / 'out.jsonl.journal'}: cannot be written"
    )


def stop_after(num_rows: int, tmp_path: Path, input_path: Path, output: Path) -> None:
    """Run a job in part, so that its journal has some finished rows."""
    with contextlib.suppress(Crash):
        run(input_path, output, disk=FaultyDisk(num_rows + 10, Crash()))
    assert output.with_name(output.name + ".journal").exists()


def test_a_build_that_changes_the_stored_plan_is_refused(tmp_path, reference):
    input_path, expected = reference
    output = tmp_path / "out.jsonl"
    stop_after(20, tmp_path, input_path, output)

    class OtherPlan(fake.FakeModel):
        def build(self, summary, stored_plan, **options):
            built = super().build(summary, stored_plan, **options)
            return replace(built, plan=f"{stored_plan}decode_slots = 1\n")

    with pytest.raises(JobError, match="expected the plan that the job was begun with"):
        run(input_path, output, OtherPlan())
    run(input_path, output)
    assert masked(output) == expected


def test_resuming_runs_only_what_is_missing_and_uses_the_stored_plan(tmp_path, reference):
    input_path, expected = reference
    output = tmp_path / "out.jsonl"
    stop_after(20, tmp_path, input_path, output)
    model = fake.FakeModel()
    run(input_path, output, model)
    assert 0 < len(model.generator.submitted) < 41
    assert model.stored_plans[0].startswith("max_length")
    assert masked(output) == expected


def test_an_edited_input_keeps_unchanged_rows_and_runs_changed_ones(tmp_path):
    input_path = tmp_path / "in.jsonl"
    rows = [{"id": f"q{i}", "prompt": f"prompt {i}"} for i in range(40)]
    input_path.write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "out.jsonl"
    stop_after(30, tmp_path, input_path, output)
    journal = (tmp_path / "out.jsonl.journal").read_text()
    kept = [row for row in rows if f'"custom_id":"{row["id"]}"' in journal]
    assert len(kept) > 5
    changed = {**kept[0], "prompt": "changed"}
    edited = [{"id": "new", "prompt": "n"}, changed, *reversed(kept[1:])]
    input_path.write_text("\n".join(map(json.dumps, edited)))
    model = fake.FakeModel()
    assert run(input_path, output, model) == 0
    assert sorted(model.generator.submitted) == sorted(["new", changed["id"]])
    assert list(outcomes(output)[0]) == [row["id"] for row in edited]


def test_a_journal_of_another_configuration_is_refused_with_the_difference(tmp_path, reference):
    input_path, _ = reference
    output = tmp_path / "out.jsonl"
    stop_after(10, tmp_path, input_path, output)
    other = {"model": "fake", "dtype": "bfloat16"}
    with pytest.raises(JournalError, match=r"dtype: there float32, now bfloat16[\s\S]*--restart"):
        run(input_path, output, configuration=other)
    assert run(input_path, output, configuration=other, restart=True) == 1


def test_damage_in_the_middle_of_a_journal_is_an_error_naming_the_byte(tmp_path, reference):
    input_path, _ = reference
    output = tmp_path / "out.jsonl"
    stop_after(10, tmp_path, input_path, output)
    journal = tmp_path / "out.jsonl.journal"
    content = bytearray(journal.read_bytes())
    start = content.index(b"\n", content.index(b'"kind":"row"')) + 1
    content[start + 40] ^= 1
    journal.write_bytes(content)
    with pytest.raises(JournalError, match=f"damaged at byte {start}"):
        run(input_path, output)


def test_a_torn_or_doubled_tail_is_harmless(tmp_path, reference):
    input_path, expected = reference
    for name, spoil in {
        "torn": lambda c: c[:-7],
        "doubled": lambda c: c + c[c.rstrip(b"\n").rindex(b"\n") + 1 :],
        "garbage": lambda c: c + b"\0" * 4096,
    }.items():
        output = tmp_path / f"{name}.jsonl"
        stop_after(10, tmp_path, input_path, output)
        journal = output.with_name(output.name + ".journal")
        journal.write_bytes(spoil(journal.read_bytes()))
        run(input_path, output)
        assert masked(output) == expected, name


def test_a_file_that_is_no_journal_is_never_cut(tmp_path):
    input_path = write_input(tmp_path / "in.jsonl")
    for content in (b"my notes\n", b"my notes, with no line ending at all"):
        (tmp_path / "out.jsonl.journal").write_bytes(content)
        with pytest.raises(JournalError, match="not a journal"):
            run(input_path, tmp_path / "out.jsonl")
        assert (tmp_path / "out.jsonl.journal").read_bytes() == content


def test_the_output_of_something_else_is_not_overwritten(tmp_path):
    input_path = write_input(tmp_path / "in.jsonl")
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(UnusableFile, match="--restart"):
        run(input_path, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_a_journal_of_a_run_that_ended_before_its_build_claims_no_output(tmp_path):
    input_path, output = write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with pytest.raises(Crash):
        run(input_path, output, fake.FakeModel(failure=Crash()))
    output.write_text("precious")
    with pytest.raises(UnusableFile, match="no manifest is beside it"):
        run(input_path, output)
    assert output.read_text() == "precious"
    output.unlink()
    assert run(input_path, output) == 1


@pytest.mark.parametrize(
    ("failure", "options"),
    [
        (JobError("two jobs", 2), {}),
        (UserError("no such weights"), {}),
        (None, {"on_error": "raise"}),
    ],
)
def test_an_error_before_the_first_row_leaves_no_file(tmp_path, failure, options):
    input_path, output = write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with pytest.raises(JobError):
        run(input_path, output, fake.FakeModel(failure=failure), **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_error_before_the_first_row_keeps_the_journal_of_a_job_that_can_be_resumed(tmp_path):
    input_path, output = write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    model = fake.FakeModel(failure=JobError("the disk is full", EXIT_RESUMABLE))
    with pytest.raises(JobError):
        run(input_path, output, model)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl.journal"}


def test_a_job_without_a_good_row_that_crashes_at_any_disk_operation_is_finished(tmp_path):
    input_path = tmp_path / "in.jsonl"
    input_path.write_text("1\n2\n")
    counter = FaultyDisk(0)
    run(input_path, tmp_path / "count.jsonl", error_file=tmp_path / "bad.jsonl", disk=counter)
    expected = (tmp_path / "bad.jsonl").read_bytes()
    for at in range(1, counter.calls + 1):
        files = {"output_path": tmp_path / f"{at}.jsonl", "error_file": tmp_path / f"{at}.err"}
        with pytest.raises(Crash):
            run(input_path, **files, disk=FaultyDisk(at, Crash()))
        assert run(input_path, **files) == 1
        assert files["error_file"].read_bytes() == expected, f"after a crash at operation {at}"


def test_inputs_and_outputs_that_cannot_work_are_refused_by_name(tmp_path):
    input_path = write_input(tmp_path / "in.jsonl")
    (tmp_path / "link.jsonl").symlink_to(input_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "in.gz").write_bytes(b"\x1f\x8b\x08")
    cases = [
        (input_path, input_path, "is the input too"),
        (input_path, tmp_path / "link.jsonl", "is the input too"),
        (input_path, tmp_path / "none" / "out.jsonl", "expected its directory"),
        (input_path, tmp_path, "directory"),
        (tmp_path / "pipe", tmp_path / "out.jsonl", "pipe"),
        (input_path, tmp_path / "pipe", "pipe or device"),
        (tmp_path / "in.gz", tmp_path / "out.jsonl", "cut off"),
        (tmp_path / "absent", tmp_path / "out.jsonl", "got no file"),
    ]
    for source, target, message in cases:
        with pytest.raises(UnusableFile, match=message):
            run(source, target)


def start_program(input_path, output, pause="0.005"):
    command = [sys.executable, fake.__file__, str(input_path), str(output), pause]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_rows(output: Path, num_rows: int) -> None:
    journal = output.with_name(output.name + ".journal")
    for _ in range(1000):
        if journal.exists() and journal.read_bytes().count(b'"kind":"row"') >= num_rows:
            return
        time.sleep(0.005)
    raise AssertionError("the job wrote no rows")


def test_killed_at_fifty_random_moments_the_output_is_the_same(tmp_path, reference):
    input_path, expected = reference
    rng = random.Random(7)
    num_kills = 0
    # the kills are spread over a whole run, however long the machine takes to start a program
    started = time.monotonic()
    whole = start_program(input_path, tmp_path / "whole.jsonl", "0.002")
    assert whole.communicate()[1] and whole.returncode == 1
    longest = 1.2 * (time.monotonic() - started)
    for attempt in range(200):
        output = tmp_path / f"{attempt}.jsonl"
        code = None
        while code != 1:
            process = start_program(input_path, output, "0.002")
            try:
                _, message = process.communicate(timeout=rng.uniform(0.2, 1) * longest)
                code = process.returncode
                assert code == 1, message
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                num_kills += 1
        assert masked(output) == expected
        if num_kills >= 50:
            return
    raise AssertionError(f"only {num_kills} kills came in time")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_drains_and_the_same_command_goes_on(tmp_path, reference, number, code):
    input_path, expected = reference
    output = tmp_path / "out.jsonl"
    process = start_program(input_path, output, "0.05")
    wait_for_rows(output, 3)
    process.send_signal(number)
    _, message = process.communicate(timeout=20)
    assert process.returncode == code
    assert "run the same command again" in message
    assert not (tmp_path / "out.jsonl.lock").exists()
    assert run(input_path, output) == 1
    assert masked(output) == expected


# The program takes the terminal itself: a `preexec_fn` would fork a process with jax's threads.
TAKE_TERMINAL = """
import fcntl, runpy, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if these tests are started by nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_closed_terminal_drains_and_the_same_command_goes_on(tmp_path, reference):
    input_path, expected = reference
    output = tmp_path / "out.jsonl"
    ours, its = pty.openpty()

    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, fake.__file__, str(input_path), str(output), "0.3"],
        stdin=its, stdout=its, stderr=its, start_new_session=True,
    )  # fmt: skip
    os.close(its)
    wait_for_rows(output, 3)
    os.close(ours)  # from now on its writes to the terminal fail
    assert process.wait(timeout=20) == 75
    assert not (tmp_path / "out.jsonl.lock").exists()
    assert (tmp_path / "out.jsonl.journal").exists()
    assert run(input_path, output) == 1
    assert masked(output) == expected


def test_a_closed_terminal_ends_no_job_that_was_started_to_ignore_that(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_of_the_progress_that_ends_does_not_end_the_job(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    job = fake.settings(write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    with os.fdopen(writing, "w") as stream:
        assert run_job(job, fake.FakeModel(), progress=Progress(stream=stream)) == 1


class SignalsAtItsEnd:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


class SignalledModel(fake.FakeModel):
    """A model whose build gets a signal where Python ignores exceptions."""

    def build(self, *arguments, **options):
        SignalsAtItsEnd()
        return super().build(*arguments, **options)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_python_ignores_still_stops_the_job(tmp_path, reference):
    input_path, expected = reference
    assert run(input_path, tmp_path / "out.jsonl", SignalledModel()) == 75
    assert run(input_path, tmp_path / "out.jsonl") == 1
    assert masked(tmp_path / "out.jsonl") == expected


def test_a_second_interrupt_stops_at_once(tmp_path, reference):
    input_path, expected = reference
    output = tmp_path / "out.jsonl"
    process = start_program(input_path, output, "1.5")
    wait_for_rows(output, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert run(input_path, output) == 1
    assert masked(output) == expected


def test_two_writers_of_one_output_are_refused_and_a_dead_ones_lock_is_taken_over(
    tmp_path, reference
):
    input_path, _ = reference
    output = tmp_path / "out.jsonl"
    process = start_program(input_path, output, "0.2")
    wait_for_rows(output, 1)
    with pytest.raises(OutputIsLocked, match=f"process {process.pid}"):
        run(input_path, output)
    process.kill()
    process.communicate()
    assert (tmp_path / "out.jsonl.lock").exists()
    assert run(input_path, output) == 1


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_log_gets_lines_at_growing_intervals():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    progress.note("compile [9/9] prefill 256x2  4.1 s")
    progress.start_rows(100, done=10, errors=2)
    for step in range(1, 1001):
        clock.now += 0.5
        if step % 10 == 0 and step <= 900:
            progress.count_row(is_error=False)
        progress.update(RunFigures(20 * (step - 4) if step > 4 else 0, 3, 4, 0.25))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "compile [9/9] prefill 256x2  4.1 s"
    # the tokens of the first call came after 2 s
    assert lines[1] == (
        "11/100 rows  2 errors  ETA 7:25  40.0 tokens/s, 40.0 since the first  3/4 slots  "
        "padding 25%"
    )
    assert 15 < len(lines) < 30


def test_a_rate_is_that_of_the_last_seconds_beside_the_average():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    progress.start_rows(8, done=0, errors=0, max_tokens=1700)
    tokens = 0
    for second in range(100):
        clock.now += 1.0
        tokens += 10 if second < 50 else 20
        progress.update(RunFigures(tokens, 4, 4, None))
    assert progress.line(RunFigures(tokens, 4, 4, None)) == (
        "0/8 rows  ETA at most 0:13  20.0 tokens/s, 15.0 since the first  4/4 slots"
    )


def test_tokens_that_flow_are_never_shown_as_none():
    stream, clock = io.StringIO(), Clock()
    stream.isatty = lambda: True
    progress = Progress(stream=stream, clock=clock)
    progress.start_rows(8, done=0, errors=0)
    for step in range(200):
        clock.now += 0.11
        progress.update(RunFigures(max(0, step - 50), 4, 4, None))
    shown = stream.getvalue().split("\r")
    assert len([line for line in shown if "tokens/s" in line]) == 149
    assert not any(re.search(r"\b0\.0 ", line) for line in shown)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_scan_says_how_many_rows_it_has_read_now_and_then(is_terminal):
    stream, clock = io.StringIO(), Clock()
    stream.isatty = lambda: is_terminal
    progress = Progress(stream=stream, clock=clock)
    for num_rows in range(1, 101):
        clock.now += 0.06
        progress.show_scan(num_rows * 100, num_rows, 100)
    progress.finish()
    shown = [line.strip() for line in stream.getvalue().replace("\r", "\n").split("\n")]
    shown = [line for line in shown if line]
    assert len(shown) == (50 if is_terminal else 1)
    done = "10000 rows  100%" if is_terminal else "8400 rows  84%"
    assert shown[-1] == f"scan: {done}  1667 rows/s{'' if is_terminal else '  ETA 0:01'}"


def test_progress_asks_for_the_padding_alone_and_the_report_is_made_once(tmp_path):
    stream, clock, model = io.StringIO(), itertools.count().__next__, fake.FakeModel()
    job = fake.settings(write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    run_job(job, model, progress=Progress(stream=stream, clock=clock))
    assert stream.getvalue().count("padding 25%") > 3
    assert model.generator.num_reports == 1


class Follower(Peers):
    """Records the facts that all processes must share, and the times of their comparisons."""

    def __init__(self, happened: list):
        self._happened = happened

    def record(self, *facts):
        self._happened.append("saw")

    def exchange_directive(self, directive, own_signal):
        self._happened.append("compared")
        return directive


def test_what_rows_were_fed_or_got_is_compared_before_the_next_step_and_after_the_last(tmp_path):
    """A step may be a collective, and a process with fewer rows would not take part in it."""
    happened: list[str] = []

    class RecordingGenerator(fake.FakeGenerator):
        def step(self):
            happened.append("step")
            return super().step()

    input_path = write_input(tmp_path / "in.jsonl")
    job = fake.settings(input_path, tmp_path / "out.jsonl")
    progress = Progress(is_quiet=True)
    run_job(job, fake.FakeModel(RecordingGenerator()), progress=progress, peers=Follower(happened))
    assert {"saw", "step"} <= set(happened) and happened[-1] == "compared"
    steps = [i for i, what in enumerate(happened) if what == "step"]
    assert all(happened[i - 1] == "compared" for i in steps)


def said(folder, *, stop_after_steps: int | None = None, **changes) -> str:
    """Return the text that a job in a folder writes to stderr."""
    stream = io.StringIO()
    job = fake.settings(folder / "in.jsonl", folder / "out.jsonl", **changes)
    model = fake.FakeModel()
    if stop_after_steps is not None:
        step = model.generator.step

        def steps():
            if model.generator.num_steps == stop_after_steps:
                raise Crash
            return step()

        model.generator.step = steps
    with contextlib.suppress(Crash):
        run_job(job, model, progress=Progress(stream=stream))
    return stream.getvalue()


def test_the_first_error_of_a_job_is_said_once_with_the_count_at_the_end(tmp_path):
    write_input(tmp_path / "in.jsonl")
    text = said(tmp_path)
    assert text.count("first error: ") == 1
    assert "\nfirst error: line 4: invalid_json: expected a JSON object, got" in f"\n{text}"
    assert "45 rows, 5 errors" in text
    assert "complete already, 5 errors, nothing to do" in said(tmp_path)


def test_an_error_of_a_row_that_ran_is_said_with_its_name(tmp_path):
    rows = [{"id": "good", "prompt": "x"}, {"id": "bad", "prompt": "nan"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "first error: row 'bad' (line 2): nonfinite_logits: not finite\n" in said(tmp_path)


def test_an_error_of_an_earlier_run_is_said_again(tmp_path):
    rows = [{"prompt": "nan"}, *({"prompt": f"prompt {i}"} for i in range(20))]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for stop in (3, None):
        text = said(tmp_path, stop_after_steps=stop)
        assert text.count("first error: row 'row-0' (line 1): nonfinite_logits") == 1
    assert "resumed: " in text


def test_a_part_says_the_first_error_of_its_own_rows(tmp_path):
    write_input(tmp_path / "in.jsonl")
    assert "first error: row 'q1' (line 6): duplicate_custom_id" in said(tmp_path, part=Part(0, 2))


def test_what_differs_from_a_finished_output_is_said(tmp_path):
    source, output = write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    run(source, output)
    manifest = output.with_name("out.jsonl.manifest.json")

    def refusal(**changes) -> str:
        with pytest.raises(UnusableFile) as caught:
            run(source, output, **changes)
        message = str(caught.value)
        assert message.startswith(f"{output}: exists and is not the finished output of this input,")
        found = message.split("\n")[1:-1]
        is_input = len(found) == 1 and found[0].startswith("  the input:")
        keep = ", keep the answers of equal rows with --update" if is_input else ""
        assert message.endswith(f"\nChoose another output{keep}, or replace it with --restart.")
        return "\n".join(found)

    other = {"model": "another", "dtype": "bfloat16"}
    assert refusal(configuration=other) == (
        "  dtype: there float32, now bfloat16\n  model: there fake, now another"
    )
    assert refusal(error_file=tmp_path / "err.jsonl") == (
        "  outputs: there out.jsonl, now err.jsonl, out.jsonl"
    )
    assert refusal(configuration={"model": "fake", "dtype": ""}) == (
        "  dtype: there float32, now none"
    )
    before = source.read_text()
    source.write_text(before + "\n{}")
    assert re.fullmatch(
        r"  the input: there \d+ bytes, sha256 \w{12}, now \d+ bytes, sha256 \w{12}", refusal()
    )
    source.write_text(before)
    lines = output.read_bytes()
    output.write_bytes(lines[:-1])
    assert re.fullmatch(
        r"  out.jsonl, changed since: finished with \d+ bytes, sha256 \w{12}, now \d+ .*", refusal()
    )
    for content in ("{}", '{"configuration": [1], "outputs": {"out.jsonl": 7}, "input": null}'):
        manifest.write_text(content)
        assert "model: there nothing, now fake" in refusal()
    manifest.unlink()
    assert refusal() == "  no manifest is beside it"
    output.write_bytes(lines)
    assert run(source, output, restart=True) == 1


class FailingGenerator(fake.FakeGenerator):
    """A generator that ends every row with an error code."""

    def __init__(self, code: str):
        super().__init__()
        self._code = code

    def step(self):
        error = RowError(self._code, f"{self._code}, this once")
        return [
            RequestOutput(output.request_id, None, [], error=error) for output in super().step()
        ]


@pytest.mark.parametrize("code", ["internal_error", "nonfinite_logits", "context_length_exceeded"])
def test_a_resumed_job_tries_rows_again_that_may_pass_and_no_others(tmp_path, code):
    rows = [{"id": f"q{i}", "prompt": f"prompt {i}"} for i in range(30)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(Crash):
        run(source, output, fake.FakeModel(FailingGenerator(code)), FaultyDisk(22, Crash()))
    journal = tmp_path / "out.jsonl.journal"
    failed = {r["id"] for r in rows if f'"custom_id":"{r["id"]}"' in journal.read_text()}
    assert 5 < len(failed) < 25
    model = fake.FakeModel()
    run(source, output, model)
    is_retried = code == "internal_error"
    assert failed & set(model.generator.submitted) == (failed if is_retried else set())
    codes, records = outcomes(output)
    assert len(records) == 30
    assert {name for name, found in codes.items() if found} == (set() if is_retried else failed)
    # a finished job does not repeat any row
    again = fake.FakeModel()
    assert run(source, output, again) == (0 if is_retried else 1)
    assert again.num_builds == 0


class Removing(fake.FakeModel):
    """A model that changes the job's files between its rows."""

    def __init__(self, action):
        super().__init__()
        step = self.generator.step

        def steps():
            if self.generator.num_steps == 3:
                action()
            return step()

        self.generator.step = steps


@pytest.mark.parametrize("name", ["out.jsonl.journal", "out.jsonl.lock", "out.jsonl"])
def test_a_file_of_the_job_that_is_deleted_while_it_runs_costs_no_row(tmp_path, reference, name):
    input_path, expected = reference
    output = tmp_path / "out.jsonl"

    def remove():
        (tmp_path / name).unlink(missing_ok=True)

    assert run(input_path, output, Removing(remove)) == 1
    assert masked(output) == expected
    assert run(input_path, output) == 1
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".lock", ".journal")]


def test_a_folder_that_is_deleted_while_its_job_runs_is_a_clear_error(tmp_path, reference):
    input_path, _ = reference
    folder = tmp_path / "folder"
    folder.mkdir()
    model = Removing(lambda: shutil.rmtree(folder))
    with pytest.raises(JobError, match=r"cannot be written \(No such file.*journal is missing too"):
        run(input_path, folder / "out.jsonl", model)


def test_a_full_disk_is_said_with_the_name_of_the_lock(tmp_path, monkeypatch):
    def full(descriptor, content, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = write_input(tmp_path / "in.jsonl")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run(source, tmp_path / "out.jsonl")
    assert caught.value.filename == str(tmp_path / "out.jsonl.lock")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_note_on_a_better_plan_follows_the_result(tmp_path):
    class Model(fake.FakeModel):
        def build(self, *arguments, **services):
            return replace(super().build(*arguments, **services), better_plan=self.note)

        def note(self, outputs, seconds):
            self.outputs = outputs
            return f"better: {seconds >= 0}"

    source, stream, model = write_input(tmp_path / "in.jsonl"), io.StringIO(), Model()
    run_job(fake.settings(source, tmp_path / "out.jsonl"), model, progress=Progress(stream=stream))
    assert stream.getvalue().splitlines()[-1] == "better: True"
    # 40 rows have a result; every answer of the fake model is of equal length
    assert len(model.outputs) == 40 and len(set(model.outputs.values())) == 1
