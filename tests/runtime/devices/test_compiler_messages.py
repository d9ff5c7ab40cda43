"""While graphs compile, XLA's alarms do not reach the terminal, and everything else does."""

import subprocess
import sys

import pytest

from noria.runtime.devices.alarm_filter import AlarmFilter

SLOW_COMPILE = b"""\
E0730 10:00:00.000001    6491 slow_operation_alarm.cc:73]
********************************
[Compiling module jit_decode] Very slow compile? If you want to file a bug, run with envvar \
XLA_FLAGS=--xla_dump_to=/nonexistent/foo and attach the results.
********************************
"""
SLOW_FOLDING = b"""\
E0000 00:00:1795757507.320976    6491 slow_operation_alarm.cc:140] The operation took 1m2s
Constant folding an instruction is taking > 1s:

  %sort.5 = f32[64,512]{1,0} sort(%constant.7), dimensions={1}

This isn't necessarily a bug; constant-folding is inherently a trade-off.

If you'd like to file a bug, run with envvar XLA_FLAGS=--xla_dump_to=/nonexistent/foo and \
attach the results.
"""
UNKNOWN_ALARM = (
    b"E0730 10:00:00.000001 6491 slow_operation_alarm.cc:73] something new\nof two lines\n"
)
OTHERS = [
    b"\n",
    b"compile [1/2] prefill\n",
    b"E0730 10:00:00.000001    6491 cuda_dnn.cc:100] could not create a handle\n",
    b"********************************\n",
    b"F0730 10:00:00.000001    6491 array.cc:1] Check failed: a == b\n",
]

COMPILE = """
import os, sys, time
from noria.compile import build
from noria.runtime import session
from noria.runtime.devices.compiler_messages import START_SECONDS

def slow_build(*_):
    time.sleep(3 * START_SECONDS)
    os.write(2, bytes.fromhex(sys.argv[2]))
    os.write(2, b"E0730 10:00:00.000001 6491 some.cc:1] a real error\\n")
    print("progress", file=sys.stderr)
    if sys.argv[1] == "crash":
        os.abort()

class Plan:
    buckets = experts = attention = compiler = None
    class numbers:
        dtype = "float32"

class Definition:
    class arrangement:
        panel_columns = None

build.build, build.plan_graphs = slow_build, lambda *_: []
session.compile_plan(Definition, Plan, None)
print("afterwards", file=sys.stderr)
slow_build()
"""


@pytest.mark.parametrize("size", [1, 7, 10_000], ids=str)
def test_alarms_are_removed_and_all_other_lines_stay_in_order(size):
    alarms = [SLOW_COMPILE, SLOW_FOLDING, SLOW_COMPILE, SLOW_FOLDING]
    text = b"".join(map(b"".join, zip(OTHERS, alarms, strict=False))) + OTHERS[-1] + b"no end"
    found, filtered = b"", AlarmFilter()
    for begin in range(0, len(text), size):
        found += filtered.pass_on(text[begin : begin + size])
    assert found + filtered.pass_on(b"", is_last=True) == b"".join(OTHERS) + b"no end"


def test_an_alarm_of_unknown_words_ends_where_another_message_begins():
    passed_on = AlarmFilter().pass_on(UNKNOWN_ALARM + OTHERS[-1] + OTHERS[1])
    assert passed_on == OTHERS[-1] + OTHERS[1]


def run(ending: str) -> tuple[int, str]:
    # the words of real alarms: how long a compile takes until XLA's timer rings differs by machine
    alarms = (SLOW_COMPILE + SLOW_FOLDING).hex()
    command = [sys.executable, "-c", COMPILE, ending, alarms]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_no_alarm_reaches_the_terminal_while_a_plan_compiles():
    code, said = run("return")
    assert code == 0
    compiled, afterwards = said.split("afterwards\n")
    assert "slow_operation_alarm" in afterwards
    assert "slow_operation_alarm" not in compiled and "Constant folding" not in compiled
    for text in (compiled, afterwards):
        assert text.endswith("] a real error\nprogress\n")


def test_the_last_words_of_a_crash_are_seen():
    code, said = run("crash")
    assert code < 0
    assert said.endswith("] a real error\nprogress\n")


CONNECTION = (
    b"[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks\n"
)
LOSS = (
    b"F1127 09:54:39.112966   11024 client.h:80] Terminating process because the JAX distributed "
    b"service detected fatal errors. absl::Status: UNAVAILABLE\n"
)
TRACE = (
    b"*** Check failure stack trace: ***\n"
    b"    @     0x7f7307258634  absl::lts_20260107::log_internal::LogMessage::SendToLog()\n"
    b"    @     0x7f73144a71f5  (unknown)\n"
)


def test_a_lost_process_has_a_reason_and_no_trace():
    text = CONNECTION + OTHERS[1] + LOSS + TRACE + b"noria: process 0 is gone\n"
    assert AlarmFilter().pass_on(text) == OTHERS[1] + LOSS + b"noria: process 0 is gone\n"


def test_the_trace_of_another_failure_stays():
    assert AlarmFilter().pass_on(OTHERS[-1] + TRACE) == OTHERS[-1] + TRACE


def test_a_child_that_ends_late_is_waited_for_later():
    """A process that was started meanwhile keeps it: nothing warns of a child that still runs."""
    program = """
import gc, os, subprocess, sys, time
from noria.runtime.devices import compiler_messages
from noria.runtime.devices.compiler_messages import START_SECONDS, without_alarms

compiler_messages._END_SECONDS = 0.1
with without_alarms():
    time.sleep(2 * START_SECONDS)
    other = subprocess.Popen(["sleep", "1"])
assert compiler_messages._left
gc.collect()
other.wait()
compiler_messages._left[0].wait()
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
