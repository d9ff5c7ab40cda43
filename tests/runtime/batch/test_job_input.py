"""A prompt is encoded once, has the job's date on any day, and is read in advance."""

import errno
import io
import json
import threading
from contextlib import closing
from datetime import datetime

import pytest
from fake_model import FakeGenerator, FakeModel, masked, run, settings, write_input

from noria.runtime.batch import job_input
from noria.runtime.batch.job_input import TokenSpill
from noria.runtime.batch.merge import merge
from noria.runtime.batch.run import run_job
from noria.runtime.errors import ConfigError, JobError, JournalError, MergeError
from noria.runtime.files.run_config import read_instant
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.part import Part
from noria.runtime.rows.scan import MAX_AHEAD, map_ahead

ROWS = [
    {"id": "clock", "prompt": "date"},
    *({"id": f"q{i}", "prompt": "x" * i} for i in range(1, 9)),
]
NOW = datetime(2026, 1, 31, 12)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture
def today(monkeypatch):
    """Set the day on which jobs start."""

    class Calendar(datetime):
        day = 1

        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, cls.day, 23, 59, 30, 5)

    monkeypatch.setattr(job_input, "datetime", Calendar)
    return Calendar


def prompt_of_clock(output) -> str:
    """Return the answer of the row `clock`, which is a hash of its prompt."""
    (line,) = [line for line in output.read_text().splitlines() if '"custom_id":"clock"' in line]
    return json.loads(line)["response"]["body"]["choices"][0]["text"]


class Stops(FakeGenerator):
    """A generator that fails after some rows, like a lost device."""

    def step(self):
        if self.num_steps == 3:
            raise RuntimeError("lost")
        return super().step()


def test_a_job_resumed_on_another_day_shows_the_day_it_began(source, tmp_path, today):
    run(source, tmp_path / "whole.jsonl")
    with pytest.raises(JobError, match="lost"):
        run(source, tmp_path / "out.jsonl", FakeModel(Stops(num_slots=1)))
    today.day = 2
    run(source, tmp_path / "next.jsonl")
    run(source, tmp_path / "out.jsonl")
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "whole.jsonl")
    assert prompt_of_clock(tmp_path / "next.jsonl") != prompt_of_clock(tmp_path / "out.jsonl")
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["instant"] == "2026-03-01T23:59:30"


def test_a_job_that_is_complete_stays_complete_on_the_next_day(source, tmp_path, today):
    run(source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    today.day = 2
    model = FakeModel()
    assert run(source, tmp_path / "out.jsonl", model) == 0
    assert run(source, tmp_path / "out.jsonl", model, now=datetime(2026, 3, 1, 23, 59, 30)) == 0
    assert model.num_texts == 0 and (tmp_path / "out.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="exists and is not the finished output"):
        run(source, tmp_path / "out.jsonl", model, now=NOW)


def test_another_instant_than_that_of_the_journal_is_refused(source, tmp_path, today):
    output = tmp_path / "out.jsonl"
    with pytest.raises(JobError):
        run(source, output, FakeModel(Stops(num_slots=1)))
    with pytest.raises(JournalError, match=r"--now 2026-03-01T23:59:30.*got --now 2026-01-31T12"):
        run(source, output, now=NOW)
    assert run(source, output) == 0


def test_an_instant_that_no_prompt_shows_is_not_the_jobs(tmp_path, today):
    source = write_input(tmp_path / "in.jsonl")
    run(source, tmp_path / "out.jsonl", now=NOW)
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["instant"] is None
    model = FakeModel()
    run(source, tmp_path / "out.jsonl", model)
    run(source, tmp_path / "out.jsonl", model, now=datetime(2030, 1, 1))
    assert model.num_texts == 0


def test_parts_that_show_different_instants_are_not_merged(source, tmp_path, today):
    paths = [tmp_path / f"part{index}.jsonl" for index in range(2)]
    for index, path in enumerate(paths):
        today.day = 1 + index
        run(source, path, part=Part(index, 2))
    with pytest.raises(MergeError, match=r"instant: .*2026-03-01.*2026-03-02.*\n.*--now"):
        merge(paths, tmp_path / "out.jsonl")
    for index, path in enumerate(paths):
        run(source, path, part=Part(index, 2), now=NOW, restart=True)
    run(source, tmp_path / "whole.jsonl", now=NOW)
    assert merge(paths, tmp_path / "out.jsonl") == 0
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "whole.jsonl")


class Follower:
    """A process other than the leader, with the data that the leader shares."""

    size, rank, is_leader, setup, remote_signal = 2, 1, False, "2 processes", None

    def __init__(self, shared):
        self._shared = iter(shared)

    def broadcast(self, value):
        return next(self._shared)

    def agree(self, facts):
        raise JobError("far enough", 4)


def test_a_part_that_shows_the_time_names_the_option_for_the_other_parts(source, tmp_path, today):
    def said(name: str, rows: str = "0/2", **changes) -> str:
        job = settings(source, tmp_path / name, part=Part.parse(rows), **changes)
        stream = io.StringIO()
        run_job(job, FakeModel(), progress=Progress(stream=stream))
        return stream.getvalue()

    assert "run every part with --now 2026-03-01T23:59:30\n" in said("part.jsonl")
    assert "--now" not in said("whole.jsonl", "0/1") + said("given.jsonl", now=NOW)
    source.write_text(json.dumps(ROWS[1]))
    assert "--now" not in said("no_clock.jsonl")


def test_every_process_of_a_pod_shows_the_instant_of_the_leader(source, tmp_path, today):
    seen = []

    class Model(FakeModel):
        def open_text(self, now):
            seen.append(now)
            return super().open_text(now)

    with pytest.raises(JobError, match="far enough"):
        run_job(
            settings(source, tmp_path / "out.jsonl"),
            Model(),
            peers=Follower([None, "2026-01-31T12:00:00"]),
        )
    assert seen == [NOW]


def test_each_prompt_is_encoded_once_and_its_ids_leave_no_file(source, tmp_path):
    model = FakeModel()
    run(source, tmp_path / "out.jsonl", model)
    assert sorted(model.encoded) == sorted(row["id"] for row in ROWS)
    assert {path.name for path in tmp_path.iterdir()} <= {
        "in.jsonl", "out.jsonl", "out.jsonl.manifest.json", "out.jsonl.lock"
    }  # fmt: skip


def test_prompts_whose_ids_find_no_room_are_encoded_again(source, tmp_path, monkeypatch):
    run(source, tmp_path / "whole.jsonl", now=NOW)
    monkeypatch.setattr(job_input, "SHARE_OF_DISK", 0.0)
    model = FakeModel()
    run(source, tmp_path / "out.jsonl", model, now=NOW)
    assert sorted(model.encoded) == sorted(2 * [row["id"] for row in ROWS])
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "whole.jsonl")


