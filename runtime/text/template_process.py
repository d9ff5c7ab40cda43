"""Owns the process that renders chat templates: starts, limits, kills and replaces it.

Knows nothing about tokens or messages: a context goes in, a text comes out. Guarantees: every call
returns or raises within its limits; after a call that had to be stopped the next one finds a fresh
process; the process ends with its owner. It is a new interpreter, never a fork of this one, which
may hold devices and threads.
"""

import contextlib
import importlib.util
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .template_child import read_frame, write_frame

_START_SECONDS = 60.0  # an interpreter and jinja2, on a machine that may be busy


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 5.0
    memory_bytes: int = 1 << 29
    max_characters: int = 1 << 24


class TemplateFailure(Exception):
    """A template that could not be compiled or rendered, or was stopped; says which and why."""


class TemplateProcess:
    """Renders one template; starts its process with the first call."""

    def __init__(self, template: str, limits: TemplateLimits):
        self._template = template
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_process = lambda: None
        self._variables: frozenset[str] = frozenset()
        self._broken: str | None = None

    def variables(self) -> frozenset[str]:
        """The names that the template expects from outside."""
        self._start()
        return self._variables

    def render(self, context: Mapping[str, object]) -> str:
        """Renders the template. Raises TemplateFailure."""
        self._start()
        return self._exchange({"context": context}, self._limits.wall_seconds)["text"]

    def close(self) -> None:
        """Ends the process; a later call would start another."""
        self._stop_process()
        self._process = None

    def _start(self) -> None:
        if self._broken is not None:
            raise TemplateFailure(self._broken)
        if self._process is not None and self._process.poll() is None:
            return
        if importlib.util.find_spec("jinja2") is None:
            raise ModuleNotFoundError(
                "chat templates need the package jinja2: pip install 'noria[hf]'", name="jinja2"
            )
        self.close()
        child = str(Path(__file__).with_name("template_child.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C lets rows in flight finish; they may need the process
        )
        self._stop_process = weakref.finalize(self, _stop, self._process)
        limits = self._limits
        setup = {
            "template": self._template,
            "memory_bytes": limits.memory_bytes,
            "cpu_seconds": limits.cpu_seconds,
            "max_characters": limits.max_characters,
        }
        try:
            self._variables = frozenset(self._exchange(setup, _START_SECONDS)["variables"])
        except TemplateFailure as failure:
            self._broken = str(failure)  # it does not compile, and never will
            raise

    def _exchange(self, frame: object, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        is_late = threading.Event()

        def stop_late_process() -> None:
            is_late.set()
            process.kill()  # both pipes then end, wherever this thread waits

        timer = threading.Timer(seconds, stop_late_process)
        timer.start()
        try:
            write_frame(process.stdin, frame)
            reply = read_frame(process.stdout)
        except (OSError, EOFError):
            reply = None
        finally:
            timer.cancel()
            timer.join()
        if reply is None or is_late.is_set() or reply.get("fatal"):
            self.close()
        if reply is None:
            raise TemplateFailure(self._why_ended(process.returncode, is_late.is_set(), seconds))
        if "error" in reply:
            raise TemplateFailure(reply["error"])
        return reply

    def _why_ended(self, returncode: int | None, is_late: bool, seconds: float) -> str:
        if is_late:
            return f"it takes longer than {seconds:g} s"
        if returncode == -signal.SIGXCPU:
            return f"it takes more than {self._limits.cpu_seconds:g} s of processor time"
        return f"its process ended with status {returncode}; the memory allowed may be used up"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):  # what was still to be written to one that is gone
            stream.close()
    try:
        process.wait(timeout=0.2)  # ends by itself with its pipes, and its status may say why
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
