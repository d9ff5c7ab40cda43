"""The lock of an output among hosts: dead, paused and live owners, and several takers at once."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter

import fake_model as fake
import pytest
from fake_model import masked, run, write_input
from test_run import wait_for_rows

from noria.runtime.batch import lock as locks
from noria.runtime.batch.lock import JobLock
from noria.runtime.errors import OutputIsLocked

SILENCE = 1.0
ON_HOST = """
import sys, time
from pathlib import Path
from noria.runtime.batch import lock as locks
locks.BEAT_SECONDS, locks.SILENCE_SECONDS, locks.QUIET_SECONDS = 0.1, 1.0, 0.2
locks._machine = lambda: sys.argv[1]
locks.socket.gethostname = lambda: sys.argv[1]
"""
"""The beginning of a program that runs on a host whose name is its first argument."""
HOLD = f"""{ON_HOST}
with locks.JobLock(Path(sys.argv[2])):
    print("holds", flush=True)
    time.sleep(60)
"""
TAKE = f"""{ON_HOST}
import os
log = os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND)
while True:
    try:
        with locks.JobLock(Path(sys.argv[2])):
            os.write(log, b"begin " + sys.argv[1].encode() + b"\\n")
            time.sleep(0.05)
            os.write(log, b"end " + sys.argv[1].encode() + b"\\n")
        break
    except locks.OutputIsLocked:
        time.sleep(0.02)
