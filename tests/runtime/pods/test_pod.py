"""Messages between the processes of a pod, over a store in memory."""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from noria.runtime.devices import compiler_messages
from noria.runtime.errors import OutOfStep
from noria.runtime.pods.coordination import Address
from noria.runtime.pods.peers import GO, StepDirective
from noria.runtime.pods.pod import DIRECTIVES_PER_FOLDER, Disagreement, Pod, join
from noria.runtime.pods.pod_options import PodOptions
from noria.runtime.pods.watchdog import Watchdog


class Store:
    """The key-value store from the view of one process; the processes run one after another."""

    def __init__(self, rank: int, values: dict[str, bytes]):
        self.rank, self.size, self.values = rank, 2, values
        self.barriers: list[str] = []

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def folder(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.values.items() if key.startswith(f"{prefix}/")}

    def remove_folder(self, prefix: str) -> None:
        for key in self.folder(prefix):
            del self.values[key]

    def barrier(self, name: str) -> None:
        self.barriers.append(name)


@pytest.fixture
def pods():
    values: dict[str, bytes] = {}
    stores = [Store(rank, values) for rank in range(2)]
    return [Pod(store, Watchdog(store, store.rank, 2, 60.0)) for store in stores]


@pytest.mark.parametrize("value", [None, 3, [1, 2, 3], "a plan\n", {"a": [None]}])
def test_what_process_0_shares_is_what_the_others_get(pods, value):
    leader, follower = pods
    assert leader.broadcast(value) == value
    assert follower.broadcast("something else") == value


def test_equal_facts_are_agreed_on_and_all_wait_for_all(pods):
    for pod in pods:
        pod.agree(lambda: {"input": "sha256:1"})
        assert len(pod._store.barriers) == 1


def test_other_facts_are_refused_naming_key_values_and_processes(pods):
    leader, follower = pods
    leader.agree(lambda: {"input": "sha256:1", "seed": "0"})
    with pytest.raises(Disagreement) as caught:
        follower.agree(lambda: {"input": "sha256:1", "seed": "7"})
    assert "seed: process 0 has 0, process 1 has 7" in str(caught.value)
    assert "input" not in str(caught.value)


def test_the_word_of_process_0_is_followed(pods):
    leader, follower = pods
    directives = [GO, GO, StepDirective("drain", "SIGTERM"), StepDirective("stop", "SIGTERM")]
    assert [leader.exchange_directive(directive, None) for directive in directives] == directives
    assert [follower.exchange_directive(GO, None) for _ in directives] == directives


def test_a_process_that_did_something_else_is_refused_before_its_next_step(pods):
    leader, follower = pods
    leader.exchange_directive(GO, None)
    follower.exchange_directive(GO, None)
    leader.record(0, [5, 6])
    follower.record(0, [5, 7])
    leader.exchange_directive(GO, None)
    with pytest.raises(OutOfStep, match="process 1 is out of step with process 0 before step 1"):
        follower.exchange_directive(GO, None)


def test_words_that_all_have_read_are_forgotten(pods):
    leader, follower = pods
    for _ in range(3 * DIRECTIVES_PER_FOLDER + 1):
        leader.exchange_directive(GO, None)
        follower.exchange_directive(GO, None)
    assert len(leader._store.folder("directives")) <= 2 * DIRECTIVES_PER_FOLDER + 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (("host", 2, 0), "--coordinator: expected HOST:PORT, got 'host'"),
        (("host:0", 2, 0), "--coordinator: expected HOST:PORT"),
        (("host:1", 0, 0), "--num-processes: expected at least 1, got 0"),
        (("host:1", 2, 2), "--process-id: expected 0 to 1, as --num-processes is 2, got 2"),
        (("host:1", 2, -1), "--process-id: expected 0 to 1"),
    ],
)
def test_an_address_that_cannot_be_is_refused(address, message):
    with pytest.raises(ValueError) as caught:
        Address(*address)
    assert message in str(caught.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, math.inf, math.nan])
def test_a_limit_of_no_time_or_of_more_than_a_day_is_refused(seconds):
    message = "--peer-timeout-seconds: expected more than 0 and at "
    with pytest.raises(ValueError, match=message), join(None, seconds, "cpu"):
        pass


def test_a_job_of_one_process_imports_nothing_of_pods():
    program = (
        "import sys, noria.runtime.cli, noria.runtime.commands.batch_job; "
        "print([name for name in ('pod', 'coordination', 'watchdog') "
        "if f'noria.runtime.pods.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [("process 0 is gone", 75, "noria: process 0 is gone\n"), (None, -signal.SIGABRT, "")],
)
def test_an_abort_of_native_code_is_explained_if_there_is_a_reason(message, code, said):
    program = (
        "import os; from noria.runtime.pods import coordination as c; "
        f"c._report_before_abort(lambda: {message!r}); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)


def test_lines_about_connections_are_removed_in_every_command(monkeypatch, capfd):
    begun = []

    @contextmanager
    def join(*arguments, **options):
        until = time.monotonic() + 10
        while not begun and time.monotonic() < until:
            time.sleep(0.01)
        os.write(2, b"[Gloo] Rank 0 is connected to 1 peer ranks\nanother message\n")
        yield

    begin = compiler_messages._Detour.begin
    monkeypatch.setattr(
        compiler_messages._Detour, "begin", lambda detour: begun.append(begin(detour))
    )
    monkeypatch.setattr(compiler_messages, "START_SECONDS", 0)
    monkeypatch.setattr("noria.runtime.pods.pod.join", join)
    with PodOptions("x:1", num_processes=2, process_id=0).peers("cpu:2"):
        pass
    assert capfd.readouterr().err == "another message\n"
