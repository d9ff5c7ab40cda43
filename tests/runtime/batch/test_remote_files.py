"""Jobs and merges whose files are at URLs: the journal stays local, outputs are published once."""

import json
from pathlib import Path

import fsspec
import pytest
from fake_model import FakeModel, masked, run, write_input
from faulty_disk import Crash, FaultyDisk
from fsspec.implementations.memory import MemoryFileSystem

from noria.runtime.batch.job_files import stages_folder
from noria.runtime.batch.remote_files import Outputs, files_copied, input_copied, input_copy_path
from noria.runtime.cli import main
from noria.runtime.errors import ConfigError, JobError, UnusableFile
from noria.runtime.files.disk import Disk
from noria.runtime.files.remote import RemoteFile, Url
from noria.runtime.rows.part import Part

OUTPUT, ERRORS = Url("memory://jobs/out.jsonl"), Url("memory://jobs/errors.jsonl")
MANIFEST = OUTPUT.beside("out.jsonl.manifest.json")


@pytest.fixture
def store(monkeypatch):
    """The content of an empty store by path, and the uploads to it."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.uploads = []
    put_file = MemoryFileSystem.put_file

    def counted(self, local, path, *arguments, **options):
        files.uploads.append(path)
        put_file(self, local, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", counted)
    yield files
    files.store.clear()


@pytest.fixture
def job(tmp_path, store):
    """Run a job from a URL to a URL, with a work folder of its own."""
    store.pipe_file("/jobs/in.jsonl", write_input(tmp_path / "in.jsonl").read_bytes())
    work = tmp_path / "work"

    def run_job(model=None, disk=None, error_file=None, **changes):
        outputs = Outputs.at(OUTPUT, error_file, work)
        source = Url("memory://jobs/in.jsonl")
        copy = input_copy_path(source, outputs.output)
        changes |= {"input_url": str(source), "error_file": outputs.error_file}
        with (
            outputs.mirrored(Disk(), lambda message: None, restarts=changes.get("restart", False)),
            input_copied(source, copy, Disk()),
        ):
            return run(copy, outputs.output, model, disk, **changes)

    return run_job


def content(store, tmp_path: Path, url: Url = OUTPUT) -> bytes:
    path = tmp_path / "fetched"
    path.write_bytes(store.cat_file(url.text))
    return masked(path)


def test_a_job_between_urls_is_that_between_files_and_leaves_nothing_local(tmp_path, store, job):
    assert job() == 1
    run(tmp_path / "in.jsonl", tmp_path / "whole.jsonl")
    assert content(store, tmp_path) == masked(tmp_path / "whole.jsonl")
    manifest = json.loads(store.cat_file(MANIFEST.text))
    assert manifest["input"]["name"] == "memory://jobs/in.jsonl"
    assert list(manifest["outputs"]) == ["out.jsonl"]
    assert store.uploads == ["/jobs/out.jsonl", "/jobs/out.jsonl.manifest.json"]
    assert not list((tmp_path / "work").iterdir())
    model = FakeModel()
    assert job(model) == 1
    assert not model.num_texts and len(store.uploads) == 2


def test_a_job_that_is_stopped_anywhere_goes_on_and_publishes_once(tmp_path, store, job):
    counter = FaultyDisk(0)
    job(disk=counter)
    whole = content(store, tmp_path)
    for at in range(1, counter.calls, counter.calls // 12):
        for url in (OUTPUT, MANIFEST):
            store.rm_file(url.text)
        store.uploads.clear()
        with pytest.raises(Crash):
            job(disk=FaultyDisk(at, Crash()))
        assert job() == 1
        assert content(store, tmp_path) == whole
        assert len(store.uploads) == 2
        assert not list((tmp_path / "work").iterdir())


def test_an_output_of_something_else_is_kept(tmp_path, store, job):
    store.pipe_file("/jobs/out.jsonl", b"precious")
    for _ in range(2):
        with pytest.raises(UnusableFile, match=f"^{OUTPUT}: exists .*\n  no manifest is beside it"):
            job()
        assert store.cat_file(OUTPUT.text) == b"precious"
        assert not list((tmp_path / "work").iterdir())
    assert job(restart=True) == 1
    assert len(content(store, tmp_path).splitlines()) == 45


def test_an_update_keeps_the_answers_at_the_url(tmp_path, store, job):
    job()
    before = store.cat_file(OUTPUT.text).splitlines()
    lines = store.cat_file("/jobs/in.jsonl") + b'\n{"id": "new", "prompt": "more"}'
    store.pipe_file("/jobs/in.jsonl", lines)
    model = FakeModel()
    assert job(model, updates=True) == 1
    assert model.generator.submitted == ["new"]
    assert store.cat_file(OUTPUT.text).splitlines()[:-1] == before


def test_a_failed_upload_keeps_the_output_and_the_next_run_uploads_it(
    tmp_path, store, job, monkeypatch
):
    def fail(self, local, path, **options):
        raise ConnectionError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", fail)
        with pytest.raises(JobError, match=r"out.jsonl: cannot be written .*no route.*are kept"):
            job()
    model = FakeModel()
    assert job(model) == 1
    assert not model.num_texts
    assert len(content(store, tmp_path).splitlines()) == 45


def test_an_upload_that_is_killed_halfway_is_made_again(tmp_path, store, job, monkeypatch):
    def put_half(self, local, path, **options):
        self.pipe_file(path, Path(local).read_bytes()[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put_half)
        with pytest.raises(KeyboardInterrupt):
            job()
    assert len(store.cat_file(OUTPUT.text)) == 100
    model = FakeModel()
    assert job(model) == 1 and not model.num_texts
    assert len(content(store, tmp_path).splitlines()) == 45
    assert not list((tmp_path / "work").iterdir())


def test_states_of_an_attempt_that_never_began_do_not_count(tmp_path, store, job):
    """The first attempt was killed before its journal; another machine did the job meanwhile."""
    outputs = Outputs.at(OUTPUT, None, tmp_path / "work")
    stale = outputs.output.with_name("out.jsonl.urls.json")
    stale.parent.mkdir(parents=True)
    job()
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.write_text(json.dumps({str(OUTPUT): None, str(MANIFEST): None}))
    model = FakeModel()
    assert job(model) == 1 and not model.num_texts
    assert not list((tmp_path / "work").iterdir())


def test_a_failed_upload_of_the_manifest_alone_is_made_up_for(tmp_path, store, job, monkeypatch):
    put_file = MemoryFileSystem.put_file

    def fail(self, local, path, **options):
        if path.endswith(".json"):
            raise ConnectionError("no route")
        put_file(self, local, path, **options)

    job()
    store.pipe_file("/jobs/in.jsonl", b'{"id": "new", "prompt": "more"}')
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", fail)
        with pytest.raises(JobError, match=r"manifest.json: cannot be written"):
            job(restart=True)
    store.uploads.clear()
    model = FakeModel()
    assert job(model) == 0 and not model.num_texts
    assert store.uploads == ["/jobs/out.jsonl.manifest.json"]
    assert not list((tmp_path / "work").iterdir())


def test_an_output_that_another_program_wrote_meanwhile_is_kept(tmp_path, store, job):
    class Meddler(FakeModel):
        def build(self, *arguments, **options):
            store.pipe_file(OUTPUT.text, b"theirs")
            return super().build(*arguments, **options)

    job()
    with pytest.raises(JobError, match=r"out.jsonl: expected the file that was there .*are kept"):
        job(Meddler(), restart=True)
    for _ in range(2):  # the finished local copy does not replace it later either
        with pytest.raises(UnusableFile, match="got another one, which is kept"):
            job()
    assert store.cat_file(OUTPUT.text) == b"theirs"
    store.rm_file(OUTPUT.text)
    model = FakeModel()
    assert job(model) == 1 and not model.num_texts
    assert len(content(store, tmp_path).splitlines()) == 45
    assert not list((tmp_path / "work").iterdir())


def test_an_output_that_changed_while_a_job_was_stopped_is_kept(tmp_path, store, job):
    with pytest.raises(Crash):
        job(disk=FaultyDisk(9, Crash()))
    store.pipe_file(OUTPUT.text, b"theirs")
    model = FakeModel()
    with pytest.raises(UnusableFile, match="got another one, which is kept"):
        job(model)
    assert not model.num_texts and store.cat_file(OUTPUT.text) == b"theirs"
    store.rm_file(OUTPUT.text)
    assert job() == 1


def test_an_output_that_changed_while_a_job_with_stages_was_stopped_is_kept(tmp_path, store):
    outputs = Outputs.at(OUTPUT, None, tmp_path / "work")
    with pytest.raises(Crash), outputs.mirrored(Disk(), print):
        stages_folder(outputs.output).mkdir()
        raise Crash
    store.pipe_file(OUTPUT.text, b"theirs")
    refused = pytest.raises(UnusableFile, match="got another one, which is kept")
    with refused, outputs.mirrored(Disk(), print):
        raise AssertionError("the job went on")
    store.rm_file(OUTPUT.text)
    with outputs.mirrored(Disk(), print):
        run(write_input(tmp_path / "in.jsonl"), outputs.output)
    assert len(content(store, tmp_path).splitlines()) == 45
    # the folder stays if the job keeps its stages
    assert [*(tmp_path / "work").rglob("*")][1:] == [stages_folder(outputs.output)]


def test_a_kept_folder_of_stages_does_not_stand_for_a_file_at_the_url(tmp_path, store):
    outputs = Outputs.at(OUTPUT, None, tmp_path / "work")
    with outputs.mirrored(Disk(), print):
        stages_folder(outputs.output).mkdir()
        run(write_input(tmp_path / "in.jsonl"), outputs.output)
    store.pipe_file(OUTPUT.text, b"theirs")
    for _ in range(2):
        outputs = Outputs.at(OUTPUT, None, tmp_path / "work")
        refused = pytest.raises(UnusableFile, match=f"^{OUTPUT}: exists")
        with refused, outputs.mirrored(Disk(), print):
            run(tmp_path / "in.jsonl", outputs.output)
        assert store.cat_file(OUTPUT.text) == b"theirs"
        assert [*(tmp_path / "work").rglob("*")][1:] == [stages_folder(outputs.output)]
    store.rm_file(OUTPUT.text)
    with outputs.mirrored(Disk(), print):
        run(tmp_path / "in.jsonl", outputs.output)
    assert len(content(store, tmp_path).splitlines()) == 45


def test_a_changed_input_is_fetched_again(tmp_path, store, job):
    job()
    before = store.cat_file(OUTPUT.text)
    store.pipe_file("/jobs/in.jsonl", b'{"id": "new", "prompt": "more"}')
    with pytest.raises(UnusableFile, match=r"the input: there .*, now 31 bytes"):
        job()
    assert store.cat_file(OUTPUT.text) == before
    assert job(restart=True) == 0
    assert len(content(store, tmp_path).splitlines()) == 1


def test_an_upload_that_arrives_damaged_is_an_error(tmp_path, store, monkeypatch):
    def damage(self, local, path):
        store.pipe_file(path, b"wrong")

    (tmp_path / "a").write_bytes(b"right")
    monkeypatch.setattr(MemoryFileSystem, "put_file", damage)
    file = RemoteFile(Url("memory://jobs/a"))
    with pytest.raises(UnusableFile, match=r"expected the 5 bytes of .* after the upload"):
        file.publish(tmp_path / "a")


def test_an_error_file_may_be_at_a_url_too(tmp_path, store, job):
    assert job(error_file=ERRORS) == 1
    sizes = [len(store.cat_file(url.text).splitlines()) for url in (OUTPUT, ERRORS)]
    assert sum(sizes) == 45 and all(sizes)
    assert store.uploads[-1] == "/jobs/out.jsonl.manifest.json"
    with pytest.raises(ConfigError, match="the output is the error file too"):
        Outputs.at(OUTPUT, OUTPUT, tmp_path)


def test_copies_of_several_urls_have_their_names_and_manifests(store):
    for name in ("a", "b"):
        store.pipe_file(f"/{name}/out.jsonl", name.encode())
    store.pipe_file("/b/out.jsonl.manifest.json", b"{}")
    places = [Url("memory://a/out.jsonl"), Url("memory://b/out.jsonl"), Path("here")]
    with files_copied(places, with_manifests=True) as paths:
        assert [path.name for path in paths] == ["out.jsonl", "out.jsonl", "here"]
        assert [path.read_text() for path in paths[:2]] == ["a", "b"]
        assert [len(list(path.parent.iterdir())) for path in paths[:2]] == [1, 2]
    assert not paths[0].parent.exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://jobs/none.jsonl", r"none.jsonl: cannot be read \(no such file\)"),
        ("nowhere://jobs/a", "expected a URL that fsspec opens, got Protocol not known"),
        ("memory://jobs/", "got one that ends in a slash"),
    ],
)
def test_a_url_that_cannot_be_read_is_named(tmp_path, store, url, message):
    with pytest.raises(UnusableFile, match=message):
        RemoteFile(Url(url)).fetch(tmp_path / "copy", Disk())


def test_a_missing_package_is_named(monkeypatch):
    def no_store(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", no_store)
    with pytest.raises(UnusableFile, match=r"Install s3fs .*pip install 'noria\[remote\]'"):
        RemoteFile(Url("s3://bucket/a"))


def test_only_the_output_of_a_job_is_a_pipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(write_input(tmp_path / "in.jsonl"), tmp_path / "part.jsonl", part=Part(0, 1))
    before = sorted(tmp_path.iterdir())
    merging, job = ["merge", "part.jsonl"], ["batch", "-i", "in.jsonl", "--model", "smollm2"]
    for option, arguments in {
        "-o": [*merging, "-o", "-"],
        "--error-file": [*merging, "-o", "out.jsonl", "--error-file", "-"],
        "--error-file ": [*job, "-o", "out.jsonl", "--error-file", "-"],
    }.items():
        assert main(arguments) == 2
        message = f"{option.strip()}: expected a file or a URL, as only the output of noria batch"
        assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_the_output_of_a_merge_at_a_url_of_this_machine_is_checked_first(tmp_path, capsys):
    part = tmp_path / "part.jsonl"
    run(write_input(tmp_path / "in.jsonl"), part)
    url = f"file://{tmp_path}/missing/out.jsonl"
    options = ["--work-folder", str(tmp_path / "work"), "--quiet"]
    assert main(["merge", str(part), "-o", url, *options]) == 2
    assert f"{tmp_path}/missing" in capsys.readouterr().err
    assert main(["merge", str(part), "-o", f"file://{part}", *options]) == 2
    assert "is a part" in capsys.readouterr().err
