"""The meeting of a pod: who comes, who is missing, and who failed, on every process."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from noria.runtime.errors import StartFailed
from noria.runtime.pods import meeting
from noria.runtime.pods.connection import Connection
from noria.runtime.pods.meeting import Address, meet, report_failure


@pytest.fixture
def place() -> str:
    """An address on this machine with a free port."""
    with socket.create_server(("localhost", 0)) as free:
        return f"localhost:{free.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _no_meeting_yet(monkeypatch):
    monkeypatch.setattr(meeting, "_begun", False)


def outcomes(*calls) -> list[BaseException | None]:
    """Call functions at the same time, and return their errors."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.exception(timeout=60) for future in [pool.submit(call) for call in calls]]


def attend(place: str, size: int, rank: int, limit: float = 20.0, after: float = 0.0):
    """Return a function that comes to the meeting as one process, perhaps late."""

    def come():
        time.sleep(after)
        with meet(Address(place, size, rank), limit):
            pass

    return come


def fail(place: str, size: int, rank: int):
    """Return a function that reports the failure of a process that does not come."""
    return lambda: report_failure(Address(place, size, rank), "no such plan", 3, 20.0)


def test_processes_meet_in_any_order_and_the_port_is_free_afterwards(place):
    late = [attend(place, 4, rank, after=after) for rank, after in enumerate((0.3, 0, 0.6, 0.1))]
    assert outcomes(*late) == [None] * 4
    with socket.create_server(("", int(place.rpartition(":")[2]))):
        pass
    assert outcomes(attend(place, 1, 0)) == [None]


def test_a_missing_process_is_named_by_all_others(place, capsys, monkeypatch):
    monkeypatch.setattr(meeting, "QUIET_SECONDS", 0.4)
    errors = outcomes(*(attend(place, 4, rank, limit=1.5) for rank in (0, 2)))
    for error in errors:
        assert isinstance(error, StartFailed) and error.exit_code == 2
        expected = (
            rf"all 4 processes to connect to {place} within 1.5 s, but processes 1, 3 did not"
        )
        assert re.search(expected, str(error))
    said = capsys.readouterr().err
    for rank in (0, 2):
        assert f"noria: process {rank}: waits for processes 1, 3, at most 1 s more\n" in said


def test_a_missing_coordinator_is_named(place, capsys, monkeypatch):
    monkeypatch.setattr(meeting, "QUIET_SECONDS", 0.4)
    (error,) = outcomes(attend(place, 2, 1, limit=1.0))
    assert isinstance(error, StartFailed) and error.exit_code == 2
    assert f"expected process 0 to answer at {place} within 1 s, but it did not" in str(error)
    assert "Connection refused" in str(error)
    assert f"process 1: waits for process 0 at {place} (Connection" in capsys.readouterr().err


def test_a_name_that_cannot_be_resolved_is_said():
    (error,) = outcomes(attend("no-such-host.invalid:9000", 2, 1, limit=0.5))
    assert isinstance(error, StartFailed)
    assert re.search(r"but it did not \([A-Z].*(name|resol|service).*\)", str(error), re.IGNORECASE)


def test_a_port_that_is_not_free_is_refused_at_once(place):
    with socket.create_server(("", int(place.rpartition(":")[2]))):
        (error,) = outcomes(attend(place, 2, 0))
    assert "process 0 cannot listen on port" in str(error)


@pytest.mark.parametrize("failed", [0, 2])
def test_a_failure_before_the_meeting_ends_all(place, failed):
    calls = [attend(place, 3, rank) for rank in range(3) if rank != failed]
    # in a process of its own, `report_failure` knows of no meeting
    errors = outcomes(fail(place, 3, failed), *calls)
    assert errors[0] is None
    for error in errors[1:]:
        assert isinstance(error, StartFailed) and error.exit_code == 3
        assert str(error) == f"process {failed} failed before the start: no such plan"


