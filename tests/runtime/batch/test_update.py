"""A finished job whose input changes runs the rows that are new or changed, and no others."""

import json

import fake_model
import pytest
from fake_model import FakeModel, masked, run
from faulty_disk import Crash, FaultyDisk

from noria.runtime.errors import UnusableFile

ROWS = [{"id": f"q{i}", "prompt": f"prompt {i}", "seed": 1} for i in range(20)]
EDITED = [
    {"id": "new", "prompt": "a new row"},
    *ROWS[10:],
    {**ROWS[0], "prompt": "changed"},
    {"id": "long", "prompt": "x" * 600},
]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read_manifest(output):
    return json.loads(output.with_name(f"{output.name}.manifest.json").read_text())


@pytest.fixture
def finished(tmp_path):
    """A function that finishes a job under a name and then changes its input."""

    def finish(name):
        source, output = tmp_path / f"{name}.in", tmp_path / name
        assert run(write(source, ROWS), output) == 0
        write(source, EDITED)
        return source, output

    return finish


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.parquet"])
def test_only_rows_that_are_new_or_changed_run_on_the_stored_plan(finished, name):
    source, output = finished(name)
    plan = read_manifest(output)["plan"]
    with pytest.raises(UnusableFile, match="keep the answers of equal rows with --update"):
        run(source, output)
    model = FakeModel()
    assert run(source, output, model, updates=True) == 1
    assert sorted(model.generator.submitted) == ["new", "q0"]
    assert model.stored_plans == [plan]
    manifest = read_manifest(output)
    assert manifest["rows"]["kept_from_earlier_runs"] == 10
    assert manifest["rows"]["errors_by_code"] == {"context_length_exceeded": 1}
    assert manifest["plan"] == plan
    tokens = sum(len(row["prompt"]) for row in EDITED[:-1])
    assert manifest["prompt_tokens"] == tokens
    # the finished update is a finished job, with or without the option
    for updates in (False, True):
        again = FakeModel()
        assert run(source, output, again, updates=updates) == 1
        assert not again.num_texts


def test_an_update_is_the_job_of_the_new_input_after_every_stop(finished, tmp_path):
    source, output = finished("whole.jsonl")
    counter = FaultyDisk(0)
    run(source, output, updates=True, disk=counter)
    run(source, tmp_path / "fresh.jsonl")
    assert masked(output) == masked(tmp_path / "fresh.jsonl")
    for at in range(1, counter.calls + 1, 4):
        source, output = finished(f"{at}.jsonl")
        with pytest.raises(Crash):
            run(source, output, updates=True, disk=FaultyDisk(at, Crash()))
        assert run(source, output, updates=True) == 1
        assert masked(output) == masked(tmp_path / "fresh.jsonl")


def test_an_update_counts_kept_rows_that_ended_at_the_length_of_the_plan(tmp_path, monkeypatch):
    def cut(request):
        output = answer(request)
        output.outputs[0].finish_reason = "length"
        return output

    answer = fake_model.answer
    monkeypatch.setattr(fake_model, "answer", cut)
    rows = [ROWS[0], ROWS[1], {**ROWS[2], "max_tokens": 5}]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    run(write(source, rows), output)
    assert read_manifest(output)["rows"]["ok_at_max_length"] == 2
    run(write(source, [*rows, ROWS[3]]), output, updates=True)
    assert read_manifest(output)["rows"]["ok_at_max_length"] == 3


def test_an_output_that_changed_or_of_another_configuration_is_not_updated(finished):
    source, output = finished("out.jsonl")
    with pytest.raises(UnusableFile, match=r"dtype: there float32, now bfloat16\n"):
        run(source, output, updates=True, configuration={"model": "fake", "dtype": "bfloat16"})
    output.write_bytes(output.read_bytes() + b"\n")
    with pytest.raises(UnusableFile, match="changed since"):
        run(source, output, updates=True)
