"""Compiles programs without jax's persistent cache.

Executables are kept by plan (`runtime/bundles`), which finds them without a trace. jax's cache does
not help: a program that it loads for the CPU cannot be written again, and programs for absent
devices cannot be loaded. Guarantees: programs are neither kept nor looked up, whatever the user's
settings and earlier calls in this process are.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_ABSENT = "compile_only_runtime"


class _WithoutProgramCache:
    """A context in which compiles use no cache, in any thread.

    jax has one setting for all threads: the first thread to enter turns the cache off, and the last
    thread to leave restores the setting.
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


without_program_cache = _WithoutProgramCache()
"""Context manager: `with without_program_cache:` compiles without jax's persistent cache."""


def compile_program(
    lowered: jax.stages.Lowered, options: Mapping[str, Any], text_folder: Path | None = None
) -> jax.stages.Compiled:
    """Compile a lowered program that has shardings for its results.

    Programs for absent TPUs are also written as text, if `text_folder` is given.
    """
    sharding = jax.tree.leaves(lowered.out_info)[0].sharding
    device = next(iter(sharding.device_set))
    is_absent = device.client.runtime_type == _ABSENT
    if text_folder is not None and is_absent and device.platform == "tpu":
        options = {**options, "xla_dump_to": str(text_folder), "xla_dump_hlo_as_text": True}
    with without_program_cache:
        return lowered.compile(compiler_options=dict(options) or None)


def _use(is_used: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_used)
    # jax otherwise decides once for the whole process
    compilation_cache.reset_cache()
