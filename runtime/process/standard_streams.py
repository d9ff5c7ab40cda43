"""Gives the process of a command its three standard streams, whatever it was started with.

If a stream is closed (`>&-`), the next file that the process opens would get its number, and
messages of libraries would end in that file. Native libraries also print to standard output, where
only results belong.

Does not know about commands. Guarantees: descriptors 0 to 2 are open, everything but what is
written to `sys.stdout` goes to stderr, and writing to a stream that was closed is an error for
results and has no effect for messages.
"""

import fcntl
import io
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

native_outputs = [2]
"""The descriptors to which native libraries write messages, which all lead to stderr."""


def prepare_streams() -> None:
    """Open the standard streams that are closed, and keep results apart from other output."""
    # in this order, as a new descriptor is the lowest that is free; a closed standard output is
    # opened for reading, so that results are not lost without an error
    for descriptor, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
    # noria's own messages need no filter, which native messages may pass (`compiler_messages`)
    messages = os.dup(2)
    sys.stderr = os.fdopen(messages, "w", 1, errors="backslashreplace", closefd=False)
    results = os.dup(1)
    os.dup2(2, 1)
    native_outputs[:] = [1, 2]
    encoding = getattr(sys.stdout, "encoding", "utf-8")
    sys.stdout = os.fdopen(results, "w", encoding=encoding, closefd=False)


def is_closed(stream: TextIO) -> bool:
    """Whether standard output was closed when the process started."""
    try:
        flags = fcntl.fcntl(stream.fileno(), fcntl.F_GETFL)
    except OSError:  # a stream in memory
        return False
    return flags & os.O_ACCMODE == os.O_RDONLY


class TimedLines(io.TextIOBase):
    """A text stream that begins every line with the time of day; it is no terminal."""

    def __init__(self, stream: TextIO, now: Callable[[], str] | None = None):
        self._stream = stream
        self._now = now or (lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        self._is_at_start = True

    def write(self, text: str) -> int:
        """Write a text, with the time before each line that begins in it."""
        for line in text.splitlines(keepends=True):
            if self._is_at_start:
                self._stream.write(f"{self._now()} ")
            self._stream.write(line)
            self._is_at_start = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._stream.fileno()
