"""A signal ends a command wherever the process is, within two seconds."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import fake_model as fake
import pytest

from noria.runtime import cli
from noria.runtime.files.disk import Disk
from noria.runtime.process.stop_signals import END_SECONDS, StopNow, StopSignals, at_forced_end
from noria.runtime.rows.part import Part

LIMIT_SECONDS = 2.0
START = """
import gc, hashlib, threading, time
from pathlib import Path
from noria.runtime.batch.lock import JobLock
from noria.runtime.process.stop_signals import StopSignals

def native():
    threading.Timer(0.3, print, ("waits",), {"flush": True}).start()  # when it has begun
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

def collect(phase, info):
    global waits
    if waits:
        waits = False
        print("waits", flush=True)
        time.sleep(30)

waits = True
"""
PLACES = {
    "native code, which Python cannot interrupt": "native()",
    "a callback, whose exceptions Python ignores": (
        "gc.callbacks.append(collect); gc.collect(); time.sleep(30)"
    ),
    "rows in flight, and a second signal": "stop.can_drain = True; native()",
}


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_below_limit(seconds_to_end: Callable[[], float]) -> bool:
    """Whether one of three processes ends in time: a busy machine may hold any of them up."""
    return any(seconds_to_end() < LIMIT_SECONDS for _ in range(3))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("place", PLACES)
def test_a_signal_ends_a_process_that_does_not_reach_its_handler(tmp_path, place, number, code):
    lock = tmp_path / "out.jsonl.lock"
    inside = f"with StopSignals() as stop, JobLock(Path({str(lock)!r})):\n"

    def seconds_to_end() -> float:
        process = started("-c", f"{START}{inside}    {PLACES[place]}")
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        assert lock.exists()
        start = time.monotonic()
        process.send_signal(number)
        if "second" in place:
            time.sleep(0.3)
            assert process.poll() is None
            start = time.monotonic()
            process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == code, said
        assert said.splitlines()[-1] == f"noria: stopped by {number.name}"
        assert not lock.exists()
        return time.monotonic() - start

    assert is_below_limit(seconds_to_end)


def test_the_first_signal_with_rows_in_flight_ends_nothing():
    with StopSignals() as stop:
        stop.can_drain = True
        signal.raise_signal(signal.SIGTERM)
        # longer than the thread waits before it would end this process
        time.sleep(END_SECONDS + 0.2)
        assert stop.requested == signal.SIGTERM


def test_a_signal_after_which_the_handlers_are_gone_ends_nothing(capsys):
    with pytest.raises(BaseException, match="stopped by SIGTERM"), StopSignals():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(30)
    time.sleep(END_SECONDS + 0.2)
    assert capsys.readouterr().err == ""


def test_a_stop_that_native_code_turned_into_an_error_is_a_stop():
    with pytest.raises(StopNow, match="stopped by SIGTERM") as caught, StopSignals():
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(30)
        except BaseException:
            raise RuntimeError("unable to start") from None
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_while_rows_drain_is_an_error():
    with pytest.raises(OSError, match="disk"), StopSignals() as stop:
        stop.can_drain = True
        signal.raise_signal(signal.SIGTERM)
        raise OSError("disk")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_an_action_gets_the_code_and_runs_only_while_its_context_is_open(number, code):
    ran = []
    program = (
        f"{START}"
        "from noria.runtime.process.stop_signals import at_forced_end\n"
        "with StopSignals():\n"
        "    with at_forced_end(print): pass\n"
        "    show = lambda code: print('open', code, flush=True)\n"
        "    with at_forced_end(lambda code: 1 / 0), at_forced_end(show):\n"
        "        native()\n"
    )
    process = started("-c", program)
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, f"open {code}\n")
    with at_forced_end(ran.append):
        pass
    assert not ran


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_while_a_command_is_imported_has_its_code(tmp_path, number, code):
    """The signal comes in the middle of an import, which happens before any option is read."""
    slow = tmp_path / "argparse.py"
    # an import may ignore the exception of a handler, and one of an extension module may crash
    slow.write_text(
        "import time\ntry:\n    print('waits', flush=True); time.sleep(30)\n"
        "except BaseException:\n    print('goes on', flush=True); time.sleep(30)\n"
    )
    program = (
        f"import sys; from noria.runtime import cli; sys.path.insert(0, {str(tmp_path)!r}); "
        "sys.modules.pop('argparse', None); sys.exit(cli.main_of_process())"
    )

    def seconds_to_end() -> float:
        process = started("-c", program, "doctor")
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        start = time.monotonic()
        process.send_signal(number)
        out, said = process.communicate(timeout=20)
        assert (process.returncode, out, said) == (code, "", f"noria: stopped by {number.name}\n")
        return time.monotonic() - start

    assert is_below_limit(seconds_to_end)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_merge_leaves_no_file(tmp_path, monkeypatch, capsys, number):
    source = fake.write_input(tmp_path / "in.jsonl")
    parts = [tmp_path / f"part{index}.jsonl" for index in range(2)]
    for index, part in enumerate(parts):
        fake.run(source, part, part=Part(index, 2))

    def stop(disk, descriptor):
        assert len(list(tmp_path.glob("out.jsonl*"))) == 2, "the lock and a temporary file"
        signal.raise_signal(number)
        time.sleep(30)

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(Disk, "fsync", stop)
    monkeypatch.setattr(cli.errors, "leave_at_once", leave)
    with pytest.raises(SystemExit):
        cli.main(["merge", *map(str, parts), "-o", str(tmp_path / "out.jsonl")])
    assert not list(tmp_path.glob("*out.jsonl*"))
    assert capsys.readouterr().err.endswith(f"noria: stopped by {number.name}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_python_ends_does_not_replace_the_exit_code(number):
    """Python has then restored the default handlers, and deletes the objects of modules."""
    program = """
import os, sys, time
from noria.runtime import cli

class Slow:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"ends\\n")
        sleep(1)

kept = Slow()
cli.main = lambda: 3
sys.exit(cli.main_of_process())
"""
    process = started("-c", program)
    assert process.stderr is not None
    assert "ends\n" in iter(process.stderr.readline, "")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 3
