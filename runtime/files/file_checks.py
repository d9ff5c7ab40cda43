"""Checks the files and folders that a command reads and writes, before any of them is opened.

Two paths are the same file if their resolved paths are equal, or their device and inode. So links,
hard links and file systems that ignore case are recognised. If a folder is read, such as a model's,
all files in it count as read.

Does not know what files contain. Guarantees: a command that passes the check writes no file that it
reads, writes no file twice, and can write all of them, judged by names and permissions.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import CacheUnusable, ConfigError, UnusableFile
from .disk import check_replaceable, temporary_name


def check_files(
    outputs: Mapping[str, Path],
    read: Iterable[tuple[str, Path | None]],
    side_files: Mapping[str, Path] | None = None,
) -> None:
    """Check that files can be written, are not read too, and are not written twice.

    Args:
        outputs: Files that replace existing files, by description.
        read: Description and path of every file or whole folder that is read; paths of None are
          ignored.
        side_files: Other files that are written, by description; their folders exist or can be
          created.

    Raises:
        UnusableFile: A file cannot be used; the error names it, its other use and the remedy.
    """
    for path in outputs.values():
        _check_folder(path)
    written = {**outputs, **(side_files or {})}
    for description, path in list(written.items()):
        written[f"the temporary file of {description}"] = path.with_name(temporary_name(path.name))
    for description, path in written.items():
        if path.parent.is_dir():
            _check_name(path)
        role = "" if description in outputs else f"{description} "
        for source_name, source in read:
            if source is not None and _is_read(path, source):
                raise UnusableFile(
                    f"{path}: {role}is {source_name} too. Choose another output; a file that is "
                    "read is never written."
                )
    for (description, path), (other, other_path) in itertools.combinations(written.items(), 2):
        if _is_one_file(path, other_path):
            raise UnusableFile(f"{path}: {description} is {other} too. Choose two files.")
    for path in written.values():
        check_replaceable(path)


def _check_folder(path: Path) -> None:
    if path.is_dir():
        raise UnusableFile(f"{path}: expected a file to write, got a directory. Name a file in it.")
    if not path.parent.is_dir():
        raise UnusableFile(f"{path}: expected its directory to exist. Create {path.parent}.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UnusableFile(
            f"{path}: expected a directory to write to, got {path.parent}, where this user may "
            "not write. Choose another directory."
        )


def _check_name(path: Path) -> None:
    """Refuse a name that is too long for the file system, before the job starts."""
    limit = os.pathconf(path.parent, "PC_NAME_MAX")
    if (length := len(os.fsencode(path.name))) > limit:
        raise UnusableFile(
            f"{path}: expected a name of at most {limit} bytes, got {length}. Choose a shorter "
            "name for the output."
        )


def _identities(path: Path) -> set[object]:
    """The identities of a path; two paths are the same file if they share one."""
    identities: set[object] = {os.path.realpath(path)}
    with suppress(OSError):
        status = os.stat(path)
        identities.add((status.st_dev, status.st_ino))
    return identities


def _is_one_file(path: Path, other: Path) -> bool:
    # two files that do not exist yet may become the same file if the file system ignores case
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
    # a file that does not exist yet has no hard link in the folder
    return path.exists() and any(identities & _identities(file) for file in _inside(source))


def _inside(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names)


def default_directory() -> Path:
    """The user's cache directory for jax's compiled programs.

    Raises:
      CacheUnusable: The user has no home folder and XDG_CACHE_HOME is not set.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and no entry of the user in the password database
        raise CacheUnusable("there is no home folder; set XDG_CACHE_HOME to a folder") from None
    return root / "noria" / "xla"


def check_fillable(folder: Path) -> None:
    """Check that a folder exists or can be created, and can be written to.

    Raises:
        ConfigError: The path is a file, or the user may not write to it.
    """
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"{folder}: expected a folder, got the file {existing}. Choose another name."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{folder}: expected a folder to write to, got {existing}, where this user may not "
            f"write. Choose another folder."
        )


def check_new_folder(folder: Path, model: Path) -> None:
    """Check that a folder is new or empty, and outside a model's directory.

    Raises:
        ConfigError: The folder has files, is in the model's directory, or cannot be created.
    """
    if model.is_dir() and folder.resolve().is_relative_to(model.resolve()):
        raise ConfigError(
            f"{folder}: expected a folder outside the model's directory, which is only read. "
            f"Choose another folder."
        )
    check_fillable(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder}: expected a new or empty folder, got one with files, and no file is "
            f"overwritten. Choose another folder, or remove this one if an earlier command did "
            f"not finish it."
        )
