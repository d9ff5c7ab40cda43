"""Counts compiles and names their programs, so that a run can prove that it made none.

jax reports the name of a compiled program, and logs its arguments before. A program that compiles
again under the same name has an argument of another shape or dtype, which the description names.

Knows nothing of graphs or grids. Guarantees: nothing that jax logs for others is lost or added.
"""

import logging
import threading
from collections.abc import Sequence

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_LOGGER = "jax._src.interpreters.pxla"
_MESSAGE = "Compiling %s with global shapes"


class CompileMonitor:
    """The programs given to the compiler since the monitor of this process exists.

    Loads from the persistent compilation cache count as well: neither may happen after the build.
    """

    def __init__(self):
        self.compiles: list[str] = []
        """A description of every compile, in order."""
        self._known: dict[str, tuple[str, ...]] = {}
        self._latest: dict[str, tuple[str, ...]] = {}
        # graphs compile in several threads
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        logger = logging.getLogger(_LOGGER)
        self._log_level = logger.getEffectiveLevel()
        logger.addFilter(self._on_record)
        logger.setLevel(min(logging.DEBUG, self._log_level))

    @property
    def num_compiles(self) -> int:
        """The number of compiles so far."""
        return len(self.compiles)

    def _on_record(self, record: logging.LogRecord) -> bool:
        """Note the arguments of a program; pass on only records of the former level."""
        arguments = record.args
        if record.msg.startswith(_MESSAGE) and isinstance(arguments, tuple) and len(arguments) > 1:
            types = arguments[1] if isinstance(arguments[1], tuple | list) else ()
            with self._lock:
                self._latest[str(arguments[0])] = tuple(map(_short, types))
        return record.levelno >= self._log_level

    def _on_duration(self, event: str, duration_secs: float, **facts: str | int) -> None:
        del duration_secs
        if event != _COMPILE_EVENT:
            return
        with self._lock:
            name = str(facts.get("fun_name", "a program"))
            now, before = self._latest.get(name, ()), self._known.get(name)
            self._known[name] = now
            self.compiles.append(f"{name}: {_differences(before, now)}")


def _differences(before: Sequence[str] | None, now: Sequence[str]) -> str:
    """The arguments of a program that differ from those of its last compile."""
    if before is None:
        return f"compiled for the first time, with {_listed(now)}"
    if len(before) != len(now):
        return f"compiled with {len(now)} arguments, before with {len(before)}"
    pairs = zip(before, now, strict=True)
    different = [f"argument {i} is {b}, was {a}" for i, (a, b) in enumerate(pairs) if a != b]
    return _listed(different) if different else "compiled again with the same arguments"


def _listed(texts: Sequence[str], limit: int = 4) -> str:
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return (", ".join(texts[:limit]) or "no arguments") + more


def _short(argument: object) -> str:
    """The dtype and shape of an argument, as in `float32[3]`."""
    return str(argument).removeprefix("ShapedArray(").removesuffix(")")


_monitor: CompileMonitor | None = None


def compile_monitor() -> CompileMonitor:
    """The monitor of this process. There is only one, as jax cannot remove a listener."""
    global _monitor
    if _monitor is None:
        _monitor = CompileMonitor()
    return _monitor
