"""A job never writes its inputs, never writes a file twice, and never writes through a link."""

import os
from pathlib import Path

import pytest
from fake_model import FakeModel, run, write_input

from noria.runtime.batch.job_files import OutputFiles
from noria.runtime.batch.merge import merge
from noria.runtime.errors import UnusableFile
from noria.runtime.files import file_checks
from noria.runtime.files.disk import Disk, replace_file
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.part import Part

SIDES = ("manifest.json", "journal", "lock")
SIDE_NAMES = [f"out.jsonl.{side}" for side in SIDES]
WRITTEN = ["out.jsonl", *SIDE_NAMES]
TEMPORARY = [f"{name}.tmp" for name in WRITTEN]


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return every name in a folder with its content, or with the target of a link."""
    return {
        path.name: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.iterdir()
        if path.is_symlink() or path.is_file()
    }


def refused(folder: Path, message: str, action) -> None:
    """Check that an action is refused, and that no file in the folder is made, changed or lost."""
    before = contents(folder)
    with pytest.raises(UnusableFile, match=message):
        action()
    assert contents(folder) == before


@pytest.fixture
def source(tmp_path):
    return write_input(tmp_path / "in.jsonl", num_rows=4)


def test_these_are_all_the_files_that_a_job_writes(source, tmp_path, monkeypatch):
    seen: set[str] = set()

    class WatchedDisk(Disk):
        def write(self, descriptor, content):
            seen.update(path.name for path in tmp_path.iterdir())
            super().write(descriptor, content)

    run(source, tmp_path / "out.jsonl", disk=WatchedDisk())
    assert seen <= {"in.jsonl", *WRITTEN, *TEMPORARY}
    assert [
        path.name for path in OutputFiles(tmp_path / "out.jsonl").side_files.values()
    ] == SIDE_NAMES


def test_an_error_file_has_another_name_than_the_output_in_another_folder(source, tmp_path):
    (tmp_path / "errors").mkdir()
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors" / "out.jsonl"
    message = "file names of the output and the error file that differ, .* got out.jsonl in"
    refused(tmp_path, message, lambda: run(source, output, error_file=errors))
    part = tmp_path / "part.jsonl"
    run(source, part, part=Part(0, 1))
    progress = Progress(is_quiet=True)
    refused(tmp_path, message, lambda: merge([part], output, error_file=errors, progress=progress))


@pytest.mark.parametrize("name", [*WRITTEN, *TEMPORARY])
def test_an_error_file_is_no_other_file_of_the_job(source, tmp_path, name):
    (tmp_path / "link.jsonl").symlink_to(name)
    for error_file in (tmp_path / name, tmp_path / "link.jsonl"):
        refused(
            tmp_path,
            "the error file",
            lambda path=error_file: run(source, tmp_path / "out.jsonl", error_file=path),
        )
    part = tmp_path / "part.jsonl"
    run(source, part, part=Part(0, 1))
    quiet = Progress(is_quiet=True)
    refused(
        tmp_path,
        "the error file",
        lambda: merge([part], tmp_path / "out.jsonl", error_file=tmp_path / name, progress=quiet),
    )


def test_names_that_differ_in_case_alone_are_one_file_for_some_disks(source, tmp_path):
    upper = tmp_path / "OUT.jsonl"
    refused(
        tmp_path,
        "Choose two files",
        lambda: run(source, tmp_path / "out.jsonl", error_file=upper),
    )


@pytest.mark.parametrize("name", [*WRITTEN, *TEMPORARY])
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_an_input_is_never_written_whatever_its_name(source, tmp_path, name, link):
    if link is None:
        os.rename(source, tmp_path / name)
        read = tmp_path / name
    else:
        link(source, tmp_path / name)
        read = source
    refused(tmp_path, "is the input too", lambda: run(read, tmp_path / "out.jsonl"))
    sources = [("the plan", read)]
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    refused(
        tmp_path,
        "is the plan too",
        lambda: run(tmp_path / "other.jsonl", tmp_path / "out.jsonl", also_read=sources),
    )


def test_nothing_is_written_into_a_folder_that_is_read_nor_over_what_it_links_to(source, tmp_path):
    model, store = tmp_path / "model", tmp_path / "store"
    (model / "params").mkdir(parents=True)
    store.mkdir()
    (store / "a.jsonl.lock").write_text("{}")
    (store / "b.jsonl").write_text("weights")
    (model / "config.json").symlink_to(store / "a.jsonl.lock")
    os.link(store / "b.jsonl", model / "params" / "b")
    (tmp_path / "alias").symlink_to(model)
    for output in (
        model / "config.json",
        model / "new.jsonl",
        tmp_path / "alias" / "new.jsonl",
        store / "a.jsonl",
        store / "b.jsonl",
    ):
        with pytest.raises(UnusableFile, match="is the model too"):
            run(source, output, restart=True, also_read=[("the model", model)])
    assert contents(store) == {"a.jsonl.lock": b"{}", "b.jsonl": b"weights"}
    assert set(contents(model)) == {"config.json"}
    assert run(source, tmp_path / "out.jsonl", also_read=[("the model", model)]) == 1


@pytest.mark.parametrize("name", [*TEMPORARY[:2], "manifest.json.tmp", "part.jsonl.manifest.json"])
def test_a_part_and_its_manifest_are_never_written(source, tmp_path, name):
    part = tmp_path / "part.jsonl"
    run(source, part, part=Part(0, 1))
    output = tmp_path / "out.jsonl"
    if name.endswith(".tmp"):
        (tmp_path / name).unlink(missing_ok=True)
        os.link(tmp_path / "part.jsonl.manifest.json", output)
    else:
        output = tmp_path / name
    quiet = Progress(is_quiet=True)
    refused(
        tmp_path, "is the manifest of a part too", lambda: merge([part], output, progress=quiet)
    )


@pytest.mark.parametrize("name", [*WRITTEN, *TEMPORARY])
@pytest.mark.parametrize("restart", [False, True])
def test_nothing_is_written_through_a_link(source, tmp_path, name, restart):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for target in (precious, tmp_path / "nothing"):
        (tmp_path / name).symlink_to(target)
        refused(
            tmp_path,
            f"{name}: .*got a link to {target}; nothing is written through links. Move it",
            lambda: run(source, tmp_path / "out.jsonl", restart=restart),
        )
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", SIDE_NAMES)
def test_a_pipe_in_the_place_of_a_side_file_is_refused_without_waiting(source, tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UnusableFile, match=f"{name}: expected a file to write, got a pipe"):
        run(source, tmp_path / "out.jsonl")
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UnusableFile, match=f"{name}: expected a file to write, got a directory"):
        run(source, tmp_path / "out.jsonl")


@pytest.mark.parametrize("name", ["out.jsonl.journal", "out.jsonl.lock"])
def test_what_comes_in_the_place_of_a_side_file_after_the_check_is_not_written(
    source, tmp_path, name, monkeypatch
):
    """The system checks again when the file is opened."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    monkeypatch.setattr(file_checks, "check_replaceable", lambda path: None)
    for link in (os.symlink, os.link):
        link(precious, tmp_path / name)
        refused(tmp_path, name, lambda: run(source, tmp_path / "out.jsonl"))
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["out.jsonl.lock", "out.jsonl.tmp"])
def test_a_file_of_somebody_else_under_a_side_name_is_kept(source, tmp_path, name):
    (tmp_path / name).write_text("[packages]\n")
    refused(
        tmp_path, f"{name}: expected .*, got .*file", lambda: run(source, tmp_path / "out.jsonl")
    )


