"""Jobs that read standard input, and that write to standard output."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_model import FakeModel, masked, run, write_input
from faulty_disk import Crash, FaultyDisk

from noria.runtime.batch import pipes
from noria.runtime.batch.pipes import copy_path, output_for_stdout, write_to_stdout
from noria.runtime.errors import EXIT_RESUMABLE, JobError, UnusableFile
from noria.runtime.files.disk import Disk


@pytest.fixture
def piped(tmp_path, monkeypatch):
    """Run a job whose input comes from a pipe."""
    content = write_input(tmp_path / "in.jsonl").read_bytes()
    run(tmp_path / "in.jsonl", tmp_path / "whole.jsonl")

    def run_piped(output, *arguments, content=content, **changes):
        monkeypatch.setattr(pipes.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return run(copy_path(output), output, *arguments, reads_stdin=True, **changes)

    return run_piped


def test_a_piped_job_goes_on_after_every_stop_and_leaves_no_copy(tmp_path, piped):
    counter = FaultyDisk(0)
    piped(tmp_path / "count.jsonl", disk=counter)
    for at in range(1, counter.calls, counter.calls // 12):
        output = tmp_path / f"{at}.jsonl"
        with pytest.raises(Crash):
            piped(output, disk=FaultyDisk(at, Crash()))
        assert piped(output) == 1
        assert masked(output) == masked(tmp_path / "whole.jsonl")
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".input", ".journal")]
    manifest = json.loads((tmp_path / "count.jsonl.manifest.json").read_text())
    assert manifest["input"]["name"] == "stdin"
    model = FakeModel()
    assert piped(tmp_path / "count.jsonl", model) == 1
    assert not model.num_texts


def test_a_stopped_piped_job_goes_on_with_the_copy_of_its_input(tmp_path, piped):
    output = tmp_path / "out.jsonl"
    with pytest.raises(Crash):
        piped(output, disk=FaultyDisk(30, Crash()))
    assert run(copy_path(output), output) == 1
    assert masked(output) == masked(tmp_path / "whole.jsonl")


def test_another_input_does_not_replace_that_of_a_stopped_job(tmp_path, piped):
    output = tmp_path / "out.jsonl"
    with pytest.raises(Crash):
        piped(output, disk=FaultyDisk(30, Crash()))
    content = copy_path(output).read_bytes()
    journal = output.with_name("out.jsonl.journal").read_bytes()
    for other in (b"", content[:-1], content + b"{}", b"x" + content[1:]):
        with pytest.raises(UnusableFile, match=r"expected the input of the unfinished job"):
            piped(output, content=other)
        assert copy_path(output).read_bytes() == content
        assert output.with_name("out.jsonl.journal").read_bytes() == journal
    assert piped(output, content=b'{"prompt": "a"}', restart=True) == 0
    assert len(output.read_bytes().splitlines()) == 1


def test_a_refused_input_of_a_pipe_does_not_stand_in_the_way_of_the_next(tmp_path, piped):
    output = tmp_path / "out.jsonl"
    with pytest.raises(JobError):
        piped(output, FakeModel(failure=JobError("two jobs", 2)))
    assert piped(output, content=b'{"prompt": "a"}') == 0


def test_the_copy_of_a_job_that_can_be_resumed_stays_after_an_early_error(tmp_path, piped):
    output = tmp_path / "out.jsonl"
    with pytest.raises(JobError):
        piped(output, FakeModel(failure=JobError("the disk is full", EXIT_RESUMABLE)))
    assert run(copy_path(output), output) == 1
    assert masked(output) == masked(tmp_path / "whole.jsonl")


def test_a_file_with_the_name_of_the_copy_is_not_overwritten(tmp_path, piped):
    output = tmp_path / "out.jsonl"
    copy_path(output).write_text("precious")
    with pytest.raises(UnusableFile, match=r"got one without a journal. Run with -i"):
        piped(output)
    assert copy_path(output).read_text() == "precious"


def test_an_output_for_a_pipe_is_kept_until_it_was_written(tmp_path, monkeypatch):
    run(write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    content = (tmp_path / "out.jsonl").read_bytes()

    class Closed(io.BytesIO):
        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(pipes.sys, "stdout", SimpleNamespace(buffer=Closed()))
    with pytest.raises(JobError, match=r"The finished output is kept in .*out.jsonl"):
        write_to_stdout(tmp_path / "out.jsonl", Disk())
    pipe = io.BytesIO()
    monkeypatch.setattr(pipes.sys, "stdout", SimpleNamespace(buffer=pipe))
    write_to_stdout(tmp_path / "out.jsonl", Disk())
    assert pipe.getvalue() == content
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_jobs_for_standard_output_have_the_same_file_only_if_all_their_names_are_equal():
    def name(source="in.jsonl", rows="0/1", pipeline=None, dtype="auto"):
        return output_for_stdout(Path(source), rows, pipeline, {"dtype": dtype})

    assert name() == name() == name(str(Path("in.jsonl").absolute()))
    others = [
        name("other.jsonl"),
        name("-"),
        name(rows="0/2"),
        name(rows="1/2"),
        name(pipeline=Path("p.toml")),
        name(dtype="float32"),
    ]
    assert len({name(), *others}) == 1 + len(others)
