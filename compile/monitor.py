"""Counts compiles, so that a run can prove that it made none. Knows nothing of graphs or grids."""

import threading

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileMonitor:
    """The number of programs given to the compiler since the monitor of this process exists.

    Loads from the persistent compilation cache count as well: neither may happen after the build.
    """

    def __init__(self):
        self.num_compiles = 0
        # graphs compile in several threads, and `+=` is not atomic
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == _COMPILE_EVENT:
            with self._lock:
                self.num_compiles += 1


_monitor: CompileMonitor | None = None


def compile_monitor() -> CompileMonitor:
    """The monitor of this process. There is only one, as jax cannot remove a listener."""
    global _monitor
    if _monitor is None:
        _monitor = CompileMonitor()
    return _monitor
