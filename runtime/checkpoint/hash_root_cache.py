"""Cache the hashes (hash roots) of unchanged weight files in the user's cache directory.

A file is identified by device, inode, size, and the times of its last changes. Programs can set all
of these except the time of the last change of status (ctime). Does not know how roots are computed.
Guarantees: a cache that other users may have written is not trusted; a cache that cannot be read or
written costs time only.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..files.file_facts import FileFacts
from ..files.folders import default_directory
from ..files.own_files import open_own_folder, read_file

MAX_FILES = 4096
MAX_BYTES = 2 * 2**20
SETTLED_NS = 2 * 10**9
"""The age at which the times of a file are final; some file systems count in steps of 2 s."""
NAME = "roots.json"


class HashRootCache:
    """The cached hash roots by file, read once when the object is made."""

    def __init__(self, folder: Path | None = None, clock_ns: Callable[[], int] = time.time_ns):
        self._folder = folder
        self._now_ns = clock_ns()
        self._roots: dict[str, str] = {}
        # RuntimeError: the user has no home directory
        with suppress(OSError, RuntimeError, ValueError):
            self._folder = folder or default_directory().with_name("weights")
            self._roots = _read(self._folder)

    def get(self, file: FileFacts) -> str | None:
        """The root of a file; None if it is not in the cache."""
        return self._roots.get(_key(file))

    def add(self, roots: Mapping[FileFacts, str]) -> None:
        """Add roots of files that were hashed after the object was made.

        A file that had changed shortly before is left out: a second change within the same tick of
        the file system's clock would be invisible.
        """
        settled = {
            _key(file): root
            for file, root in roots.items()
            if self._now_ns - max(file.ctime_ns, file.mtime_ns) > SETTLED_NS
        }
        if settled and self._folder is not None:
            with suppress(OSError, ValueError):
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                # other processes may have added roots in the meantime
                _write(self._folder, {**_read(self._folder), **settled})


def _key(file: FileFacts) -> str:
    return " ".join(map(str, file))


def _read(folder: Path) -> dict[str, str]:
    """Read the roots in a folder; raises ValueError or OSError if the folder must not be used."""
    try:
        with open_own_folder(folder) as descriptor:
            if os.stat(NAME, dir_fd=descriptor, follow_symlinks=False).st_size > MAX_BYTES:
                return {}
            content = read_file(NAME, descriptor)
    except FileNotFoundError:
        return {}
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    is_valid = isinstance(stored, dict) and all(
        isinstance(root, str) and re.fullmatch("[0-9a-f]{64}", root) for root in stored.values()
    )
    return stored if is_valid else {}


def _write(folder: Path, roots: Mapping[str, str]) -> None:
    """Replace the roots in a folder; the oldest roots are dropped if there are too many."""
    newest = dict(list(roots.items())[-MAX_FILES:])
    with (
        open_own_folder(folder),
        tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file,
    ):
        try:
            json.dump(newest, file)
            file.close()
            os.replace(file.name, folder / NAME)
        except BaseException:
            os.unlink(file.name)
            raise
