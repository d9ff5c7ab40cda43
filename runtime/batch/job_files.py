"""The files that a command writes and those that it reads, checked before any of them is opened.

Files are the same when their resolved paths are, or their device and inode: links, hard links and
file systems that ignore case are recognised. A folder that is read, such as a model's, counts with
all files in it.

Knows nothing of what files hold. Guarantees: a command that passes the check writes no file that it
reads, writes no file twice, and can write all of them, as far as names and permissions say.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError, UnusableFile
from ..files.disk import check_replaceable, temporary_name
from .journal import journal_path
from .lock import lock_path
from .manifest import manifest_path


def side_files(output: Path) -> dict[str, Path]:
    """Every file that a job or a merge keeps beside its output, by description."""
    return {
        "the manifest": manifest_path(output),
        "the journal": journal_path(output),
        "the lock": lock_path(output),
    }


def job_outputs(output: Path, error_file: Path | None) -> dict[str, Path]:
    """The files that a job or a merge produces, by description."""
    named = {"the output": output, "the error file": error_file}
    return {what: path for what, path in named.items() if path is not None}


def check_files(
    outputs: Mapping[str, Path],
    read: Iterable[tuple[str, Path | None]],
    side_files: Mapping[str, Path] | None = None,
) -> None:
    """Refuse files that cannot be written, that are read too, or that are written twice.

    Args:
        outputs: Files that replace existing ones, by description.
        read: Description and path of every file that is read, or of a folder that is read whole; a
          path of None is left out.
        side_files: Other files that are written, by description, in folders that exist or can be
          made.

    Raises:
        UnusableFile: A file cannot be used; the error names it, its other use and the remedy.
    """
    for path in outputs.values():
        _check_folder(path)
    written = {**outputs, **(side_files or {})}
    for what, path in list(written.items()):
        written[f"the temporary file of {what}"] = path.with_name(temporary_name(path.name))
    for what, path in written.items():
        if path.parent.is_dir():
            _check_name(path)
        role = "" if what in outputs else f"{what} "
        for source_name, source in read:
            if source is not None and _is_read(path, source):
                raise UnusableFile(
                    f"{path}: {role}is {source_name} too. Choose another output; what is read is "
                    "never written."
                )
    for (what, path), (other, other_path) in itertools.combinations(written.items(), 2):
        if _is_one_file(path, other_path):
            raise UnusableFile(f"{path}: {what} is {other} too. Choose two files.")
    for path in written.values():
        check_replaceable(path)


def check_fillable(folder: Path) -> None:
    """Refuse a folder that is none, or that could neither be made nor written to."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(
            f"{folder}: expected a folder, got the file {there}. Choose another name."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{folder}: expected a folder to write to, got {there}, where this user may not write. "
            f"Choose another."
        )


def _check_folder(path: Path) -> None:
    if path.is_dir():
        raise UnusableFile(f"{path}: expected a file to write, got a directory. Name a file in it.")
    if not path.parent.is_dir():
        raise UnusableFile(f"{path}: expected its directory to exist. Create {path.parent}.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UnusableFile(
            f"{path}: expected a directory to write to, got {path.parent}, where this user may "
            "not write. Choose another."
        )


def _check_name(path: Path) -> None:
    """Refuse at the start a name to which the finished file could not be renamed."""
    limit = os.pathconf(path.parent, "PC_NAME_MAX")
    if (length := len(os.fsencode(path.name))) > limit:
        raise UnusableFile(
            f"{path}: expected a name of at most {limit} bytes, got {length}. Choose a shorter "
            "name for the output."
        )


def _identities(path: Path) -> set[object]:
    """The identities of a path; two paths are one file if they share any."""
    found: set[object] = {os.path.realpath(path)}
    with suppress(OSError):
        status = os.stat(path)
        found.add((status.st_dev, status.st_ino))
    return found


def _is_one_file(path: Path, other: Path) -> bool:
    # two files that do not exist yet may become one where case is ignored
    is_one_name = os.path.realpath(path).casefold() == os.path.realpath(other).casefold()
    return is_one_name or bool(_identities(path) & _identities(other))


def _is_read(path: Path, source: Path) -> bool:
    identities = _identities(path)
    if identities & _identities(source):
        return True
    if not source.is_dir():
        return False
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source)):
        return True
    # a file that is not there can have no other name in the folder
    return path.exists() and any(identities & _identities(file) for file in _inside(source))


def _inside(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names)
