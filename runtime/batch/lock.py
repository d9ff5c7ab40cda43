"""The lock file of an output, which ensures one writer and names the process that holds it.

The lock is a POSIX record lock, which the system releases when its process dies. The file's text
(process id, host, start time) is for people, and for file systems shared by hosts that do not see
each other's locks. A lock left by a dead process of this host is taken over; a lock of another host
is refused, as this host cannot find out whether that process is alive.

Does not know about jobs. Guarantees: at most one holder at a time on one host; a file that is no
lock of noria is not changed.
"""

import fcntl
import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from ..errors import OutputIsLocked, UnusableFile
from ..files.disk import open_in_place
from .stop_signals import at_forced_end

_START = b'{"pid": '
"""The beginning of every lock of noria; an incomplete lock has a prefix of it."""


def lock_path(output: Path) -> Path:
    """The path of an output's lock."""
    return output.with_name(f"{output.name}.lock")


class JobLock:
    """A context manager that holds `path` as a lock file and removes it at the end.

    Raises:
        OutputIsLocked: Another process holds the lock, or may hold it on another host.
        UnusableFile: The file at `path` is no lock of noria.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None
        self._registered = ExitStack()

    def __enter__(self) -> "JobLock":
        while self._descriptor is None:
            descriptor = open_in_place(self.path)
            try:
                self._take(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if self._is_current(descriptor):
                self._descriptor = descriptor
            else:  # its holder removed the file after it was opened and before it was locked
                os.close(descriptor)
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(_this_process()).encode(), 0)
        except OSError as error:
            self.release()
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
        self._registered.enter_context(at_forced_end(self.release))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._registered.close()
        self.release()

    def release(self) -> None:
        """Remove the lock file if this process holds it, and no other file has replaced it."""
        if self._descriptor is not None:
            if self._is_current(self._descriptor):
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, descriptor: int) -> None:
        """Lock the open file, or raise an error."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._refusal(_read_owner(descriptor), "is running") from None
        # a power cut may leave a file of zeros with the old length
        start = os.pread(descriptor, len(_START), 0).rstrip(b"\0")
        if not _START.startswith(start):
            raise UnusableFile(
                f"{self.path}: expected a lock of noria or no file, got another file. Move it "
                "away, or choose another output."
            )
        owner = _read_owner(descriptor)
        this = _this_process()
        if owner is None:
            return
        if owner.get("host") != this["host"]:
            raise self._refusal(owner, f"may be running; if it is gone, delete {self.path}")
        if owner == this:  # a record lock does not stop its own process
            raise self._refusal(owner, "is this one")

    def _is_current(self, descriptor: int) -> bool:
        """Whether the open file still has the name of the lock."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _refusal(self, owner: dict[str, object] | None, state: str) -> OutputIsLocked:
        holder = "another process"
        if owner:
            holder = f"process {owner.get('pid')} on {owner.get('host')}"
        return OutputIsLocked(
            f"{self.path}: expected to be the only writer of this output, but {holder} holds it "
            f"and {state}. Wait for it, or write to another output."
        )


def _this_process() -> dict[str, object]:
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": _start_time(pid)}


def _start_time(pid: int) -> str:
    """Start of a process in clock ticks, to tell it from an earlier process with the same id."""
    if not sys.platform.startswith("linux"):
        return ""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[19]  # the name in parentheses may have spaces


def _read_owner(descriptor: int) -> dict[str, object] | None:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:  # empty or incomplete: its writer died while it took the lock
        return None
    return owner if isinstance(owner, dict) else None
