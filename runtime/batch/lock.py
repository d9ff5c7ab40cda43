"""One writer for each output file: a lock file that says who holds it.

The lock is a POSIX record lock, which the system drops when its process dies, whatever the cause;
the file's text (process id, host, start time) is for people, and for file systems shared by hosts
that do not see each other's locks. A lock left by a dead process of this host is taken over; one of
another host is refused, as nobody here can tell whether that process lives.

Knows nothing of jobs. Guarantees: at most one holder at a time on one host; a file that is no lock
of noria is left as it is.
"""

import fcntl
import json
import os
import socket
import sys
from pathlib import Path
from types import TracebackType

from ..errors import OutputIsLocked, UnusableFile
from ..files.disk import open_in_place

_START = b'{"pid": '
"""The beginning of every lock of noria, even of one that was cut short."""


def lock_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.lock")


class JobLock:
    """Context manager that holds `path` as a lock file and removes it at the end."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

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
            else:  # its holder removed the file between our open and our lock
                os.close(descriptor)
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(_this_process()).encode(), 0)
        except OSError as error:
            self.release()
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock, if it is held and nobody has put another one in its place."""
        if self._descriptor is not None:
            if self._is_current(self._descriptor):
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._refusal(_read_owner(descriptor), "is running") from None
        # zeros: a power cut may keep a file's length and lose its content
        start = os.pread(descriptor, len(_START), 0).rstrip(b"\0")
        if not _START.startswith(start):
            raise UnusableFile(
                f"{self.path}: expected a lock of noria or nothing, got another file. Move it "
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
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _refusal(self, owner: dict[str, object] | None, state: str) -> OutputIsLocked:
        who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another process"
        return OutputIsLocked(
            f"{self.path}: expected to be the only writer of this output, but {who} holds it "
            f"and {state}. Wait for it, or write to another output."
        )


def _this_process() -> dict[str, object]:
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": _start_time(pid)}


def _start_time(pid: int) -> str:
    """Start of a process in clock ticks: tells it from an earlier one with the same id."""
    if not sys.platform.startswith("linux"):
        return ""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[19]  # the name in parentheses may hold spaces


def _read_owner(descriptor: int) -> dict[str, object] | None:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:  # empty or torn: its writer died while taking it
        return None
    return owner if isinstance(owner, dict) else None
