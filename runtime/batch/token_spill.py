"""Keeps the token ids of rows on the disk between the scan and the run.

The ids are in a file without a name on the output's disk, so memory holds eight bytes per row, and
a killed program leaves no file. The size of the file is limited. A row whose ids are not kept is
encoded again.

Does not know about prompts. Guarantees: `ids_of` returns exactly the ids passed to `keep`, or None.
"""

import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..files.disk import open_nameless

MAX_BYTES = 4 * 2**30
SHARE_OF_DISK = 0.1
"""Share of the free disk space that the file may take; journal and output need the rest."""
_PIECE_BYTES = 2**20
_UNKNOWN = -1
_UINT32 = "I"


class TokenSpill:
    """A store of token ids by row; close it, or use it in `with`."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES):
        """Open the file in `folder`; if this fails, no ids are kept."""
        self.num_dropped = 0
        """The number of rows whose ids did not fit."""
        self._offsets = array("q")
        self._pending = bytearray()
        self._size = self._max_bytes = 0
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._file = open_nameless(folder)
            free = os.fstatvfs(self._file.fileno())
            self._max_bytes = min(max_bytes, int(SHARE_OF_DISK * free.f_bavail * free.f_frsize))

    def keep(self, row: int, ids: Sequence[int]) -> None:
        """Keep the ids of a row; rows must be passed in order, each at most once."""
        num_bytes = len(ids) * 4
        if self._file is None or self._size + num_bytes > self._max_bytes:
            self.num_dropped += 1
            return
        self._offsets.extend([_UNKNOWN] * (row - len(self._offsets)))
        self._offsets.append(self._size)
        self._pending += array(_UINT32, ids).tobytes()
        self._size += num_bytes
        if len(self._pending) >= _PIECE_BYTES:
            self._write()

    def ids_of(self, row: int, length: int) -> list[int] | None:
        """The `length` ids of a row; None if they are not kept."""
        if self._pending:
            self._write()
        offset = self._offsets[row] if row < len(self._offsets) else _UNKNOWN
        if self._file is None or offset == _UNKNOWN:
            return None
        ids = array(_UINT32)
        try:
            ids.frombytes(os.pread(self._file.fileno(), length * 4, offset))
        except (OSError, ValueError):
            return None
        return ids.tolist() if len(ids) == length else None

    def close(self) -> None:
        """Free the space on the disk."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "TokenSpill":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self) -> None:
        assert self._file is not None
        view = memoryview(bytes(self._pending))
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            # the disk is full, and the journal needs the remaining space
            self.num_dropped = sum(offset != _UNKNOWN for offset in self._offsets)
            self.close()
        self._pending.clear()
