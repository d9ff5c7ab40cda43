"""The progress file: lines of JSON for programs that watch a job."""

import io
import json
import os
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from noria.runtime.errors import ConfigError
from noria.runtime.progress.progress import RECORD_SECONDS, Progress, ProgressFile, path_of

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_line_has_the_time_of_day_and_is_appended(tmp_path):
    path = tmp_path / "progress.jsonl"
    for phase in ("scan", "end"):
        file = ProgressFile(str(path), print, now=lambda: NOON)
        file.write({"phase": phase})
        file.close()
    time = "2026-01-31T12:00:00.000+00:00"
    assert read(path) == [{"time": time, "phase": "scan"}, {"time": time, "phase": "end"}]


def test_a_descriptor_takes_lines_and_stays_open():
    reader, writer = os.pipe()
    file = ProgressFile(f"fd:{writer}", print, now=lambda: NOON)
    file.write({"phase": "scan"})
    file.close()
    os.write(writer, b"open")
    assert os.read(reader, 1000).endswith(b'"phase":"scan"}\nopen')
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("place", ["fd:999", "fd:99999999999999999999", "/nonexistent/file"])
def test_a_place_that_cannot_be_written_is_refused(place):
    with pytest.raises(ConfigError, match=f"--progress-file {place}: expected a file or an open"):
        ProgressFile(place, print)


def test_a_reader_that_leaves_does_not_stop_the_job():
    reader, writer = os.pipe()
    said = []
    file = ProgressFile(f"fd:{writer}", said.append)
    os.close(reader)
    for _ in range(2):
        file.write({"phase": "run"})
    assert said == [
        f"--progress-file fd:{writer}: cannot be written (Broken pipe); the job continues without "
        "it"
    ]
    os.close(writer)


def test_only_a_path_is_a_file_of_the_job(tmp_path):
    assert path_of("fd:3") is None and path_of(str(tmp_path)) == tmp_path


def test_the_progress_has_phases_rows_rates_and_the_end():
    now = 0.0
    lines: list[dict] = []
    progress = Progress(stream=io.StringIO(), clock=lambda: now, is_quiet=True)
    progress.file = SimpleNamespace(write=lines.append)  # pyright: ignore[reportAttributeAccessIssue]
    progress.begin()
    now = RECORD_SECONDS
    progress.show_scan(10, 50, 100)
    progress.enter("load")
    progress.enter("load")
    progress.start_rows(8, done=1, errors=1, max_tokens=400)

    def update(tokens: int) -> None:
        progress.update(SimpleNamespace(tokens=tokens, slots=0, used_slots=0, padding_waste=None))

    update(0)
    now += RECORD_SECONDS
    progress.count_row(is_error=False)
    update(100)
    update(110)  # not due
    progress.end(0)
    keys = ("phase", "rows_done", "rows_total", "errors", "tokens", "tokens_per_second")
    assert [tuple(line[key] for key in keys) for line in lines] == [
        ("scan", 0, None, 0, None, None),
        ("scan", 0, None, 0, None, None),
        ("load", 0, None, 0, None, None),
        ("load", 1, 8, 1, None, None),
        ("load", 2, 8, 1, 100, 20.0),
        ("end", 2, 8, 1, None, None),
    ]
    assert (lines[1]["rows_scanned"], lines[1]["share_scanned"]) == (10, 0.5)
    assert lines[4]["seconds_left"] == 15.0 and lines[5]["exit_code"] == 0
