"""Manage the process that renders a template: start, limit, kill and replace it.

The process is a new interpreter and never a fork of this one, which may hold devices and threads.
Does not know about tokens or messages: it turns contexts into texts, many at a time. Guarantees:
each call returns within the limits of its renderings; a rendering that had to be stopped does not
affect others, as the next one gets a new process; a template that has to be stopped several times
in a row is no longer used; the process ends with its owner.
"""

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .template_child import encode_frame, read_frame

_START_SECONDS = 60.0  # an interpreter and jinja2, on a machine that may be busy
_PIECE_BYTES = 1 << 16
_MAX_STOPS = 3
"""The number of stopped renderings in a row after which the template is no longer used."""


@dataclass(frozen=True)
class TemplateLimits:
    """The limits of one rendering."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 5.0
    memory_bytes: int = 1 << 29
    max_characters: int = 1 << 24


class TemplateFailure(Exception):
    """A template could not be compiled or rendered, or was stopped; the message says why."""


class _Timeout(Exception):
    """A pipe could not be read or written in time."""


class TemplateProcess:
    """Renders one template; the first call starts its process."""

    def __init__(
        self,
        template: str,
        limits: TemplateLimits,
        now: datetime | None,
        *,
        is_strict: bool = False,
    ):
        """Start nothing yet.

        Args:
          template: The source of the template.
          limits: The limits of one rendering.
          now: The local time that the template sees; None for a template without a clock.
          is_strict: Whether a value that is undefined, or is neither text nor a number, fails.
        """
        self._template = template
        self._is_strict = is_strict
        self._limits = limits
        self._now = now
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_process = lambda: None
        self._variables: frozenset[str] = frozenset()
        self._received = bytearray()
        self._broken: str | None = None
        self._num_stops = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self.reads_clock = False
        """Whether a rendering has read the date or time."""

    @property
    def gave_up(self) -> str | None:
        """The reason why the template is no longer used; None while it is used."""
        return self._broken if self._num_stops >= _MAX_STOPS else None

    def variables(self) -> frozenset[str]:
        """The names of the template's variables; raises TemplateFailure."""
        with self._lock:
            self._start()
            return self._variables

    def render(
        self, contexts: Sequence[Mapping[str, object]], *, is_measured: bool = False
    ) -> list[str | TemplateFailure]:
        """Render the template for each context; the item of a failed context is its failure.

        `is_measured` says that texts stand for answers that are not known yet: the filter
        `from_json` then takes any text, which is its own value and all parts of it.
        """
        rendered: list[str | TemplateFailure] = []
        with self._lock:
            while len(rendered) < len(contexts):
                try:
                    self._start()
                    waiting = contexts[len(rendered) :]
                    head = {"num_contexts": len(waiting), "is_measured": is_measured}
                    self._send(head, *waiting)
                    while len(rendered) < len(contexts):
                        rendered.append(self._next_text())
                except TemplateFailure as failure:
                    # the process has ended or cannot start: the other contexts get a new one
                    rendered.append(failure)
        return rendered

    def close(self) -> None:
        """End the process, and a running call of another thread; a later call starts a new one."""
        self._is_closing = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()
            self._is_closing = False

    def _end(self) -> None:
        self._stop_process()
        self._process = None
        self._received.clear()

    def _next_text(self) -> str | TemplateFailure:
        """The next reply; raises TemplateFailure if the process can send no more replies."""
        try:
            reply = self._receive(self._limits.wall_seconds)
        except TemplateFailure as failure:
            self._num_stops += 1
            if self._num_stops >= _MAX_STOPS:
                self._broken = f"{failure}, {self._num_stops} times in a row; it is no longer used"
            raise
        self._num_stops = 0
        self.reads_clock = self.reads_clock or reply["reads_clock"]
        return TemplateFailure(reply["error"]) if "error" in reply else reply["text"]

    def _start(self) -> None:
        if self._is_closing:
            raise TemplateFailure("it was closed")
        if self._broken is not None:
            raise TemplateFailure(self._broken)
        if self._process is not None and self._process.poll() is None:
            return
        if importlib.util.find_spec("jinja2") is None:
            raise ModuleNotFoundError(
                "chat templates need the package jinja2: pip install 'noria[hf]'", name="jinja2"
            )
        self._end()
        child = str(Path(__file__).with_name("template_child.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # after Ctrl-C, running rows may still need the process
        )
        assert self._process.stdin is not None
        os.set_blocking(
            self._process.stdin.fileno(), False
        )  # writing to a full pipe must not block
        self._stop_process = weakref.finalize(self, _stop, self._process)
        limits = self._limits
        setup = {
            "template": self._template,
            "memory_bytes": limits.memory_bytes,
            "cpu_seconds": limits.cpu_seconds,
            "max_characters": limits.max_characters,
            "now": self._now and self._now.isoformat(),
            "is_strict": self._is_strict,
        }
        try:
            self._send(setup)
            self._variables = frozenset(self._receive(_START_SECONDS)["variables"])
        except TemplateFailure as failure:
            self._broken = str(failure)  # the template does not compile
            raise

    def _send(self, *values: object) -> None:
        data = memoryview(b"".join(map(encode_frame, values)))
        deadline = time.monotonic() + self._limits.wall_seconds
        try:
            while data:
                descriptor = self._wait("stdin", select.POLLOUT, deadline)
                data = data[os.write(descriptor, data[:_PIECE_BYTES]) :]
        except (OSError, _Timeout) as error:
            raise self._end_failed(error, self._limits.wall_seconds) from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds

        def read(count: int) -> bytes:
            while len(self._received) < count:
                descriptor = self._wait("stdout", select.POLLIN, deadline)
                if not (piece := os.read(descriptor, _PIECE_BYTES)):
                    raise EOFError
                self._received += piece
            data = bytes(self._received[:count])
            del self._received[:count]
            return data

        try:
            reply = read_frame(read)
        except (OSError, EOFError, _Timeout) as error:
            raise self._end_failed(error, seconds) from None
        if reply.get("fatal"):
            self._end()
            raise TemplateFailure(reply["error"])
        return reply

    def _wait(self, name: str, event: int, deadline: float) -> int:
        """Wait until a pipe can be read or written; returns its descriptor."""
        descriptor = getattr(self._process, name).fileno()
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _Timeout
        return descriptor

    def _end_failed(self, error: Exception, seconds: float) -> TemplateFailure:
        process = self._process
        assert process is not None
        reason = f"it takes longer than {seconds:g} s"
        if isinstance(error, _Timeout):
            process.kill()
        self._end()
        if not isinstance(error, _Timeout):
            status = process.returncode
            reason = f"its process ended with status {status}; the memory allowed may be used up"
            if status == -signal.SIGXCPU:
                reason = f"it takes more than {self._limits.cpu_seconds:g} s of processor time"
        return TemplateFailure(reason)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):  # buffered data for a process that has ended
            stream.close()
    try:
        process.wait(timeout=0.2)  # it ends with its pipes, and its status may tell the reason
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
