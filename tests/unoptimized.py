"""Compile for simulated CPU devices without LLVM's optimizations, in half the time.

Other targets are compiled as usual. XLA_FLAGS would also reach the compiler for TPU, which does not
know the option about fusions and refuses to start.
"""

from typing import Any

import jax
from jax._src import compiler

_optimized_options = compiler.get_compile_options


def set_optimized(is_optimized: bool) -> None:
    """Choose whether LLVM optimizes the programs that jax compiles from now on for the CPU."""
    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    compiler.get_compile_options = _optimized_options if is_optimized else _unoptimized_options


def optimize_only_what_is_read() -> None:
    """From now on leave out LLVM's optimizations for the CPU, and no other ones.

    They come after XLA has fixed a program's text, memory and cost.
    """
    set_optimized(True)
    compiler.get_compile_options = _options_of_read_programs


def _options_of_read_programs(*args: Any, backend: Any, **options: Any) -> Any:
    built = _optimized_options(*args, backend=backend, **options)
    if backend.platform == "cpu":
        debug = built.executable_build_options.debug_options
        debug.xla_backend_optimization_level = 0
        debug.xla_llvm_disable_expensive_passes = True
    return built


def _unoptimized_options(*args: Any, backend: Any, **options: Any) -> Any:
    """Also disable the emitters of fusions if XLA allows it: LLVM takes longest for their code."""
    if backend.platform == "cpu" and jax.__version_info__ < (0, 12):
        overrides = options.get("env_options_overrides") or {}
        options["env_options_overrides"] = overrides | {
            "xla_cpu_use_fusion_emitters": False,
            "xla_cpu_parallel_codegen_split_count": 1,
        }
    return _optimized_options(*args, backend=backend, **options)
