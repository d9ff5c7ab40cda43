"""Reads files that only the user can have written, and compares them with recorded hashes.

Folders are held open and files are opened in them by descriptor, never through a link. So renaming
a folder cannot replace it by another one. Does not know what the files contain.

Guarantees: content that is returned was read from a file that this user owns and that nobody else
could write when it was opened; `read_recorded` returns it only if it has the recorded SHA-256.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BundleUnusable

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class RecordedFile:
    """The name and the hash of a file in a folder, recorded when the file was written."""

    name: str
    sha256: str

    @classmethod
    def from_table(cls, table: Any) -> "RecordedFile":
        """Read the record from a table; folders in the name are dropped."""
        return cls(Path(table["file"]).name, str(table["sha256"]))

    def to_table(self) -> dict[str, str]:
        """The record as a table for JSON."""
        return {"file": self.name, "sha256": self.sha256}


@contextmanager
def open_own_folder(path: Path | str, folder: int | None = None) -> Iterator[int]:
    """Open a folder of the user's own, and yield its descriptor.

    Args:
      path: The folder, relative to `folder` if one is given.
      folder: The descriptor of an open folder.

    Raises:
      BundleUnusable: Another user owns the folder or can write to it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        _check_own(path, descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(name: str, folder: int) -> bytes:
    """The content of a user's own file in an open folder.

    Raises:
      BundleUnusable: Another user owns the file or can write to it.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        _check_own(name, descriptor)
        return file.read()


def read_recorded(file: RecordedFile, folder: int) -> bytes:
    """The content of a file, if it has the recorded hash.

    Raises:
      BundleUnusable: The content differs, or another user owns the file or can write to it.
    """
    content = read_file(file.name, folder)
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise BundleUnusable(f"{file.name} differs from the file that was written")
    return content


def _check_own(path: Path | str, descriptor: int) -> None:
    """Refuse a file or folder that another user may have written."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise BundleUnusable(f"{path} belongs to another user ({status.st_uid})")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise BundleUnusable(
            f"{path} can be written by others ({stat.filemode(status.st_mode)}); run chmod go-w on "
            f"it if nobody else has changed it"
        )
