"""Files that nobody but the user can have written, read whole and compared with a hash.

Folders are held open and files are opened in them by descriptor, never through a link, so who can
rename a folder cannot put another one in its place. Knows nothing of what the files hold.

Guarantees: what comes back is owned by this user, could be written by no one else when it was
opened, and has the size and the SHA-256 that were recorded.
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
class KeptFile:
    """A file of a folder, as it was written."""

    name: str
    sha256: str

    @classmethod
    def of(cls, described: Any) -> "KeptFile":
        """From a table that says it; a name stays inside its folder."""
        return cls(Path(described["file"]).name, str(described["sha256"]))

    @property
    def described(self) -> dict[str, str]:
        return {"file": self.name, "sha256": self.sha256}


@contextmanager
def opened(path: Path | str, folder: int | None = None) -> Iterator[int]:
    """A folder as a descriptor, the user's own."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        _check_own(path, descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(name: str, folder: int) -> bytes:
    """A file of a folder that is held open, the user's own."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        _check_own(name, descriptor)
        return file.read()


def read_kept(file: KeptFile, folder: int) -> bytes:
    """A file as it was written."""
    content = read_file(file.name, folder)
    _check_hash(file, content)
    return content


def _check_hash(file: KeptFile, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise BundleUnusable(f"{file.name} is not the file that was written")


def _check_own(path: Path | str, descriptor: int) -> None:
    """Only the user may have written it."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise BundleUnusable(f"{path} belongs to another user ({found.st_uid})")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise BundleUnusable(
            f"{path} can be written by others ({stat.filemode(found.st_mode)}); chmod go-w it if "
            f"none of them has"
        )
