"""Counts compiles, so that a run can prove it made none. Knows nothing of graphs or grids."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompileMonitor:
    """Number of programs handed to the compiler in this process since it was first asked for.

    Loads from the persistent compilation cache count too: after the build neither may happen.

    Attributes:
      num_compiles: All but those that were announced.
      num_announced: Those within `announced`.
    """

    def __init__(self):
        self.num_compiles = self.num_announced = 0
        self._local = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def take_cache_hit(self) -> bool:
        """Whether this thread's latest compile came from the persistent cache; forgets it."""
        hit = getattr(self._local, "hit", False)
        self._local.hit = False
        return hit

    @contextmanager
    def announced(self) -> Iterator[None]:
        """What this thread compiles within is said to the user, as a late part of the build."""
        self._local.is_announced = True
        try:
            yield
        finally:
            self._local.is_announced = False

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event != _COMPILE_EVENT:
            return
        if getattr(self._local, "is_announced", False):
            self.num_announced += 1
        else:
            self.num_compiles += 1

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        del kwargs
        if event == _CACHE_HIT_EVENT:
            self._local.hit = True


_monitor: CompileMonitor | None = None


def compile_monitor() -> CompileMonitor:
    """The process's monitor; jax offers no way to take a listener back, so there is one."""
    global _monitor
    if _monitor is None:
        _monitor = CompileMonitor()
    return _monitor
