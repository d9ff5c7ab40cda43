"""The same weights answer all of a job's rows, whatever the name of their folder."""

import json
from pathlib import Path

import pytest
from fake_model import FakeModel, masked, run, write_input
from faulty_disk import Crash, FaultyDisk
from file_identity import identity

from noria.runtime.batch.merge import merge
from noria.runtime.errors import EXIT_MODEL, JobError, MergeError
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.part import Part

OTHER = "sha256:other"


def manifest_of(output: Path) -> dict:
    return json.loads(output.with_name(f"{output.name}.manifest.json").read_text())


def stop_in_the_middle(source: Path, output: Path, **changes) -> None:
    """Run a job in part, so that its journal has some rows."""
    with pytest.raises(Crash):
        run(source, output, disk=FaultyDisk(30, Crash()), **changes)
    journal = output.with_name(f"{output.name}.journal").read_bytes()
    assert 0 < journal.count(b'"kind":"row"') < 40


def without_runs(journal: Path) -> list[bytes]:
    """The records of a journal without those of its runs, of which every attempt has some."""
    return [line for line in journal.read_bytes().splitlines() if b'{"kind":"run"' not in line]


@pytest.fixture
def source(tmp_path) -> Path:
    return write_input(tmp_path / "in.jsonl")


def test_a_finished_job_is_not_that_of_other_weights(tmp_path, source):
    output = tmp_path / "out.jsonl"
    run(source, output)
    assert manifest_of(output)["weights"] == "sha256:fake"
    before, model = identity(output), FakeModel(digest=OTHER)
    with pytest.raises(
        JobError, match=r"there sha256:fake, now sha256:other\n.*--restart"
    ) as caught:
        run(source, output, model)
    assert caught.value.exit_code == EXIT_MODEL
    assert model.num_builds == 0 and identity(output) == before
    assert run(source, output, model, restart=True) == 1
    assert manifest_of(output)["weights"] == OTHER


def test_a_journal_is_not_continued_with_other_weights(tmp_path, source):
    output = tmp_path / "out.jsonl"
    stop_in_the_middle(source, output)
    journal = output.with_name("out.jsonl.journal")
    before, model = without_runs(journal), FakeModel(digest=OTHER)
    with pytest.raises(JobError, match=r"there sha256:fake, now sha256:other\n.*original weights"):
        run(source, output, model)
    assert not model.generator.submitted and without_runs(journal) == before
    assert run(source, output) == 1
    assert manifest_of(output)["weights"] == "sha256:fake"


def test_a_journal_whose_rows_are_all_there_is_not_finished_for_other_weights(tmp_path, source):
    output = tmp_path / "out.jsonl"
    counter = FaultyDisk(0)
    run(source, tmp_path / "whole.jsonl", disk=counter)
    # the operations after the last row write the output and its manifest
    with pytest.raises(Crash):
        run(source, output, disk=FaultyDisk(counter.calls - 6, Crash()))
    model = FakeModel(digest=OTHER)
    with pytest.raises(JobError, match="there sha256:fake, now sha256:other"):
        run(source, output, model)
    assert model.num_builds == 0
    assert run(source, output) == 1
    assert masked(output) == masked(tmp_path / "whole.jsonl")


def test_other_weights_than_expected_answer_no_row(tmp_path, source):
    output = tmp_path / "out.jsonl"
    model = FakeModel(digest=OTHER)
    message = "--expect-weights: expected weights with the digest sha256:fake, got sha256:other"
    with pytest.raises(JobError, match=message) as caught:
        run(source, output, model, expected_weights="sha256:fake")
    assert caught.value.exit_code == EXIT_MODEL and not model.generator.submitted
    assert not output.exists()
    # a job without answered rows does not fix the weights
    assert run(source, output, expected_weights="sha256:fake") == 1
    with pytest.raises(JobError, match="--expect-weights"):
        run(source, output, expected_weights=OTHER)


def test_a_job_without_a_row_to_run_is_of_no_weights(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{broken\n")
    assert run(source, output) == 1
    assert manifest_of(output)["weights"] is None
    assert run(source, output, FakeModel(digest=OTHER)) == 1


def test_a_renamed_model_goes_on_under_the_name_that_the_job_began_with(tmp_path, source):
    """The input names no model, so output lines have the folder's name."""
    output = tmp_path / "out.jsonl"
    run(source, tmp_path / "whole.jsonl", name="first")
    stop_in_the_middle(source, output, name="first")
    assert run(source, output, name="second") == 1
    assert masked(output) == masked(tmp_path / "whole.jsonl")
    assert b'"model":"first"' in output.read_bytes()
    assert manifest_of(output)["model"] == "first"
    model = FakeModel()
    assert run(source, output, model, name="third") == 1
    assert model.num_texts == 0, "it is complete"


def test_parts_of_other_weights_are_not_merged(tmp_path, source):
    parts = [tmp_path / f"part{index}.jsonl" for index in range(2)]
    for index, (part, digest) in enumerate(zip(parts, ("sha256:fake", OTHER), strict=True)):
        run(source, part, FakeModel(digest=digest), part=Part(index, 2))
    quiet = Progress(is_quiet=True)
    with pytest.raises(MergeError, match=r"weights: .*part0.jsonl sha256:fake, .* sha256:other"):
        merge(parts, tmp_path / "out.jsonl", progress=quiet)
    run(source, parts[1], part=Part(1, 2), restart=True)
    assert merge(parts, tmp_path / "out.jsonl", progress=quiet) == 1
    assert manifest_of(tmp_path / "out.jsonl")["weights"] == "sha256:fake"
