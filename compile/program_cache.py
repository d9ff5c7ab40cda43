"""Compiling without jax's persistent cache of programs.

Graphs are kept by their plan (`runtime/bundles`), which needs no trace to find them. jax's cache is
of no use for them: what it loads for the CPU cannot be written again, and programs for devices that
are not there cannot be loaded. Guarantees: programs are neither kept nor looked up, whatever the
user's settings or earlier calls in this process say.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from .programs.program_text import writing_options

_ABSENT = "compile_only_runtime"


class _Anew:
    """What compiles inside is neither kept nor looked up, in any thread.

    jax has one setting for all threads: the first to enter turns the cache off, the last to leave
    turns it on again, where it was.
    """

    def __init__(self):
        self._lock, self._num_inside, self._was_used = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._was_used = jax.config.values["jax_enable_compilation_cache"]
                _use(False)
            self._num_inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                _use(self._was_used)


anew = _Anew()
"""`with anew:` compiles without the cache."""


def compile_program(
    lowered: jax.stages.Lowered, options: Mapping[str, Any], text_folder: Path | None = None
) -> jax.stages.Compiled:
    """Compile what was lowered with the placement of its results.

    Programs for absent TPUs are also written as text, if there is a folder for it.
    """
    sharding = jax.tree.leaves(lowered.out_info)[0].sharding
    device = next(iter(sharding.device_set))
    is_absent = device.client.runtime_type == _ABSENT
    if text_folder is not None and is_absent and device.platform == "tpu":
        options = {**options, **writing_options(text_folder)}
    with anew:
        return lowered.compile(compiler_options=dict(options) or None)


def _use(is_used: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_used)
    # the decision is otherwise made once for a process
    compilation_cache.reset_cache()