def test_kept_ids_come_back_and_others_are_none(tmp_path):
    with closing(TokenSpill(tmp_path, max_bytes=4 * 300_003)) as kept:
        kept.keep(2, [0, 2**32 - 1])
        kept.keep(5, range(300_000))
        kept.keep(7, [1])
        kept.keep(8, [1])
        assert list(tmp_path.iterdir()) == []
        assert kept.ids_of(2, 2) == [0, 2**32 - 1]
        assert kept.ids_of(5, 300_000) == list(range(300_000))
        assert kept.ids_of(7, 1) == [1]
        assert [kept.ids_of(row, 1) for row in (0, 3, 8, 99)] == [None] * 4
        assert kept.num_dropped == 1


def test_a_disk_that_is_full_or_no_folder_keeps_nothing_and_harms_nothing(tmp_path, monkeypatch):
    with closing(TokenSpill(tmp_path / "nothing")) as kept:
        kept.keep(0, [1])
        assert (kept.ids_of(0, 1), kept.num_dropped) == (None, 1)

    class Full:
        def __init__(self, file):
            self.fileno, self.close = file.fileno, file.close

        def write(self, content):
            raise OSError(errno.ENOSPC, "full")

    opened = job_input.open_nameless
    monkeypatch.setattr(job_input, "open_nameless", lambda folder: Full(opened(folder)))
    with closing(TokenSpill(tmp_path)) as kept:
        kept.keep(0, [1])
        kept.keep(1, [2])
        assert (kept.ids_of(0, 1), kept.ids_of(1, 1), kept.num_dropped) == (None, None, 2)


def test_work_runs_some_items_ahead_in_order_and_fails_in_its_place():
    taken = []

    def items():
        for item in range(20):
            taken.append(item)
            yield item

    results = map_ahead(lambda item: 10 // (item - 10), items())
    assert next(results) == -1 and len(taken) == MAX_AHEAD + 1
    assert [next(results) for _ in range(9)] == [10 // (item - 10) for item in range(1, 10)]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_whoever_stops_taking_results_does_not_wait_for_the_work():
    goes_on = threading.Event()
    results = map_ahead(lambda item: item == 0 or goes_on.wait(60), range(9))
    assert next(results)
    results.close()
    goes_on.set()


@pytest.mark.parametrize("text", ["today", "2026-01-31T12:00:00Z", "2026-01-31T12:00:00.5"])
def test_an_instant_that_is_no_local_time_to_the_second_is_refused(text):
    assert read_instant("--now", "2026-01-31T12:00:00") == NOW
    with pytest.raises(ConfigError, match="--now: expected a local date and time such as"):
        read_instant("--now", text)
