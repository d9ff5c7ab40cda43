"""The few disk operations that durability rests on, behind one small object.

Everything that must survive a crash goes through a `Disk`, so that a test can make any single one
of these operations fail, or stop the program there. No other module opens files for writing.

Knows nothing of journals or rows. Guarantees: after `replace_file` returns, the file under its
final name is whole and stays so over a power cut; before that, the old one (or none) is. Where it
cannot be written, nothing of the new one is left. Nothing is written through a link, or to a pipe
or device.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import UnusableFile


@dataclass(frozen=True)
class FileDigest:
    """What identifies a file's content."""

    sha256: str
    num_bytes: int


class Disk:
    """The real disk."""

    def open_append(self, path: Path) -> int:
        return open_in_place(path, os.O_APPEND)

    def open_new(self, path: Path) -> int:
        # a link, even one to nothing, counts as a file that is there
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, content: bytes | memoryview) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]

    def truncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Make names in the folder durable: a rename is data of the folder, not of the file."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_in_place(path: Path, flags: int = 0) -> int:
    """Open a file for reading and writing in place; create it if it is absent.

    Raises:
        UnusableFile: `path` is a link, has a second hard link, or is not a regular file.
    """
    with suppress(FileNotFoundError):
        _check_plain(path, os.lstat(path), in_place=True)
    # the path may be replaced meanwhile: follow no link, wait for no pipe
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        _check_plain(path, os.fstat(descriptor), in_place=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_replaceable(path: Path) -> None:
    """Refuse a path with anything but a regular file: a rename must not replace it."""
    with suppress(FileNotFoundError):
        _check_plain(path, os.lstat(path), in_place=False)


def _check_plain(path: Path, found: os.stat_result, *, in_place: bool) -> None:
    if stat.S_ISREG(found.st_mode) and not (in_place and found.st_nlink > 1):
        return
    if stat.S_ISDIR(found.st_mode):
        what = "a directory"
    elif stat.S_ISLNK(found.st_mode):
        what = f"a link to {os.readlink(path)}; nothing is written through links"
    elif stat.S_ISREG(found.st_mode):
        what = "one of several names (hard links) of a file, which writing would change under all"
    else:
        what = "a pipe or device"
    raise UnusableFile(
        f"{path}: expected a file to write, got {what}. Move it away, or choose another output."
    )


def open_nameless(folder: Path) -> BinaryIO:
    """A new file without a name on the folder's disk; it is gone when this process ends."""
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def temporary_name(name: str) -> str:
    """Under which `replace_file` writes a file; a program that is killed may leave it."""
    return f"{name}.tmp"


def replace_file(disk: Disk, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a file under a temporary name and rename it over `path` once it is durable."""
    temporary = path.with_name(temporary_name(path.name))
    check_replaceable(path)
    check_replaceable(temporary)
    disk.remove(temporary)  # left by a program that was killed
    try:
        digest = _write_new(disk, temporary, chunks)
        disk.rename(temporary, path)
    except BaseException:
        # a disk that is full needs the space
        with suppress(OSError):
            disk.remove(temporary)
        raise
    disk.sync_folder(path.parent)
    return digest


def _write_new(disk: Disk, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    digest = hashlib.sha256()
    num_bytes = 0
    descriptor = disk.open_new(path)
    try:
        for chunk in chunks:
            disk.write(descriptor, chunk)
            digest.update(chunk)
            num_bytes += len(chunk)
        disk.fsync(descriptor)
    finally:
        disk.close(descriptor)
    return FileDigest(digest.hexdigest(), num_bytes)


def digest_file(path: Path) -> FileDigest:
    """SHA-256 and size of a file, read once."""
    with path.open("rb") as file:
        return digest_chunks(iter(lambda: file.read(2**20), b""))


def digest_chunks(chunks: Iterable[bytes]) -> FileDigest:
    """SHA-256 and size of what a file of these chunks would hold."""
    digest = hashlib.sha256()
    num_bytes = 0
    for chunk in chunks:
        digest.update(chunk)
        num_bytes += len(chunk)
    return FileDigest(digest.hexdigest(), num_bytes)
