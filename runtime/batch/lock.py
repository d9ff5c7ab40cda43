"""The lock of an output, which ensures one writer also among hosts that share a disk.

The lock is a file that names its owner. The owner changes it every `BEAT_SECONDS`. An owner that
has not changed it for `SILENCE_SECONDS`, measured by the clock of the process that waits, counts
as dead, and its lock is taken over. An owner of the same machine that has died is taken over at
once, as the system has released its record lock of the file.

A process takes the lock over by creating a file with the next number, `NAME.2` after `NAME`. Only
one process can create it. It then checks that the file before it is still there and unchanged, and
that there is no other; otherwise it removes its own file and begins again. So two processes that
both created a file cannot both pass the check. An owner that was paused sees the later file, or
misses its own, and ends its process.

Does not know about jobs. Guarantees: at most one owner at a time takes the lock; a file that is no
lock of noria is not changed.
"""

import fcntl
import json
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EXIT_RESUMABLE, OutputIsLocked, UnusableFile
from ..files.disk import open_in_place
from ..process.stop_signals import END_SECONDS, at_forced_end, end_process

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
QUIET_SECONDS = 3.0
"""The time after which a process says that it waits for a lock."""
_POLL_SECONDS = 0.1
_EMPTY_SECONDS = 0.1
"""A file that is empty for longer has no owner: the owner writes as soon as it has created it."""
_START = b'{"pid": '
"""The beginning of every lock of noria; an incomplete lock has a prefix of it."""
_MAX_BYTES = 4096
_owned: set[str] = set()
"""The paths of the locks that this process holds."""


@dataclass(frozen=True)
class _Found:
    """A lock file that another process holds or held, and its content."""

    number: int
    content: bytes

    @property
    def owner(self) -> dict[str, Any]:
        """The facts of the owner; none if it died while it wrote them."""
        try:
            owner = json.loads(self.content)
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def __str__(self) -> str:
        owner = self.owner
        if not owner:
            return "another process"
        return f"process {owner.get('pid')} on {owner.get('host')}"


