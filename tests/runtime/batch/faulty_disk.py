"""A disk that fails at an operation of the test's choice."""

from noria.runtime.files.disk import Disk


class Crash(BaseException):
    """A simulated stop of the machine."""


class FaultyDisk(Disk):
    """A disk that fails at the k-th operation: once with an OSError, or for ever."""

    def __init__(self, at: int, error: BaseException | None = None, tear: bool = False):
        self.calls, self._at, self._error, self._tear = 0, at, error, tear

    def _count(self) -> bool:
        self.calls += 1
        if self._error is None:
            return False
        is_dead = isinstance(self._error, Crash) and self.calls > self._at
        if is_dead:
            raise self._error
        return self.calls == self._at

    def write(self, descriptor, content):
        if self._count():
            if self._tear:
                super().write(descriptor, content[: len(content) // 2])
            raise self._error
        super().write(descriptor, content)


def _counted(name):
    def operation(self, *arguments):
        if self._count():
            raise self._error
        return getattr(Disk, name)(self, *arguments)

    return operation


for _name in ("open_append", "open_new", "truncate", "fsync", "rename", "remove", "sync_folder"):
    setattr(FaultyDisk, _name, _counted(_name))
