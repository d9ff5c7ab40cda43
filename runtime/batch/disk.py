"""The few disk operations that durability rests on, behind one small object.

Everything that must survive a crash goes through a `Disk`, so that a test can make any single one
of these operations fail, or stop the program there.

Knows nothing of journals or rows. Guarantees: after `replace_file` returns, the file under its
final name is whole and stays so over a power cut; before that, the old one (or none) is. Where it
cannot be written, nothing of the new one is left.
"""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileDigest:
    """What identifies a file's content."""

    sha256: str
    num_bytes: int


class Disk:
    """The real disk."""

    def open_append(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def open_new(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

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


def temporary_name(name: str) -> str:
    """Under which `replace_file` writes a file; a program that is killed may leave it."""
    return f"{name}.tmp"


def replace_file(disk: Disk, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a file under a temporary name and rename it over `path` once it is durable."""
    temporary = path.with_name(temporary_name(path.name))
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
