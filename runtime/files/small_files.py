"""Read the small files of a model folder: by bare names, whole, and with a limit of their size.

A model folder is untrusted data. Does not know the meaning of the files. Guarantees: a file that is
read is in the folder, or in the `blobs` of the folder's Hugging Face cache; it is a regular file (a
pipe or a device is refused without waiting for it); and it is no larger than the limit for its
name. A link to a missing file is an error, and not a missing file.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, InvalidConfig, RowError
from .strict_json import parse_object

MAX_JSON_BYTES = 32 * 2**20
MAX_VOCABULARY_BYTES = 256 * 2**20
"""The largest size of a vocabulary; the largest published tokenizer.json have about 35 MB."""
MAX_TEMPLATE_BYTES = 2**20
"""The largest size of a chat template; the longest published ones have about 30 kB."""
_MAX_BYTES = {
    "tokenizer.json": MAX_VOCABULARY_BYTES,
    "tokenizer.model": MAX_VOCABULARY_BYTES,
    "vocab.json": MAX_VOCABULARY_BYTES,
    "merges.txt": MAX_VOCABULARY_BYTES,
}
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of the named chat templates of a model folder."""


def has_file(directory: Path, name: str) -> bool:
    """Whether a folder has an entry with this name; the file is checked when it is read."""
    return os.path.lexists(directory / name)


def read_small(path: Path, error: type[CheckpointError] = CheckpointError) -> bytes:
    """Read a whole file of a model folder.

    Args:
      path: The folder and a bare name in it; the name decides the largest size of the file.
      error: The class of the errors that are raised.
    """
    target = _inside(path.parent, path.name, str(path), error)
    default = MAX_TEMPLATE_BYTES if path.suffix == ".jinja" else MAX_JSON_BYTES
    limit = _MAX_BYTES.get(path.name, default)
    try:
        # without O_NONBLOCK, opening a pipe would wait for its writer
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno != errno.ENXIO:  # a socket
            raise
        raise _not_regular(path, error) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path, error)
        if status.st_size > limit:
            raise error(
                f"{path}: expected at most {limit} bytes, got {status.st_size}. Fetch the file "
                f"again; it may be another kind of file."
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def template_files(directory: Path) -> list[Path]:
    """The files of the named chat templates of a model folder, by name."""
    folder = directory / MORE_TEMPLATES
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder}: expected a folder, got a link to {folder.resolve()}. Copy the files into "
            f"the folder if you trust them."
        )
    return sorted(folder.glob("*.jinja"))


def read_json_object(path: Path, error: type[CheckpointError] = InvalidConfig) -> dict[str, Any]:
    """Read a file with one JSON object, as strictly as the lines of a batch file."""
    return parse_json_object(read_small(path, error), str(path), error)


def parse_json_object(
    data: bytes, where: str, error: type[CheckpointError] = InvalidConfig
) -> dict[str, Any]:
    """Parse one JSON object; `where` begins the message of an error."""
    try:
        return parse_object(data)
    except RowError as problem:
        raise error(f"{where}: {problem.message}") from None


def file_inside(directory: Path, name: object, where: str) -> Path:
    """Return `directory/name` for the bare name of a regular safetensors file in the directory.

    A link out of the directory is refused, with one exception: the snapshots of the Hugging Face
    cache, and the directories in them, have links into `blobs`, and these links are followed.

    Args:
      where: The beginning of error messages.
    """
    suffix = ".safetensors"
    if not isinstance(name, str) or not name.endswith(suffix) or name.startswith("."):
        raise CheckpointError(f"{where}: expected a file name ending in {suffix!r}, got {name!r}.")
    if any(character in name for character in "/\\:\0"):
        raise CheckpointError(f"{where}: expected a bare file name, got {name!r}.")
    path = directory / name
    if not _inside(directory, name, where, CheckpointError).is_file():
        raise _not_regular(path, CheckpointError)
    return path


def _inside(directory: Path, name: str, where: str, error: type[CheckpointError]) -> Path:
    """Return the resolved path of a name, which is in the directory or in the cache's `blobs`."""
    path, home = directory / name, directory.resolve()
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        got = "a link to nothing" if path.is_symlink() else "none"
        raise error(
            f"{where}: expected the file {name!r} in {directory}, got {got}. Fetch it again."
        ) from None
    # a folder of a module is one level below the snapshot
    snapshots = (folder for folder in home.parents[:2] if folder.name == "snapshots")
    is_blob = any(target.parent == folder.parent / "blobs" for folder in snapshots)
    if not (is_blob or target.is_relative_to(home)):
        raise error(
            f"{where}: expected {name!r} to be in {directory}, got a link to {target}. "
            f"Copy the file into the directory if you trust it."
        )
    return target


def _not_regular(path: Path, error: type[CheckpointError]) -> CheckpointError:
    kind = "a directory" if path.is_dir() else "a pipe, socket or device"
    return error(f"{path}: expected a regular file, got {kind}. Replace it with the file itself.")
