"""The disk operations that durability depends on, as methods of one small class.

Every write that must survive a crash goes through a `Disk`, so a test can make any single operation
fail or stop the program there. Apart from caches and orbax checkpoints, no other module opens files
for writing.

Does not know about journals or rows. Guarantees: after `replace_file` returns, the file under its
final name is complete and survives a power cut; before that, the old file, or no file, has the
name. If writing fails, no part of the new file is left. Nothing is written through a link, or to a
pipe or device.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import UnusableFile


@dataclass(frozen=True)
class FileDigest:
    """The hash and the size that identify a file's content."""

    sha256: str
    num_bytes: int


class Disk:
    """The operations of the real disk."""

    def open_append(self, path: Path) -> int:
        """Open a regular file for reading and appending; create it if it is absent."""
        return open_in_place(path, os.O_CREAT | os.O_APPEND)

    def open_new(self, path: Path) -> int:
        """Create a file and open it for writing; fail if the name exists."""
        # a link, even one to nothing, counts as a file that is there
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, content: bytes | memoryview) -> None:
        """Write all of the content."""
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
        """Make the names in a folder durable: a rename changes the folder, not the file."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_in_place(path: Path, flags: int = os.O_CREAT) -> int:
    """Open a file for reading and writing in place; by default, create it if it is absent.

    Raises:
        FileNotFoundError: The file is absent, and `flags` do not create it.
        UnusableFile: `path` is a link, has a second hard link, or is not a regular file.
    """
    with suppress(FileNotFoundError):
        _check_plain(path, os.lstat(path), in_place=True)
    # another process may replace the path in between: follow no link, wait for no pipe
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        _check_plain(path, os.fstat(descriptor), in_place=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_replaceable(path: Path) -> None:
    """Check that a path is free or a regular file, which a rename may replace.

    Raises:
        UnusableFile: `path` is a link, a directory, a pipe or a device.
    """
    with suppress(FileNotFoundError):
        _check_plain(path, os.lstat(path), in_place=False)


def _check_plain(path: Path, status: os.stat_result, *, in_place: bool) -> None:
    if stat.S_ISREG(status.st_mode) and not (in_place and status.st_nlink > 1):
        return
    if stat.S_ISDIR(status.st_mode):
        kind = "a directory"
    elif stat.S_ISLNK(status.st_mode):
        kind = f"a link to {os.readlink(path)}; nothing is written through links"
    elif stat.S_ISREG(status.st_mode):
        kind = "a file with several names (hard links), which would change under all of them"
    else:
        kind = "a pipe or device"
    raise UnusableFile(
        f"{path}: expected a file to write, got {kind}. Move it away, or choose another output."
    )


def open_nameless(folder: Path) -> BinaryIO:
    """Open a new file without a name on the folder's disk; it disappears when this process ends."""
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def temporary_name(name: str) -> str:
    """The name under which `replace_file` first writes a file; a killed program may leave it."""
    return f"{name}.tmp"


def replace_file(disk: Disk, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a file under a temporary name, and rename it to `path` when it is durable.

    Raises:
        UnusableFile: `path` or the temporary path is not a regular file.
        OSError: The disk refuses an operation. The old file is left, unless only the last step, the
            sync of the folder, failed.
    """
    temporary = path.with_name(temporary_name(path.name))
    check_replaceable(path)
    check_replaceable(temporary)
    disk.remove(temporary)  # a killed program may have left it
    try:
        digest = _write_new(disk, temporary, chunks)
        disk.rename(temporary, path)
    except BaseException:
        # a full disk needs the space
        with suppress(OSError):
            disk.remove(temporary)
        raise
    disk.sync_folder(path.parent)
    return digest


def _write_new(disk: Disk, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    descriptor = disk.open_new(path)

    def written() -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            disk.write(descriptor, chunk)
            yield chunk

    try:
        digest = digest_chunks(written())
        disk.fsync(descriptor)
    finally:
        disk.close(descriptor)
    return digest


def digest_file(path: Path) -> FileDigest:
    """The SHA-256 and the size of a file, which is read once."""
    with path.open("rb") as file:
        return digest_chunks(iter(lambda: file.read(2**20), b""))


def digest_chunks(chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """The SHA-256 and the size of a file with these chunks."""
    digest = hashlib.sha256()
    num_bytes = 0
    for chunk in chunks:
        digest.update(chunk)
        num_bytes += len(chunk)
    return FileDigest(digest.hexdigest(), num_bytes)
