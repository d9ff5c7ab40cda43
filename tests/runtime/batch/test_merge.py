"""Merging parts: the whole job's output, and refusal of files that are not its parts."""

import errno
import io
import json
import os
from pathlib import Path

import pytest
from fake_model import FakeModel, masked, run, settings, write_input
from faulty_disk import Crash, FaultyDisk

from noria.runtime.batch import lock as locks
from noria.runtime.batch.merge import merge as merge_parts
from noria.runtime.batch.run import run_job
from noria.runtime.errors import JobError, MergeError, OutputIsLocked, UnusableFile
from noria.runtime.files.disk import Disk
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.part import Part


def merge(paths, output, **options):
    return merge_parts(paths, output, progress=Progress(is_quiet=True), **options)


def run_parts(source: Path, of: int, folder: Path, **changes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"part{index}.jsonl" for index in range(of)]
    for index, path in enumerate(paths):
        run(source, path, part=Part(index, of), **changes)
    return paths


@pytest.fixture
def source(tmp_path):
    return write_input(tmp_path / "in.jsonl")


@pytest.fixture
def parts(source, tmp_path):
    return run_parts(source, 3, tmp_path / "parts")


def manifest_of(output: Path) -> dict:
    return json.loads(manifest_path(output).read_text())


def manifest_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.manifest.json")


def edit_manifest(output: Path, **changes) -> None:
    manifest_path(output).write_text(json.dumps({**manifest_of(output), **changes}))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("of", [1, 2, 3, 7, 50])
def test_the_parts_of_a_job_are_its_output_in_whatever_order_they_come(source, tmp_path, of):
    run(source, tmp_path / "whole.jsonl")
    paths = run_parts(source, of, tmp_path / "parts")
    assert merge(paths[::-1], tmp_path / "out.jsonl") == 1
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "whole.jsonl")


def test_the_manifest_is_the_whole_jobs_with_every_part_accounted_for(source, parts, tmp_path):
    run(source, tmp_path / "whole.jsonl")
    merge(parts, tmp_path / "out.jsonl")
    whole, merged = manifest_of(tmp_path / "whole.jsonl"), manifest_of(tmp_path / "out.jsonl")
    same = ("configuration", "fingerprint", "input", "model", "plan", "rows", "versions")
    assert {key: merged[key] for key in same} == {key: whole[key] for key in same}
    assert merged["output_tokens"] == whole["output_tokens"]
    assert [part["part"] for part in merged["parts"]] == [f"part {i} of 3" for i in range(3)]
    assert sum(part["rows"]["total"] for part in merged["parts"]) == merged["rows"]["total"] == 45
    assert all(part["run_seconds"] >= 0 for part in merged["parts"])


def test_a_merged_output_is_complete_to_the_batch_command(source, parts, tmp_path):
    merge(parts, tmp_path / "out.jsonl")
    model = FakeModel()
    assert run(source, tmp_path / "out.jsonl", model) == 1
    assert model.num_texts == 0


def test_merging_again_does_nothing(parts, tmp_path):
    assert merge(parts, tmp_path / "out.jsonl") == 1
    before = contents(tmp_path)
    assert set(before) == {"in.jsonl", "out.jsonl", "out.jsonl.manifest.json"}
    assert merge(parts, tmp_path / "out.jsonl") == 1
    assert contents(tmp_path) == before


def test_parts_without_errors_are_exit_code_0(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "hello"}\n' * 5)
    paths = run_parts(tmp_path / "in.jsonl", 2, tmp_path / "parts")
    assert merge(paths, tmp_path / "out.jsonl") == 0


def test_an_error_file_takes_the_error_rows_out_as_in_the_whole_job(source, parts, tmp_path):
    run(source, tmp_path / "whole.jsonl", error_file=tmp_path / "whole.err.jsonl")
    merge(parts, tmp_path / "out.jsonl", error_file=tmp_path / "err.jsonl")
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "whole.jsonl")
    assert masked(tmp_path / "err.jsonl") == masked(tmp_path / "whole.err.jsonl")


