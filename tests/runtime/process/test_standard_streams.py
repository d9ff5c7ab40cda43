"""The standard streams of the command: closed ones, and results apart from other output."""

import io
import json
import subprocess
import sys

import pytest

from noria.runtime.process.standard_streams import TimedLines

COMMAND = f"{sys.executable} -m noria.runtime.cli"
PRINT_AS_A_LIBRARY_DOES = """
import os, sys
from noria.runtime.process.standard_streams import prepare_streams
prepare_streams()
os.write(1, b"library")
print("result")
os.write(2, b"message")
"""


def shell(command: str) -> tuple[int, str, str]:
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    return run.returncode, run.stdout, run.stderr


def test_only_results_are_on_standard_output():
    run = subprocess.run([sys.executable, "-c", PRINT_AS_A_LIBRARY_DOES], capture_output=True)
    assert (run.stdout, run.stderr) == (b"result\n", b"librarymessage")


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 3, "noria: "),
        ("2>&-", 3, ""),
        ("<&- >&- 2>&-", 3, ""),
    ],
)
def test_closed_streams_change_no_exit_code(redirection, code, message):
    found, out, err = shell(f"{COMMAND} inspect /nonexistent {redirection}")
    assert found == code and not out and err.startswith(message) and "Traceback" not in err


def test_a_result_for_a_closed_standard_output_is_refused_before_the_job(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    arguments = f"batch -i {tmp_path}/in.jsonl -o - --model /nonexistent"
    code, _, err = shell(f"{COMMAND} {arguments} >&-")
    assert code == 2 and "-o -: expected standard output, got none" in err


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    code = PRINT_AS_A_LIBRARY_DOES + f"open({str(tmp_path / 'file')!r}, 'w').write('content')\n"
    (tmp_path / "program.py").write_text(code)
    shell(f"{sys.executable} {tmp_path}/program.py 2>&- >&-")
    assert (tmp_path / "file").read_text() == "content"


def test_the_version_is_printed_for_scripts():
    code, out, _ = shell(f"{COMMAND} --version")
    assert code == 0 and out.startswith("noria ") and out.count("\n") == 1


def test_lines_begin_with_the_time():
    stream = io.StringIO()
    timed = TimedLines(stream, now=lambda: "12:00")
    for text in ("one\ntwo\n", "half", " line\n", "", "\n"):
        timed.write(text)
    assert stream.getvalue() == "12:00 one\n12:00 two\n12:00 half line\n12:00 \n"


def test_every_line_of_a_command_with_log_times_has_the_time(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    arguments = f"batch -i {tmp_path}/in.jsonl -o {tmp_path}/o.jsonl --model /nonexistent"
    code, _, err = shell(f"TZ=UTC {COMMAND} {arguments} --log-times")
    assert code == 3
    time, _, text = err.partition(" ")
    assert time.startswith("20") and time.endswith("+0000") and text.startswith("noria: ")


def test_the_doctor_reports_as_json():
    code, out, _ = shell(f"JAX_PLATFORMS=cpu {COMMAND} doctor --json")
    report = json.loads(out)
    assert code == (0 if report["ok"] else 2)
    subjects = {finding["subject"]: finding["text"] for finding in report["findings"]}
    assert subjects["noria"] == report["noria"] and {"python", "jax"} <= subjects.keys()
