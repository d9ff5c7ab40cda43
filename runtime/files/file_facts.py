"""Facts of a weight file that tell whether it has changed. Knows nothing of what files hold."""

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
        found = os.stat(path)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FileStamp:
    """The facts of a file when it was opened, to notice a later change."""

    def __init__(self, path: Path):
        self._path = path
        self.facts = FileFacts.of(path)

    def check(self) -> None:
        """Raise `CheckpointChanged` if the file is not the one that was opened."""
        if (now := FileFacts.of(self._path)) != self.facts:
            changes = ", ".join(
                f"{name} {then} to {value}"
                for name, then, value in zip(now._fields, self.facts, now, strict=True)
                if then != value
            )
            raise CheckpointChanged(
                f"{self._path}: expected the file as it was opened, got another one ({changes}). "
                f"It changed while it was read: start again."
            )
