"""The watchdog of a pod's processes, over a simulated store and clock."""

import json
import threading
import time

import pytest

from noria.runtime.errors import EXIT_RESUMABLE
from noria.runtime.pods.watchdog import Watchdog


class Store:
    """A key-value store that can fail on request."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.is_gone = False

    def put(self, key: str, value: bytes) -> None:
        self._check()
        self.values[key] = value

    def folder(self, prefix: str) -> dict[str, bytes]:
        self._check()
        return {key: value for key, value in self.values.items() if key.startswith(f"{prefix}/")}

    def _check(self) -> None:
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pod():
    """Three processes with a limit of ten seconds."""
    store, clock = Store(), Clock()
    return store, clock, [Watchdog(store, rank, 3, 10.0, clock=clock) for rank in range(3)]


def run(clock, watchdogs, seconds: float) -> None:
    for _ in range(int(seconds)):
        clock.now += 1
        for watchdog in (*watchdogs, *watchdogs):  # twice, as a process reads only earlier beats
            watchdog.exchange()


def test_processes_that_beat_are_left_alone(pod):
    _, clock, watchdogs = pod
    run(clock, watchdogs, 100)
    assert [watchdog.verdict() for watchdog in watchdogs] == [None] * 3


def test_a_silent_process_is_named_by_all_others_after_the_limit(pod):
    _, clock, watchdogs = pod
    run(clock, watchdogs, 5)
    run(clock, watchdogs[:2], 10)
    assert [watchdog.verdict() for watchdog in watchdogs[:2]] == [None] * 2
    run(clock, watchdogs[:2], 2)
    for watchdog in watchdogs[:2]:
        reason, code = watchdog.verdict()
        assert "process 2 has been silent for 11.0 s (the limit is 10 s)" in reason
        assert code == EXIT_RESUMABLE


def test_a_process_that_never_came_is_named_too(pod):
    _, clock, watchdogs = pod
    run(clock, watchdogs[:2], 11)
    assert "process 2 has been silent" in watchdogs[0].verdict().reason


def test_a_store_that_does_not_answer_is_process_0_and_nobody_else(pod):
    store, clock, watchdogs = pod
    run(clock, watchdogs, 5)
    store.is_gone = True
    clock.now += 11
    assert "process 0 has been silent for 11.0 s" in watchdogs[1].verdict().reason


def test_a_process_that_fails_is_followed_with_its_reason_and_code(pod):
    _, clock, watchdogs = pod
    run(clock, watchdogs, 2)
    watchdogs[1].fail("row 'x': no", 3)
    run(clock, watchdogs, 1)
    assert watchdogs[0].verdict() == ("process 1 ended: row 'x': no", 3)
    assert watchdogs[2].verdict() == ("process 1 ended: row 'x': no", 3)


def test_processes_that_have_done_their_work_wait_for_all_others_and_leave():
    store, left, codes = Store(), [], []

    def end(watchdog: Watchdog, after: float) -> None:
        time.sleep(after)
        watchdog.finish()
        watchdog.leave()
        left.append(time.monotonic())

    watchdogs = [Watchdog(store, rank, 3, 3.0, end=codes.append) for rank in range(3)]
    for watchdog in watchdogs:
        watchdog.start()
    start = time.monotonic()
    # one works far longer than the limit of silence
    waits = [
        threading.Thread(target=end, args=(watchdog, after))
        for watchdog, after in zip(watchdogs, (0.0, 4.0, 0.1), strict=True)
    ]
    for wait in waits:
        wait.start()
    for wait in waits:
        wait.join(20)
    assert len(left) == 3 and min(left) - start >= 4.0 and not codes


def test_a_process_that_left_well_is_not_missed(pod):
    store, clock, watchdogs = pod
    run(clock, watchdogs, 2)
    store.put("alive/1", json.dumps({"stage": 2, "end": None}).encode())
    run(clock, [watchdogs[0], watchdogs[2]], 50)
    assert watchdogs[0].verdict() is None


@pytest.mark.parametrize(
    ("report", "said", "code"),
    [
        (
            {"end": {"failed": "it was stopped by a signal", "exit_code": 130}},
            "it was stopped",
            130,
        ),
        ({"stage": 1}, "process 0 has been silent", EXIT_RESUMABLE),
        ({}, "process 0 has been silent", EXIT_RESUMABLE),
    ],
    ids=["stopped", "killed while it waits", "killed at work"],
)
def test_a_process_that_waits_for_the_end_of_another_ends_if_that_one_fails(
    capsys, report, said, code
):
    store, ended, codes, left = Store(), threading.Event(), [], []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    store.put("alive/0", json.dumps(report).encode())
    watchdog = Watchdog(store, 1, 2, 3.0, end=end)
    watchdog.start()

    def finish() -> None:
        watchdog.finish()
        watchdog.leave()
        left.append("process 1")

    threading.Thread(target=finish, daemon=True).start()
    assert ended.wait(10)
    assert codes == [code] and not left
    assert f"noria: process 1: {said}" in capsys.readouterr().err


def test_the_signal_of_one_process_is_known_to_the_others(pod):
    _, clock, watchdogs = pod
    watchdogs[2].report_signal("SIGTERM")
    run(clock, watchdogs, 1)
    assert [watchdog.remote_signal for watchdog in watchdogs] == ["SIGTERM", "SIGTERM", None]


def test_the_threads_end_the_process_when_another_falls_silent(capsys):
    store, ended, codes = Store(), threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    watchdog = Watchdog(store, 1, 2, 0.5, end=end)
    watchdog.start()
    other = Watchdog(store, 0, 2, 0.5)
    start = time.monotonic()
    while time.monotonic() - start < 1.0:
        other.exchange()
        time.sleep(0.05)
    assert not codes
    assert ended.wait(5)
    assert codes == [EXIT_RESUMABLE]
    assert "noria: process 1: process 0 has been silent" in capsys.readouterr().err


def test_the_reason_of_another_process_is_shown_and_not_sent_to_the_terminal(capsys):
    store, ended = Store(), threading.Event()
    told = {"end": {"failed": "no file \x1b[2J.jsonl", "exit_code": 3}}
    store.put("alive/0", json.dumps(told).encode())
    Watchdog(store, 1, 2, 0.5, end=lambda code: ended.set()).start()
    assert ended.wait(5)
    assert r"noria: process 1: no file \x1b[2J.jsonl" in capsys.readouterr().err