def test_a_process_that_has_met_the_others_reports_nothing(place, monkeypatch):
    monkeypatch.setattr(meeting, "_begun", True)
    start = time.monotonic()
    fail(place, 3, 2)()
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([(3, 1), (3, 1)], "--process-id: expected every number from 0 to 2 once, got 1 twice"),
        ([(3, 1), (4, 2)], "--num-processes: expected the same number on all processes, got 3 on"),
    ],
)
def test_processes_of_another_pod_end_all(place, others, message):
    calls = [attend(place, size, rank, after=0.2 * i) for i, (size, rank) in enumerate(others)]
    for error in outcomes(attend(place, 3, 0), *calls):
        assert isinstance(error, StartFailed) and message in str(error)


def test_a_process_that_comes_after_a_failure_is_told(place):
    calls = [fail(place, 3, 1), attend(place, 3, 0), attend(place, 3, 2, after=1.5)]
    for error in outcomes(*calls)[1:]:
        assert "process 1 failed before the start: no such plan" in str(error)


def test_another_version_ends_all(place, monkeypatch):
    def come_with_another_version():
        with socket.create_connection(Address(place, 2, 1).host_and_port) as connected:
            connected.sendall(b'{"rank": 1, "size": 2, "noria": "0.0.1"}\n')
            assert b"expected one version of noria" in connected.recv(9999)

    def come():
        while True:
            try:
                return come_with_another_version()
            except ConnectionRefusedError:
                time.sleep(0.05)

    refused, other = outcomes(attend(place, 2, 0), come)
    assert "expected one version of noria on all processes, got" in str(refused)
    assert other is None


def test_strangers_and_processes_that_die_do_not_disturb_the_meeting(place):
    port = int(place.rpartition(":")[2])

    def disturb():
        for message in (b"GET / HTTP/1.1\r\n\r\n", b"", b'{"rank": 2, "size": 3, "noria": "'):
            while True:
                try:
                    with socket.create_connection(("localhost", port)) as connected:
                        connected.sendall(message)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)

    program = (
        "from noria.runtime.pods.meeting import Address, meet; print('comes', flush=True); "
        f"meet(Address({place!r}, 3, 1), 60).__enter__()"
    )
    pool = ThreadPoolExecutor(2)
    first = pool.submit(attend(place, 3, 0))
    disturb()
    dying = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert dying.stdout is not None and dying.stdout.readline() == b"comes\n"
    time.sleep(0.3)
    dying.kill()
    dying.communicate()
    again = [pool.submit(attend(place, 3, 1)), threading.Thread(target=attend(place, 3, 2))]
    again[1].start()
    assert first.result(timeout=30) is None and again[0].result(timeout=30) is None
    again[1].join()
    pool.shutdown()


COMMAND = "import sys; from noria.runtime import cli; sys.exit(cli.main_of_process())"
HERE = ("batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "smollm2", "--target", "cpu:2")


def command(place: str, rank: int, *options: str) -> subprocess.Popen[str]:
    pod = ("--coordinator", place, "--num-processes", "2", "--process-id", str(rank))
    arguments = [sys.executable, "-c", COMMAND, *HERE, *pod, *options]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_signal_ends_a_process_that_waits_for_the_others(place):
    process = command(place, 0)
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(Address(place, 2, 1).host_and_port).close()
            break
        except ConnectionRefusedError:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert time.monotonic() - start < 2
    assert process.returncode == 75
    assert said.splitlines()[-1] == "noria: stopped by SIGTERM"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--no-such-option",), "its options are wrong; see its own message"),
        (("--plan", "gone.toml"), "gone.toml"),
    ],
)
def test_a_command_that_cannot_start_ends_the_others_with_its_code(place, wrong, message):
    (error,) = outcomes_of(place, command(place, 1, *wrong))
    assert isinstance(error, StartFailed) and error.exit_code == 2
    assert "process 1 failed before the start: " in str(error) and message in str(error)