class JobLock:
    """A context manager that holds a lock and removes its file at the end.

    Attributes:
        path: The path of the first lock file; later ones have a number at the end.
        took_over: Whether the owner before was silent, but may only have been paused. It may still
            write to files that it has open.

    Raises:
        OutputIsLocked: Another process holds the lock.
        UnusableFile: The file at `path` is no lock of noria.
    """

    def __init__(self, path: Path, note: Callable[[str], object] = lambda text: None):
        self.path = path
        self.took_over = False
        self._note = note
        self._number = 0
        self._descriptor: int | None = None
        self._registered = ExitStack()
        self._released = threading.Event()
        # the file is not changed while it is removed; reentrant, as a beat may end the process
        self._changing = threading.RLock()
        self._facts: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": _machine(),
            "token": uuid.uuid4().hex,
            "beat": 0,
        }
        self._last_beat = 0.0

    def __enter__(self) -> "JobLock":
        # before the file is opened: to close it again would release the record lock
        if self._place in _owned:
            raise self._refusal("this process", "is running")
        try:
            self._take()
            _owned.add(self._place)
            self._registered.enter_context(at_forced_end(lambda code: self.release()))
            threading.Thread(target=self._beat, name="noria lock", daemon=True).start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _take(self) -> None:
        """Create the lock file, after the end of its owner if there is one."""
        seen, since, has_said = None, 0.0, False
        while self._descriptor is None:
            now, numbers = time.monotonic(), self._numbers()
            found = self._read(numbers[-1]) if numbers else None
            if found is None:
                self._try_to_create(1, None)
                continue
            owner = found.number, found.owner.get("token")
            if seen is None or owner != (seen.number, seen.owner.get("token")):
                seen, since = found, now
            elif found != seen:
                raise self._refusal(found, "is running")
            silence = now - since
            if is_dead := self._is_dead(found, silence):
                self._try_to_create(found.number + 1, found)
            elif silence >= SILENCE_SECONDS:
                self.took_over = self._try_to_create(found.number + 1, found)
            if not is_dead and silence >= QUIET_SECONDS and not has_said:
                has_said = True
                self._note(
                    f"{self._path(found.number)}: waits for {found}, which has been silent for "
                    f"{silence:.0f} s; after {SILENCE_SECONDS:g} s its lock is taken over"
                )
            if self._descriptor is None:
                time.sleep(_POLL_SECONDS)

    def __exit__(self, *exception: object) -> None:
        self._registered.close()
        self.release()

    def release(self) -> None:
        """Remove the lock file if this process holds it, and no other file has replaced it."""
        self._released.set()
        # a beat may hang in a file system, and must not keep the process alive
        is_alone = self._changing.acquire(timeout=END_SECONDS / 3)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _owned.discard(self._place)
            self._remove(descriptor)
        if is_alone:
            self._changing.release()

    def check(self) -> None:
        """Check that no other process has taken the lock over; call it before files are replaced.

        Raises:
            OutputIsLocked: This process was silent, and another has the lock, or had it.
        """
        if (loss := self._loss()) is not None:
            raise OutputIsLocked(loss)

    @property
    def _place(self) -> str:
        return os.path.realpath(self.path)

    def _path(self, number: int) -> Path:
        return self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number}")

    def _numbers(self) -> list[int]:
        """The numbers of all lock files, in order."""
        first, names = self.path.name, os.listdir(self.path.parent)
        ends = [name[len(first) + 1 :] for name in names if name.startswith(f"{first}.")]
        numbers = [int(end) for end in ends if end.isdecimal() and str(int(end)) == end]
        return sorted([1] * (first in names) + [number for number in numbers if number > 1])

    def _read(self, number: int) -> _Found | None:
        """The lock file of a number; None if it is gone."""
        path = self._path(number)
        try:
            descriptor = open_in_place(path, flags=0)
        except FileNotFoundError:
            return None
        try:
            content = os.pread(descriptor, _MAX_BYTES, 0).rstrip(b"\0 ")
        finally:
            os.close(descriptor)
        # a power cut may leave a file of zeros
        if not (content.startswith(_START) or _START.startswith(content)):
            raise UnusableFile(
                f"{path}: expected a lock of noria or no file, got another file. Move it away, or "
                "choose another output."
            )
        return _Found(number, content)

    def _is_dead(self, found: _Found, silence: float) -> bool:
        """Whether the owner was a process of this machine that has ended."""
        owner = found.owner
        if not owner and silence >= _EMPTY_SECONDS and self._is_empty(found):
            # its owner was killed before it wrote, or it will see that another file is there
            return not self._is_held(found)
        if not owner or owner.get("machine") != self._facts["machine"]:
            return False
        # containers of one machine may see record locks of their own only
        is_certain = owner.get("host") == self._facts["host"] or silence > 3 * BEAT_SECONDS
        return is_certain and not self._is_held(found)

    def _is_empty(self, found: _Found) -> bool:
        """Whether nothing was ever written into a lock file."""
        try:
            return self._path(found.number).stat().st_size == 0
        except FileNotFoundError:
            return False

    def _is_held(self, found: _Found) -> bool:
        """Whether a process that this system sees holds the record lock of a lock file."""
        try:
            descriptor = open_in_place(self._path(found.number), flags=0)
        except FileNotFoundError:
            return True  # its owner or a successor has just removed it
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _try_to_create(self, number: int, before: _Found | None) -> bool:
        """Create the lock file of a number, unless another process does or the lock has changed."""
        path = self._path(number)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        self._number = number
        try:
            with suppress(OSError):  # without record locks, a dead owner is found by its silence
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
            self._write(descriptor)
            numbers = self._numbers()  # a successor may have removed the file of this process
            if before is None:
                is_ours = numbers == [number]
            else:
                is_ours = numbers[-2:] == [before.number, number]
                is_ours = is_ours and self._read(before.number) == before
        except BaseException as error:
            self._remove(descriptor)
            if isinstance(error, OSError) and error.filename is None:
                raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
            raise
        if not is_ours:
            self._remove(descriptor)
            time.sleep(random.uniform(0, _POLL_SECONDS))
            return False
        for old in numbers[:-1]:
            self._path(old).unlink(missing_ok=True)
        self._descriptor, self._last_beat = descriptor, time.monotonic()
        return True

    def _write(self, descriptor: int) -> None:
        # padded, so that a shorter content never has the end of a longer one
        os.pwrite(descriptor, json.dumps(self._facts).encode().ljust(512), 0)
        with suppress(OSError):
            os.fsync(descriptor)

    def _remove(self, descriptor: int) -> None:
        """Remove the file of this process, if it still has its name, and close it."""
        if self._is_current(descriptor):
            self._path(self._number).unlink(missing_ok=True)
        os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        """Whether the open file still has the name of the lock."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self._path(self._number)))
        except FileNotFoundError:
            return False

    def _beat(self) -> None:
        """Change the file at intervals, and end the process if another one has the lock."""
        while not self._released.wait(BEAT_SECONDS):
            # the next beat may succeed
            with self._changing, suppress(OSError, UnusableFile):
                loss, descriptor = self._loss(), self._descriptor
                if loss is not None:
                    end_process(loss, EXIT_RESUMABLE)
                if descriptor is not None:
                    self._facts["beat"] += 1
                    self._write(descriptor)
                    self._last_beat = time.monotonic()

    def _loss(self) -> str | None:
        """The reason why this process no longer has the lock; None if it has it."""
        descriptor = self._descriptor
        if descriptor is None:
            return None
        after = self._read(self._number + 1)
        silence = time.monotonic() - self._last_beat
        # a lock file that somebody deletes ends no job, unless it was long enough to take it over
        if after is None and (self._is_current(descriptor) or silence < SILENCE_SECONDS):
            return None
        who = "another process" if after is None else str(after)
        return (
            f"{self.path}: this process was silent for {silence:.0f} s, and {who} has taken over "
            "the output. Rows that were finished before are kept; this process ends."
        )

    def _refusal(self, owner: object, state: str) -> OutputIsLocked:
        return OutputIsLocked(
            f"{self.path}: expected to be the only writer of this output, but {owner} holds it and "
            f"{state}. Wait for it, or write to another output."
        )


def _machine() -> str:
    """An id of the running system: containers share it, and another boot has another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"