def test_parts_may_be_renamed_and_moved(source, parts, tmp_path):
    moved = []
    for index, path in enumerate(parts):
        folder = tmp_path / f"host{index}"
        folder.mkdir()
        moved.append(path.rename(folder / "out.jsonl"))
        manifest_path(path).rename(manifest_path(moved[-1]))
    merge(moved, tmp_path / "out.jsonl")
    run(source, tmp_path / "whole.jsonl")
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "whole.jsonl")


def test_a_part_that_had_nothing_to_run_has_no_plan_and_fits_all_the_same(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n{broken\n{"prompt": "y"}\n')
    paths = run_parts(tmp_path / "in.jsonl", 2, tmp_path / "parts")
    assert manifest_of(paths[1])["plan"] is None
    merge(paths[::-1], tmp_path / "out.jsonl")
    assert manifest_of(tmp_path / "out.jsonl")["plan"] == manifest_of(paths[0])["plan"]


def test_an_empty_input_merges_to_an_empty_output(tmp_path):
    (tmp_path / "in.jsonl").write_text("\n\n")
    paths = run_parts(tmp_path / "in.jsonl", 2, tmp_path / "parts")
    assert merge(paths, tmp_path / "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_missing_part_is_refused(parts, tmp_path):
    message = r"expected all 3 parts of the job, got 1\. Missing: 0/3, 2/3\. Finish them"
    with pytest.raises(MergeError, match=message):
        merge(parts[1:2], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_part_given_twice_is_refused(parts, tmp_path):
    message = r"part 1 of 3: expected once, got .*part1.jsonl and .*part1.jsonl\. Give each part"
    with pytest.raises(MergeError, match=message):
        merge([*parts, parts[1]], tmp_path / "out.jsonl")


def test_parts_of_different_jobs_are_refused_with_every_difference(source, parts, tmp_path):
    other = write_input(tmp_path / "other.jsonl", num_rows=41)
    configuration = {"model": "fake", "dtype": "bfloat16"}
    (_, one, _) = run_parts(other, 3, tmp_path / "others", configuration=configuration)
    versions = {**manifest_of(one)["versions"], "noria": "9.9"}
    plan = manifest_of(one)["plan"].replace("max_length = ", "max_length = 1")
    edit_manifest(one, versions=versions, plan=plan, model="fuke")
    with pytest.raises(MergeError) as caught:
        merge([parts[0], one, parts[2]], tmp_path / "out.jsonl")
    message = str(caught.value)
    assert message.startswith("parts: expected parts of one job, got parts of different jobs:\n")
    assert message.endswith("of the others (if the instant differs, with --now).")
    lines = message.split("\n")[1:-1]
    assert [line.split(":")[0].strip() for line in lines] == [
        "configuration.dtype", "input.bytes", "input.rows", "input.sha256", "model",
        "versions.noria", "plan.max_length",
    ]  # fmt: skip
    assert lines[0] == f"  configuration.dtype: {parts[0]} float32, {one} bfloat16"


def test_parts_of_different_splits_are_refused(source, parts, tmp_path):
    halves = run_parts(source, 2, tmp_path / "halves")
    with pytest.raises(MergeError, match=r"configuration.rows: .*part0.jsonl 3 parts, .* 2 parts"):
        merge([parts[0], halves[1]], tmp_path / "out.jsonl")


def test_a_part_that_is_not_finished_is_refused(source, parts, tmp_path):
    with pytest.raises(Crash):
        run(source, tmp_path / "stopped.jsonl", part=Part(0, 3), disk=FaultyDisk(12, Crash()))
    message = r"expected a finished part with its manifest.*got no stopped.jsonl\. .*finish"
    with pytest.raises(MergeError, match=message):
        merge([tmp_path / "stopped.jsonl", *parts[1:]], tmp_path / "out.jsonl")
    manifest_path(parts[0]).unlink()
    with pytest.raises(MergeError, match=r"got no part0.jsonl.manifest.json\. Copy both"):
        merge(parts, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    "spoil",
    [lambda c: c[:-9], lambda c: c + b"{}\n", lambda c: b"", lambda c: c.replace(b"q", b"Q", 1)],
    ids=["cut", "longer", "empty", "edited"],
)
def test_a_part_that_is_not_what_its_manifest_describes_is_refused(parts, tmp_path, spoil):
    parts[1].write_bytes(spoil(parts[1].read_bytes()))
    message = r"part1.jsonl: expected the 15 lines, \d+ bytes and sha256 \w+ that.*Copy it again"
    with pytest.raises(MergeError, match=message):
        merge(parts, tmp_path / "out.jsonl")
    assert set(contents(tmp_path)) == {"in.jsonl"}


def test_a_part_with_another_number_of_rows_than_its_share_is_refused(parts, tmp_path):
    for path in parts:
        edit_manifest(path, input={**manifest_of(path)["input"], "rows": 48})
    with pytest.raises(MergeError, match=r"expected the 16 lines, .* got 15, "):
        merge(parts, tmp_path / "out.jsonl")


def test_a_part_that_is_replaced_after_the_check_is_copied_as_it_was_checked(
    source, parts, tmp_path
):
    class DiskOfTwo(Disk):
        def open_new(self, path):
            (tmp_path / "new").write_bytes(b"{}\n" * 15)
            os.replace(tmp_path / "new", parts[1])
            return super().open_new(path)

    merge(parts, tmp_path / "out.jsonl", disk=DiskOfTwo())
    run(source, tmp_path / "whole.jsonl")
    assert masked(tmp_path / "out.jsonl") == masked(tmp_path / "whole.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 7}, "expected a manifest of schema 2 that states its part.*got schema 7"),
        ({"configuration": {}}, "got schema 2 and rows None. Merge with the version"),
        ({"configuration": []}, "got schema 2 and rows None. Merge with the version"),
        ({"configuration": {"rows": "3 of 2"}}, r"manifest.json: .*rows: expected i/n .* Copy the"),
        ({"configuration": {"rows": 5}}, "rows: expected i/n with 0 <= i < n, got '5'"),
        ({"rows": 5}, "manifest.json: expected rows, as every finished job writes it, got 5"),
        ({"outputs": []}, "expected outputs, as every finished job writes it, got "),
    ],
)
def test_a_manifest_that_states_no_part_is_refused(parts, tmp_path, changes, message):
    edit_manifest(parts[0], **changes)
    with pytest.raises(MergeError, match=message):
        merge(parts, tmp_path / "out.jsonl")


def test_a_job_with_an_error_file_of_its_own_is_refused(source, tmp_path):
    run(source, tmp_path / "whole.jsonl", error_file=tmp_path / "err.jsonl")
    message = r"expected error rows in their places, got .*\(err.jsonl, whole.jsonl\)\. Run the"
    with pytest.raises(MergeError, match=message):
        merge([tmp_path / "whole.jsonl"], tmp_path / "out.jsonl")


def test_an_output_that_is_something_else_is_not_replaced(parts, tmp_path):
    for name in ("out.jsonl", "err.jsonl"):
        (tmp_path / name).write_text("precious")
        message = rf"{name}: exists and differs from the merge of these parts\. Choose another"
        with pytest.raises(MergeError, match=message):
            merge(parts, tmp_path / "out.jsonl", error_file=tmp_path / "err.jsonl")
        assert (tmp_path / name).read_text() == "precious"
        (tmp_path / name).unlink()
    assert set(contents(tmp_path)) == {"in.jsonl"}


def test_the_output_of_an_unfinished_job_is_left_to_it(source, parts, tmp_path):
    with pytest.raises(Crash):
        run(source, tmp_path / "out.jsonl", disk=FaultyDisk(12, Crash()))
    with pytest.raises(
        MergeError, match=r"without an unfinished job, got out.jsonl.journal .*Finish"
    ):
        merge(parts, tmp_path / "out.jsonl")


def test_outputs_that_cannot_work_are_refused_by_name(parts, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(parts[2])
    before = contents(tmp_path / "parts")
    cases = [
        (parts[1], None, "part1.jsonl: is a part too. Choose another output"),
        (tmp_path / "link.jsonl", None, "is a part too"),
        (tmp_path / "out.jsonl", parts[0], "is a part too"),
        (tmp_path / "out.jsonl", tmp_path / "out.jsonl", "is the error file too"),
        (tmp_path / "none" / "out.jsonl", None, "expected its directory to exist"),
        (tmp_path, None, "expected a file to write, got a directory"),
    ]
    for output, error_file, message in cases:
        with pytest.raises(UnusableFile, match=message):
            merge(parts, output, error_file=error_file)
    assert contents(tmp_path / "parts") == before


def test_an_output_that_another_host_writes_is_refused(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "QUIET_SECONDS", 0.2)
    lock = {"pid": 1, "host": "elsewhere", "token": "a", "beat": 1}

    def beat(note):
        (tmp_path / "out.jsonl.lock").write_text(json.dumps(lock | {"beat": 2}))

    (tmp_path / "out.jsonl.lock").write_text(json.dumps(lock))
    progress = Progress(is_quiet=True)
    progress.warn = beat
    with pytest.raises(OutputIsLocked, match="elsewhere"):
        merge_parts(parts, tmp_path / "out.jsonl", progress=progress)


def test_a_crash_at_any_disk_operation_changes_nothing_in_the_end(parts, tmp_path):
    def merge_into(folder, disk=None):
        folder.mkdir(exist_ok=True)
        return merge(parts, folder / "out.jsonl", error_file=folder / "err.jsonl", disk=disk)

    counter = FaultyDisk(0)
    merge_into(tmp_path / "count", counter)
    expected = {name: content for name, (_, content) in contents(tmp_path / "count").items()}
    for at in range(1, counter.calls + 1):
        folder = tmp_path / f"at{at}"
        with pytest.raises(Crash):
            merge_into(folder, FaultyDisk(at, Crash(), tear=at % 2 == 0))
        assert merge_into(folder) == 1
        found = {name: content for name, (_, content) in contents(folder).items()}
        assert found == expected, f"after a crash at operation {at}"


def test_a_full_disk_is_a_clear_error_and_the_same_command_finishes(parts, tmp_path):
    full = FaultyDisk(9, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    message = r"out.jsonl: cannot be written \(No space left.*run the same command again"
    with pytest.raises(JobError, match=message) as caught:
        merge(parts, tmp_path / "out.jsonl", disk=full)
    assert caught.value.exit_code == 75
    assert merge(parts, tmp_path / "out.jsonl") == 1


def test_ignored_keys_are_said_once_and_counted_over_the_parts(tmp_path):
    source, said = tmp_path / "in.jsonl", io.StringIO()
    rows = [{"prompt": f"p{i}", "label": i} | ({} if i % 4 else {"split": 1}) for i in range(9)]
    source.write_text("\n".join(map(json.dumps, rows)))
    parts = run_parts(source, 2, tmp_path / "parts", ignores_unknown=True)
    assert manifest_of(parts[0])["ignored_keys"] == {"label": 5, "split": 3}
    assert merge(parts, tmp_path / "out.jsonl") == 0
    assert manifest_of(tmp_path / "out.jsonl")["ignored_keys"] == {"label": 9, "split": 3}
    job = settings(source, tmp_path / "whole.jsonl", ignores_unknown=True)
    assert run_job(job, FakeModel(), progress=Progress(stream=said)) == 0
    note = "ignored keys that noria does not know: 'label' in 9 rows, 'split' in 3 rows\n"
    assert said.getvalue().count(note) == 1