def outcomes_of(place: str, process: subprocess.Popen[str]) -> list[BaseException | None]:
    """Wait as process 0 for a command that is process 1."""
    found = outcomes(attend(place, 2, 0, limit=60))
    process.communicate(timeout=60)
    assert process.returncode == 2
    return found


def test_a_number_that_is_taken_is_free_when_its_process_has_gone(place):
    """A process whose connection is lost comes again before process 0 has seen the loss."""
    with socket.create_server(("localhost", 0)) as server:
        gone = socket.create_connection(server.getsockname())
        first = Connection(server.accept()[0])
        hello = {"rank": 1, "size": 3, "noria": meeting.version("noria")}
        with pytest.raises(StartFailed, match="got 1 twice"):
            meeting._rank_of(hello, Address(place, 3, 0), {1: first})
        gone.close()
        assert meeting._rank_of(hello, Address(place, 3, 0), {1: first}) == 1
        first.socket.close()
    for rank in (3, -1, "1", [1], None):
        with pytest.raises(StartFailed, match="expected every number from 0 to 2 once, got"):
            meeting._rank_of(hello | {"rank": rank}, Address(place, 3, 0), {})


CONNECTS = """
import sys, time
from noria.runtime.process.stop_signals import StopSignals
from noria.runtime.console import tell
from noria.runtime.pods.meeting import Address, meet
with StopSignals():
    with meet(Address(sys.argv[1], 3, int(sys.argv[2])), 60):
        tell(sys.stdout, "met")
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("victim", "number", "message"),
    [
        (0, signal.SIGKILL, "process 0 ended while the processes connected"),
        (1, signal.SIGKILL, "process 1 ended while the processes connected"),
        (2, signal.SIGTERM, "process 2 ended: stopped by SIGTERM"),
    ],
)
def test_the_end_of_a_process_ends_all_that_connect(place, victim, number, message):
    """jax itself would wait for a process that is gone for a minute."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    arguments = [[sys.executable, "-c", CONNECTS, place, str(rank)] for rank in range(3)]
    processes = [subprocess.Popen(words, **pipe) for words in arguments]
    for process in processes:
        assert process.stdout.readline() == "met\n"
    start = time.monotonic()
    processes[victim].send_signal(number)
    for rank, process in enumerate(processes):
        _, said = process.communicate(timeout=30)
        if rank != victim:
            assert process.returncode == 75
            assert f"noria: process {rank}: {message}" in said
    assert time.monotonic() - start < 5


STOPPED = """
import os, signal, sys, time
from noria.runtime.errors import leave_at_once
from noria.runtime.pods import meeting, pod, watchdog
from noria.runtime.process.stop_signals import StopNow, StopSignals
rank, place = int(sys.argv[2]), eval(sys.argv[3])
original = getattr(place, sys.argv[4])
def stopped_here(*arguments):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return original(*arguments)
setattr(place, sys.argv[4], stopped_here)
try:
    with StopSignals(), pod.join(meeting.Address(sys.argv[1], 2, rank), 60, "cpu:2"):
        time.sleep(60)
except StopNow as stop:
    leave_at_once(stop.exit_code)
"""


@pytest.mark.parametrize(
    "where",
    [("meeting", "_watched"), ("pod", "Watchdog"), ("pod.Watchdog", "start"), ("pod", "Pod")],
    ids=" ".join,
)
def test_a_signal_at_any_moment_of_the_start_ends_the_others_with_its_code(place, where):
    """Each moment is between two ways of telling the others."""
    pipe = {"stderr": subprocess.PIPE, "text": True}
    arguments = [[sys.executable, "-c", STOPPED, place, str(rank), *where] for rank in range(2)]
    start = time.monotonic()
    processes = [subprocess.Popen(words, **pipe) for words in arguments]
    said = [process.communicate(timeout=90)[1] for process in processes]
    assert [process.returncode for process in processes] == [130, 130], said
    assert "noria: process 0: process 1 ended: stopped by SIGINT" in said[0]
    assert time.monotonic() - start < 40
