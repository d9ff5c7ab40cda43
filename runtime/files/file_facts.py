"""The facts that show whether a file has changed. Does not know what files contain."""

import os
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointChanged


class FileFacts(NamedTuple):
    """Identity, size and times of a file; a change of its content changes one of them."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileFacts":
        """Read the facts of the file at `path`."""
        status = os.stat(path)
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class FileStamp:
    """The facts of a file at the time it was opened, to detect later changes."""

    def __init__(self, path: Path):
        self._path = path
        self.facts = FileFacts.of(path)

    def check(self) -> None:
        """Raise `CheckpointChanged` if the file is not the one that was opened."""
        try:
            now = FileFacts.of(self._path)
        except FileNotFoundError:
            raise CheckpointChanged(
                f"{self._path}: expected the file as it was opened, got none. It was removed while "
                f"it was read: start again."
            ) from None
        if now != self.facts:
            changes = ", ".join(
                f"{name} {then} to {value}"
                for name, then, value in zip(now._fields, self.facts, now, strict=True)
                if then != value
            )
            raise CheckpointChanged(
                f"{self._path}: expected the file as it was opened, got another one ({changes}). "
                f"It changed while it was read: start again."
            )

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes at an offset; raise `CheckpointChanged` as `check` does.

        A memory map would end the process by a signal if the file became shorter.
        """
        self.check()
        done = 0
        with self._path.open("rb", buffering=0) as file:
            file.seek(offset)
            while done < len(buffer):
                got = file.readinto(buffer[done:])
                if not got:
                    raise CheckpointChanged(
                        f"{self._path}: expected {len(buffer)} bytes at {offset}, got {done}: "
                        f"the file became shorter while it was read."
                    )
                done += got
