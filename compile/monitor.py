"""Counts compiles, so that a run can prove it made none. Knows nothing of graphs or grids."""

import threading

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileMonitor:
    """Number of programs handed to the compiler in this process since it was first asked for.

    Loads from the persistent compilation cache count too: after the build neither may happen.
    """

    def __init__(self):
        self.num_compiles = 0
        # graphs compile in several threads, and `+=` is not one step
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == _COMPILE_EVENT:
            with self._lock:
                self.num_compiles += 1


_monitor: CompileMonitor | None = None


def compile_monitor() -> CompileMonitor:
    """The process's monitor; jax offers no way to take a listener back, so there is one."""
    global _monitor
    if _monitor is None:
        _monitor = CompileMonitor()
    return _monitor
