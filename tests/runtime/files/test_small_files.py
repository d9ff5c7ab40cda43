"""Files of a model folder besides its weights: inside the folder, regular, of limited size."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_llama import CONFIG, random_tensors, save

from noria.runtime.checkpoint import open_model
from noria.runtime.errors import CheckpointError
from noria.runtime.files import small_files
from noria.runtime.files.small_files import has_file, read_small
from noria.runtime.text.load_tokenizer import load_tokenizer
from noria.runtime.text.sentencepiece_model import tokenizer_from_sentencepiece
from noria.runtime.text.tokenizer_directory import read_directory

SECRET = "the contents of ~/.ssh/id_ed25519"


def fill(directory: Path) -> Path:
    """A folder with every file that noria reads besides weights."""
    save(directory, CONFIG, random_tensors(CONFIG))
    for name in (
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ):
        (directory / name).write_text("{}")
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer.model"):
        (directory / name).write_text(SECRET[:3])
    return directory


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": open_model,
    "generation_config.json": lambda path: open_model(path).generation_defaults,
    "tokenizer_config.json": read_directory,
    "special_tokens_map.json": read_directory,
    "added_tokens.json": read_directory,
    "chat_template.jinja": read_directory,
    "tokenizer.json": load_tokenizer,
    "tokenizer.model": tokenizer_from_sentencepiece,
}


def a_link_out(path: Path) -> None:
    secret = path.parent.with_name("secret")
    secret.write_text(SECRET)
    path.symlink_to(secret)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def a_circle(path: Path) -> None:
    path.symlink_to(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def a_file_without_end(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (a_link_out, "got a link to .*secret. Copy the file into the directory if you trust it"),
        (a_link_to_a_device, "got a link to /dev/zero"),
        (a_link_to_nothing, "got a link to nothing"),
        (a_circle, "got a link to nothing"),
        (os.mkfifo, "expected a regular file, got a pipe, socket or device"),
        (a_socket, "expected a regular file, got a pipe, socket or device"),
        (os.mkdir, "expected a regular file, got a directory"),
        (a_file_without_end, f"expected at most [0-9]+ bytes, got {2**40}"),
    ],
)
@pytest.mark.parametrize("name", READERS)
def test_what_is_not_a_file_of_the_folder_is_refused_by_name(
    tmp_path, monkeypatch, name, replace, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(small_files, "MAX_JSON_BYTES", 1000)
    monkeypatch.setattr(small_files, "_MAX_BYTES", {})
    path = fill(tmp_path / "m") / name
    path.unlink()
    replace(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        READERS[name](path.parent)
    assert name in str(caught.value) and SECRET not in str(caught.value)


def test_a_chat_template_linked_to_a_secret_does_not_come_into_the_prompt(tmp_path):
    path = fill(tmp_path / "m") / "chat_template.jinja"
    path.unlink()
    a_link_out(path)
    with pytest.raises(CheckpointError, match="Copy the file in"):
        read_directory(path.parent)


def test_a_fingerprint_and_a_report_read_no_secret_either(tmp_path):
    path = fill(tmp_path / "m") / "tokenizer.json"
    path.unlink()
    a_link_out(path)
    with pytest.raises(CheckpointError, match="Copy the file in"):
        open_model(path.parent).fingerprint()


def hub_cache(root: Path) -> Path:
    """The folder of a snapshot in the structure of `huggingface_hub`."""
    source = fill(root / "source")
    repository = root / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copyfile(path, repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def test_the_cache_of_the_hub_is_read_through_its_links(tmp_path):
    snapshot, plain = hub_cache(tmp_path), tmp_path / "source"
    for name in READERS:
        assert read_small(snapshot / name) == read_small(plain / name)
    with open_model(snapshot) as cached, open_model(plain) as copied:
        assert cached.fingerprint() == copied.fingerprint()
        assert cached.weights_digest().result() == copied.weights_digest().result()
    assert read_directory(snapshot).chat_templates["default"].text == SECRET[:3]


@pytest.mark.parametrize("what", ["blob", "blobs"])
def test_a_link_of_the_cache_that_leads_on_is_refused(tmp_path, what):
    snapshot = hub_cache(tmp_path)
    blobs = snapshot.parent.parent / "blobs"
    elsewhere = tmp_path / "elsewhere"
    if what == "blobs":
        blobs.rename(elsewhere)
        blobs.symlink_to(elsewhere)
    else:
        blob = (snapshot / "chat_template.jinja").resolve()
        blob.rename(elsewhere)
        blob.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"got a link to .*elsewhere"):
        read_directory(snapshot)


def test_a_link_inside_the_folder_and_a_folder_behind_a_link_are_read(tmp_path):
    folder = fill(tmp_path / "m")
    (folder / "templates").mkdir()
    (folder / "chat_template.jinja").rename(folder / "templates" / "chat.jinja")
    (folder / "chat_template.jinja").symlink_to("templates/chat.jinja")
    (tmp_path / "link").symlink_to(folder)
    assert read_directory(tmp_path / "link").chat_templates["default"].text == SECRET[:3]


def test_a_file_that_is_not_there_settles_nothing(tmp_path):
    folder = fill(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    assert not has_file(folder, "chat_template.jinja")
    assert not read_directory(folder).chat_templates


def test_a_saved_tokenizer_behind_a_link_is_refused(tmp_path):
    from noria.runtime.checkpoint.orbax_store import read_tokenizer_files

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="expected the folder of the tokenizer, got a link"):
        read_tokenizer_files(tmp_path / "m")


def test_a_pipe_in_place_of_a_gguf_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="got a pipe, socket or device"):
        open_model(tmp_path / "m.gguf")


def test_published_sizes_are_within_the_bounds(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, 40 * 2**20)
    assert len(read_small(path)) == 40 * 2**20
