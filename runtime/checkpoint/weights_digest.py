"""Compute the digest of all bytes of a model's weights in the background.

The root of a file is the SHA-256 of the SHA-256 hashes of its blocks. The digest is the SHA-256 of
the name, the size and the root of all files, in the order of their names. Threads hash the blocks,
as hashlib releases the interpreter lock. Processes that share the files hash a part of the blocks
each. Roots of unchanged files are cached in the user's cache directory.

Does not know the meaning of weights. Guarantees: `CheckpointChanged` is raised if a file changes
between `start` and the end of `result`; all processes of a job have the same digest, or the job
ends with an error.
"""

import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointChanged
from ..files.file_checks import default_directory
from ..files.file_facts import FileFacts, FileStamp
from ..files.own_files import open_own_folder, read_file
from ..pods.peers import ALONE, Peers

MAX_FILES = 4096
MAX_BYTES = 2 * 2**20
SETTLED_NS = 2 * 10**9
"""The age at which the times of a file are final; some file systems count in steps of 2 s."""
NAME = "roots.json"


class HashRootCache:
    """The cached hash roots by file, read once when the object is made.

    A file is identified by device, inode, size, and the times of its last changes. Programs can set
    all of these except the time of the last change of status (ctime). A cache that other users may
    have written is not trusted; a cache that cannot be read or written costs time only.
    """

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


BLOCK_BYTES = 64 * 2**20
PIECE_BYTES = 2**20
"""The number of bytes that are read at once, which stay in the processor's cache for hashing."""
MAX_THREADS = 8


class FileBlock(NamedTuple):
    """A block of a weight file; the last block of a file may be shorter than the others."""

    file: str
    start: int
    end: int


class WeightsDigest:
    """The digest of weight files; their names do not depend on the place of the model.

    All processes of a job call `start`, and later `result`, in the same order.
    """

    def __init__(self, files: Mapping[str, Path], peers: Peers = ALONE):
        self._files = dict(sorted(files.items()))
        self._peers = peers
        self._hashing: _Hashing | None = None
        self._digest: str | None = None

    def start(self) -> None:
        """Begin to hash the files without a cached root; a second call does nothing."""
        if self._hashing is not None:
            return
        self._stamps = {name: FileStamp(path) for name, path in self._files.items()}
        self._cache = HashRootCache()
        # without the number of the device, the facts of a shared file are equal on all hosts; a
        # copy has other times or inodes
        seen = {name: " ".join(map(str, stamp.facts[1:])) for name, stamp in self._stamps.items()}
        known = {name: self._cache.get(stamp.facts) for name, stamp in self._stamps.items()}
        everyone = self._peers.gather({"seen": seen, "known": known})
        # a process shares the work with processes that see the same files, not with copies
        self._sharing = [rank for rank, other in enumerate(everyone) if other["seen"] == seen]
        self._roots: dict[str, str] = {}
        for name in self._files:
            roots = [everyone[rank]["known"][name] for rank in self._sharing]
            if root := next(filter(None, roots), None):
                self._roots[name] = root
        blocks = [block for name in self._files if name not in self._roots
                  for block in self._blocks(name)]  # fmt: skip
        own = blocks[self._sharing.index(self._peers.rank) :: len(self._sharing)]
        self._hashing = _Hashing(self._files, own)

    def result(self) -> str:
        """Wait for the digest, and return `sha256:` and 64 hexadecimal digits."""
        if self._digest is None:
            self.start()
            self._digest = self._joined()
            self._peers.agree(lambda: {"weights": str(self._digest)})
        return self._digest

    def _joined(self) -> str:
        assert self._hashing is not None
        own = {f"{block.file}\0{block.start}": sha for block, sha in self._hashing.join().items()}
        everyone = self._peers.gather(own)
        hashes = {key: sha for rank in self._sharing for key, sha in everyone[rank].items()}
        computed = {
            name: _root(hashes[f"{name}\0{block.start}"] for block in self._blocks(name))
            for name in self._files
            if name not in self._roots
        }
        for stamp in self._stamps.values():
            stamp.check()
        self._cache.add({self._stamps[name].facts: root for name, root in computed.items()})
        self._roots |= computed
        digest = hashlib.sha256(b"noria weights 1\n")
        for name, stamp in self._stamps.items():
            digest.update(f"{name}\0{stamp.facts.size}\0{self._roots[name]}\n".encode())
        return f"sha256:{digest.hexdigest()}"

    def _blocks(self, name: str) -> list[FileBlock]:
        size = self._stamps[name].facts.size
        starts = range(0, size, BLOCK_BYTES)
        return [FileBlock(name, start, min(start + BLOCK_BYTES, size)) for start in starts]


class _Hashing:
    """Threads that hash blocks; they do not keep the process alive."""

    def __init__(self, files: Mapping[str, Path], blocks: Iterable[FileBlock]):
        self._files = files
        self._waiting = deque(blocks)
        self._hashes: dict[FileBlock, str] = {}
        self._error: BaseException | None = None
        count = min(len(self._waiting), os.cpu_count() or 1, MAX_THREADS)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> dict[FileBlock, str]:
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._hashes

    def _run(self) -> None:
        try:
            while (block := self._next()) is not None:
                self._hashes[block] = _hash_block(self._files[block.file], block)
        except BaseException as error:
            self._waiting.clear()
            self._error = error

    def _next(self) -> FileBlock | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None


def _hash_block(path: Path, block: FileBlock) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(PIECE_BYTES, block.end - block.start)))
    position = block.start
    with path.open("rb", buffering=0) as file:
        file.seek(position)
        while position < block.end:
            count = file.readinto(buffer[: block.end - position])
            if not count:
                raise CheckpointChanged(
                    f"{path}: expected {block.end} bytes, got {position}: the file became shorter "
                    f"while it was read. Start again."
                )
            digest.update(buffer[:count])
            position += count
    return digest.hexdigest()


def _root(hashes: Iterable[str]) -> str:
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()
