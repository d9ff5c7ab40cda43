"""One part of a job: its rows, its output and its manifest."""

import json

import pytest
from fake_model import FakeModel, masked, run, settings, write_input
from faulty_disk import Crash, FaultyDisk
from hypothesis import given
from hypothesis import strategies as st

from noria.runtime.errors import JournalError, UnusableFile
from noria.runtime.rows.part import WHOLE, Part


@given(of=st.integers(1, 60), num_rows=st.integers(0, 300))
def test_every_row_is_in_exactly_one_part(of, num_rows):
    parts = [Part(index, of) for index in range(of)]
    held = [part.take(range(num_rows)) for part in parts]
    assert sorted(row for rows in held for row in rows) == list(range(num_rows))
    assert [len(rows) for rows in held] == [part.count(num_rows) for part in parts]
    assert max(map(len, held)) - min(map(len, held)) <= 1


@given(of=st.integers(1, 60), data=st.data())
def test_a_part_reads_back_as_it_was_written(of, data):
    part = Part(data.draw(st.integers(0, of - 1)), of)
    assert Part.parse(f"{part.index}/{part.num_parts}") == part
    assert Part.from_manifest(str(part)) == part


def test_the_whole_job_is_part_0_of_1():
    assert Part.parse("0/1") == WHOLE
    assert WHOLE.take([5, 6, 7]) == [5, 6, 7]


@pytest.mark.parametrize(
    "text", ["3/3", "0/0", "-1/3", "1", "1/", "1/3/5", " 1/3", "a/b", "", "٣/٤"]
)
def test_a_split_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"rows: expected i/n with 0 <= i < n, got '.*'\. Write 0"):
        Part.parse(text)


def test_error_rows_belong_to_one_part_and_duplicates_are_found_across_parts(tmp_path):
    source = write_input(tmp_path / "in.jsonl")
    run(source, tmp_path / "whole.jsonl")
    whole = masked(tmp_path / "whole.jsonl").split(b"\n")
    for index in range(2):
        output = tmp_path / f"{index}.jsonl"
        assert run(source, output, part=Part(index, 2)) == 1
        assert masked(output).split(b"\n") == whole[index::2]
    # the first q1 is row 1, the second row 4: neither part holds both
    duplicate = json.loads((tmp_path / "0.jsonl").read_text().split("\n")[2])
    assert duplicate["error"]["code"] == "duplicate_custom_id"


def test_the_manifest_states_the_part_and_the_whole_input(tmp_path):
    source = write_input(tmp_path / "in.jsonl")
    run(source, tmp_path / "out.jsonl", part=Part(1, 4))
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["configuration"]["rows"] == "part 1 of 4"
    assert manifest["rows"]["total"] == 11
    assert manifest["input"]["rows"] == 45


def test_the_plan_of_every_part_is_that_of_the_whole_job(tmp_path):
    source = write_input(tmp_path / "in.jsonl")
    plans = set()
    for part in (WHOLE, Part(0, 40), Part(39, 40)):
        output = tmp_path / f"{part}.jsonl"
        run(source, output, part=part)
        plans.add(json.loads((tmp_path / f"{part}.jsonl.manifest.json").read_text())["plan"])
    assert len(plans) == 1 and None not in plans


def test_a_part_without_rows_is_finished_at_once(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    model = FakeModel()
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model, part=Part(1, 2)) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b"" and model.num_builds == 0


def test_a_part_that_was_stopped_goes_on(tmp_path):
    source, part = write_input(tmp_path / "in.jsonl"), Part(1, 2)
    run(source, tmp_path / "reference.jsonl", part=part)
    with pytest.raises(Crash):
        run(source, tmp_path / "out.jsonl", part=part, disk=FaultyDisk(19, Crash()))
    model = FakeModel()
    run(source, tmp_path / "out.jsonl", model, part=part)
    assert 0 < len(model.generator.submitted) < 20
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "reference.jsonl")


def test_going_on_with_another_split_is_refused(tmp_path):
    source, output = write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with pytest.raises(Crash):
        run(source, output, part=Part(0, 2), disk=FaultyDisk(19, Crash()))
    with pytest.raises(JournalError, match=r"rows: there part 0 of 2, now part 1 of 2[\s\S]*--res"):
        run(source, output, part=Part(1, 2))
    run(source, output, part=Part(0, 2))
    with pytest.raises(UnusableFile, match="exists and is not the finished output"):
        run(source, output)


def test_an_error_file_beside_a_part_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"error_file: expected none.*got .*err.*noria merge"):
        settings("in.jsonl", "out.jsonl", part=Part(0, 2), error_file=tmp_path / "err.jsonl")