def test_a_lock_that_was_replaced_meanwhile_is_left_to_its_holder(source, tmp_path):
    lock = tmp_path / "out.jsonl.lock"

    class Model(FakeModel):
        def build(self, *arguments, **options):
            lock.unlink()
            lock.write_text("another's")
            return super().build(*arguments, **options)

    assert run(source, tmp_path / "out.jsonl", Model()) == 1
    assert lock.read_text() == "another's"


def test_a_file_is_replaced_with_a_new_one_and_never_written_in_place(tmp_path):
    (tmp_path / "plan.toml").write_text("old")
    os.link(tmp_path / "plan.toml", tmp_path / "kept")
    (tmp_path / "plan.toml.tmp").write_text("of a program that was killed")
    os.link(tmp_path / "plan.toml.tmp", tmp_path / "kept too")
    replace_file(Disk(), tmp_path / "plan.toml", [b"new"])
    assert contents(tmp_path) == {
        "plan.toml": b"new",
        "kept": b"old",
        "kept too": b"of a program that was killed",
    }
    for name in ("plan.toml", "plan.toml.tmp"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to("kept")
        refused(
            tmp_path, "got a link to kept", lambda: replace_file(Disk(), tmp_path / "plan.toml", [])
        )
        (tmp_path / name).unlink()


def test_a_name_too_long_for_its_side_files_is_refused_before_the_rows_run(source, tmp_path):
    output = tmp_path / ("o" * 250)
    refused(tmp_path, "expected a name of at most 255 bytes, got 264", lambda: run(source, output))


def test_an_output_in_a_folder_that_only_others_may_write_to_is_refused(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(tmp_path, "where this user may not write", lambda: run(source, tmp_path / "out.jsonl"))