"""
JOB = f"""{ON_HOST}
sys.path.insert(0, {str(fake.__file__)!r}.rpartition("/")[0])
import fake_model as fake
job = fake.settings(Path(sys.argv[2]), Path(sys.argv[3]))
model = fake.FakeModel(fake.FakeGenerator(seconds_per_step=0.2))
sys.exit(fake.run_job(job, model, progress=fake.Progress()))
"""


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    monkeypatch.setattr(locks, "SILENCE_SECONDS", SILENCE)
    monkeypatch.setattr(locks, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.1)


def started(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def holder(path, host: str) -> subprocess.Popen[str]:
    """A process that holds a lock."""
    process = started(HOLD, host, path)
    assert process.stdout is not None and process.stdout.readline() == "holds\n"
    return process


def test_the_lock_of_a_dead_owner_of_another_host_is_taken_over_after_its_silence(tmp_path):
    path, notes = tmp_path / "lock", []
    process = holder(path, "elsewhere")
    process.kill()
    process.communicate()
    start = time.monotonic()
    with JobLock(path, notes.append) as lock:
        assert time.monotonic() - start >= SILENCE
        assert lock.took_over
        assert not path.exists() and (tmp_path / "lock.2").exists()
        with pytest.raises(OutputIsLocked, match="this process holds it"):
            JobLock(path).__enter__()
    assert not list(tmp_path.iterdir())
    (note,) = notes
    assert f"waits for process {process.pid} on elsewhere, which has been silent for" in note
    assert "after 1 s its lock is taken over" in note


def test_the_lock_of_a_dead_owner_of_this_machine_is_taken_over_at_once(tmp_path):
    process = holder(tmp_path / "lock", locks._machine())
    process.kill()
    process.communicate()
    start = time.monotonic()
    with JobLock(tmp_path / "lock") as lock:
        assert time.monotonic() - start < SILENCE
        assert not lock.took_over


@pytest.mark.parametrize("host", ["elsewhere", locks._machine()])
def test_a_live_owner_is_named(tmp_path, host):
    process = holder(tmp_path / "lock", host)
    for _ in range(2):
        with pytest.raises(
            OutputIsLocked, match=f"process {process.pid} on {host} holds it and is"
        ):
            JobLock(tmp_path / "lock").__enter__()
    process.kill()
    process.communicate()


def test_a_lock_without_an_owner_is_taken_over_after_a_silence(tmp_path):
    for content in (b'{"pi', b"\0" * 70, b'{"pid": 1, "host": "elsewhere", "started": "1"}'):
        (tmp_path / "lock").write_bytes(content)
        with JobLock(tmp_path / "lock") as lock:
            assert lock.took_over
        assert not list(tmp_path.iterdir())


def test_a_taker_that_died_before_it_had_the_lock_blocks_nobody(tmp_path):
    (tmp_path / "lock").write_text('{"pid": 1, "token": "a"}')
    (tmp_path / "lock.2").write_text('{"pid": 2, "token": "b"}')
    with JobLock(tmp_path / "lock"):
        assert [path.name for path in tmp_path.iterdir()] == ["lock.3"]


def test_of_many_takers_one_at_a_time_has_the_lock_and_all_have_it_once(tmp_path):
    log = tmp_path / "log"
    log.touch()
    dead = holder(tmp_path / "lock", "elsewhere")
    dead.kill()
    dead.communicate()
    takers = [started(TAKE, f"host{number}", tmp_path / "lock", log) for number in range(10)]
    for taker in takers:
        _, said = taker.communicate(timeout=60)
        assert taker.returncode == 0, said
    lines = log.read_text().split()
    assert len(lines) == 40
    for i in range(0, 40, 4):
        assert lines[i] == "begin" and lines[i + 2 : i + 4] == ["end", lines[i + 1]]
    assert set(Counter(lines[1::4]).values()) == {1}
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_paused_owner_that_wakes_ends_by_name_and_writes_nothing_that_is_read(tmp_path):
    source = write_input(tmp_path / "in.jsonl")
    assert run(source, tmp_path / "whole.jsonl") == 1
    output = tmp_path / "out.jsonl"
    paused = started(JOB, "elsewhere", source, output)
    wait_for_rows(output, 1)
    paused.send_signal(signal.SIGSTOP)

    class Waking(fake.FakeModel):
        """A model that wakes the paused owner while its successor runs rows."""

        def build(self, *arguments, **options):
            built = super().build(*arguments, **options)
            before = (tmp_path / "out.jsonl.journal").read_bytes()
            paused.send_signal(signal.SIGCONT)
            _, said = paused.communicate(timeout=20)
            assert paused.returncode == 75, said
            last = said.splitlines()[-1]
            assert "this process was silent for" in last and "has taken over the output" in last
            assert (tmp_path / "out.jsonl.journal").read_bytes() == before
            return built

    assert run(source, output, Waking()) == 1
    assert masked(output) == masked(tmp_path / "whole.jsonl")
    assert not list(tmp_path.glob("out.jsonl.lock*"))


def test_a_successor_stops_an_owner_before_it_replaces_files(tmp_path):
    with JobLock(tmp_path / "lock") as lock:
        lock._released.set()  # no beats, as if this process were paused
        lock.check()
        (tmp_path / "lock.2").write_text(json.dumps({"pid": 7, "host": "elsewhere"}))
        with pytest.raises(OutputIsLocked, match="process 7 on elsewhere has taken over"):
            lock.check()
        (tmp_path / "lock.2").unlink()
        lock.check()
        (tmp_path / "lock").unlink()
        lock.check()  # a file that somebody deletes is no loss
        lock._last_beat -= SILENCE
        with pytest.raises(OutputIsLocked, match="another process has taken over the output"):
            lock.check()


def test_files_with_numbers_as_names_are_no_locks(tmp_path):
    for name in ("2", "100", "lock.x", "lock.07", "other.3"):
        (tmp_path / name).touch()
    with JobLock(tmp_path / "lock") as lock:
        assert lock._numbers() == [1]


def test_a_process_whose_new_file_another_one_removes_begins_again(tmp_path, monkeypatch):
    """A taker removes the files before its own, and may release its own at once."""
    find, removed = JobLock._numbers, []

    def remove_once(lock):
        if lock.path.exists() and not removed:
            removed.append(lock.path.unlink())
        return find(lock)

    monkeypatch.setattr(JobLock, "_numbers", remove_once)
    with JobLock(tmp_path / "lock"):
        assert removed and (tmp_path / "lock").exists()


def test_an_empty_file_of_a_killed_process_keeps_its_successor_for_a_moment_only(tmp_path):
    """A process may be killed between the two steps that create its file and write into it."""
    (tmp_path / "lock").touch()
    start = time.monotonic()
    with JobLock(tmp_path / "lock") as lock:
        assert not lock.took_over and time.monotonic() - start < 2
        assert lock._numbers() == [2]


def test_an_empty_file_whose_owner_is_there_is_not_taken(tmp_path, monkeypatch):
    program = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); "
        "fcntl.lockf(file, fcntl.LOCK_EX); print('holds', flush=True); time.sleep(60)"
    )
    process = started(program, tmp_path / "lock")
    assert process.stdout is not None and process.stdout.readline() == "holds\n"
    monkeypatch.setattr(locks, "QUIET_SECONDS", 0.5)
    said: list[object] = []

    def note(text: object) -> None:
        said.append(text)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        JobLock(tmp_path / "lock", note).__enter__()
    assert said and "waits for" in str(said[0])
    process.kill()
    process.communicate()
