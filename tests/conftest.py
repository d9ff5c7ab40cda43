"""Environment of every test: eight simulated CPU devices, strict shapes, no network, own caches.

This file sets the environment when it is read, before any test module can import jax, because a
backend reads the environment once. Mistakes that broadcasting would hide raise errors.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import _lru_cache_wrapper
from importlib import metadata
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_X64"] = "0"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# the pipes of child processes are buffered, as for a user
os.environ.pop("PYTHONUNBUFFERED", None)
# the bytecode of modules is kept, as for a user: each child process imports hundreds of them
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_DEVICES_FLAG = "--xla_force_host_platform_device_count=8"
if _DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES_FLAG}".strip()

# use neither the user's caches nor another worker's
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="noria-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if _WORKER and hasattr(os, "sched_setaffinity"):
    # one core for each worker, with the threads of XLA and the processes of its tests
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(_WORKER.removeprefix("gw")) % len(_cores)]})

import pytest  # noqa: E402  (after the environment, as plugins may import jax)

pytest_plugins = ["costs", "slow_parts"]

HERE = Path(__file__).parent
NOT_OPTIMIZED = (
    "end_to_end/",
    "modelzoo/attention/test_blockwise.py",
    "modelzoo/attention/test_prompt_pieces.py",
    "modelzoo/cache/test_pages.py",
    "modelzoo/cache/test_window_pages.py",
    "modelzoo/families/",
    "modelzoo/kernels/",
    "modelzoo/test_conformance.py",
    "modelzoo/test_decoder.py",
    "modelzoo/test_embedders.py",
    "modelzoo/test_mixture.py",
    "modelzoo/test_mla.py",
    "modelzoo/test_sampling.py",
    "modelzoo/weights/test_quantised_weight.py",
    "runtime/adapters/",
    "runtime/bundles/",
    "runtime/checkpoint/",
    "runtime/commands/",
    "runtime/comparison/",
    "runtime/devices/test_graph_memory.py",
    "runtime/engine/test_decode_slots.py",
    "runtime/engine/test_expert_drops.py",
    "runtime/engine/test_pages.py",
    "runtime/engine/test_stopping.py",
    "runtime/engine/test_structured.py",
    "runtime/layouts/",
    "runtime/planning/",
    "runtime/quantisation/",
    "runtime/stages/",
    "scripts/",
    "sharding/test_adapters.py",
    "sharding/test_chunks_under_layouts.py",
    "sharding/test_coded_caches.py",
    "sharding/test_expert_exchange.py",
    "sharding/test_layout_conformance.py",
    "sharding/test_prefixes.py",
    "sharding/test_projection.py",
    "sharding/test_quantised_weights.py",
    "sharding/test_random_layouts.py",
    "sharding/test_ring_attention.py",
    "sharding/test_scanned_layers.py",
    "sharding/test_sharded_operations.py",
    "sharding/test_sharded_sampling.py",
    "sharding/test_unlike_layers.py",
)
"""Tests that compare results within a tolerance, or test how results are used: LLVM optimizes their
programs only with `--slow`. Tests of bits, bytes and operations run optimized programs; in these
files they use the fixture `optimized`, or a fixture that compiles for several tests."""

READ = (
    "compile/programs/test_compiled_collectives.py",
    "compile/programs/test_golden.py",
    "compile/test_communication.py",
    "compile/test_cpu_programs.py",
    "compile/test_memory.py",
    "compile/test_prefill_memory.py",
    "compile/test_sequence_sharding.py",
    "compile/test_sharded_decode.py",
)
"""Tests that only read their programs: text, memory and cost. LLVM, which comes after these are
fixed, optimizes the code for the CPU only with `--slow`."""

OWN_CACHE = (
    "compile/test_program_cache.py",
    "end_to_end/",
    "runtime/bundles/",
    "runtime/commands/",
    "scripts/test_records_of_jobs.py",
)
"""Tests in which noria keeps executables. The programs of all other tests are kept between runs."""

FAST = (
    "compile/hardware/",
    "compile/planning/",
    "compile/grids/",
    "compile/test_build.py",
    "compile/programs/test_collectives.py",
    "compile/programs/test_cycles.py",
    "compile/programs/test_hlo_text.py",
    "compile/programs/test_report.py",
    "compile/test_plan.py",
    "compile/test_program_cache.py",
    "compile/test_targets.py",
    "end_to_end/test_jobs.py::test_each_bad_row_is_one_error_row",
    "modelzoo/families/",
    "modelzoo/test_conformance.py::test_prefill_gives_the_logprobs_of_transformers[smollm2",
    "modelzoo/test_layer_groups.py",
    "runtime/batch/",
    "runtime/rows/",
    "runtime/planning/test_length_table.py",
    "runtime/planning/test_plan_files.py",
    "runtime/plans/",
    "runtime/process/",
    "runtime/progress/",
    "runtime/planning/test_search.py",
    "runtime/engine/test_generation.py::test_greedy_tokens_equal_a_whole_forward_pass_per_token[chunks",
    "runtime/files/test_layout_files.py",
    "runtime/files/test_run_config.py",
    "runtime/engine/test_scheduler.py",
    "runtime/text/",
    "sharding/test_axis_rules.py",
    "sharding/test_communication.py",
    "sharding/test_device_bytes.py",
    "sharding/test_layout_conformance.py::test_the_answer_is_that_of_one_device[llama-gpu-host",
    "sharding/test_legality.py",
    "test_",
)
"""The tests that `--fast` runs: tests that compile little, and one small model of each package."""

KEEP_PROGRAMS = {
    "jax_compilation_cache_max_size": 100 * 2**20,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""Settings that keep the programs of one module, also small and quick ones: the most recently used
100 MiB stay."""

NEW_LIBTPU = (0, 0, 52)
"""The libtpu that tests marked `newest_libtpu` need."""
MAX_MAPS = 12_000
"""The number of memory maps of a process above which programs of finished modules are dropped."""


def pytest_configure() -> None:
    from noria.runtime.devices import machine

    # the same dtype on every machine
    machine.instructions = list


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", default=False, help="run the tests marked slow, too"
    )
    parser.addoption(
        "--third-party",
        action="store_true",
        default=False,
        help="run the tests with programs that are not noria's, too",
    )
    parser.addoption(
        "--fast", action="store_true", default=False, help="run the tests that compile little"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        items[:] = [item for item in items if item.nodeid.removeprefix("tests/").startswith(FAST)]
    for marker in ("slow", "third_party"):
        option = f"--{marker.replace('_', '-')}"
        if config.getoption(option) or (marker == "slow" and config.getoption("--slow-part")):
            continue
        skip = pytest.mark.skip(reason=f"{marker}; run with {option}")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(skip)
    if (installed := _libtpu()) < NEW_LIBTPU:
        name = ".".join(map(str, installed))
        skip = pytest.mark.skip(reason=f"libtpu {name} copies what newer ones do not")
        for item in items:
            if item.get_closest_marker("newest_libtpu"):
                item.add_marker(skip)


def _libtpu() -> tuple[int, ...]:
    """The version of libtpu that Python finds first; empty if there is none."""
    found = next((found.version for found in metadata.distributions(name="libtpu")), "")
    return tuple(int(part) for part in found.split(".")[:3] if part.isdigit())


def pytest_collection_finish() -> None:
    # modules and test items live to the end, so garbage collections can skip them
    gc.collect()
    gc.freeze()
    # traces and programs make many objects that live: with the default thresholds, collections took
    # 8 % of the processor time of conformance tests
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session")
def optimizes(request: pytest.FixtureRequest) -> bool:
    """Whether the programs of all tests are optimized."""
    return request.config.getoption("--slow")


@pytest.fixture
def optimized(optimizes: bool) -> Iterator[None]:
    """Optimize the programs of one test."""
    from unoptimized import set_optimized

    set_optimized(True)
    yield
    set_optimized(optimizes)


@pytest.fixture(scope="module", autouse=True)
def _leave_nothing_behind(request: pytest.FixtureRequest, optimizes: bool) -> Iterator[None]:
    """Drop the caches of a module, and its settings of jax, before the next module runs."""
    if _path(request).startswith(NOT_OPTIMIZED) and not optimizes:
        from unoptimized import set_optimized

        set_optimized(False)
    elif _path(request).startswith(READ) and not optimizes:
        from unoptimized import optimize_only_what_is_read

        optimize_only_what_is_read()
    with _keeping_programs(request) if _keeps_programs(request) else nullcontext():
        yield
    for value in vars(request.module).values():
        if isinstance(value, _lru_cache_wrapper) and not value.__module__.startswith("noria."):
            value.cache_clear()
    if "jax" in sys.modules:
        _reset_jax()


@pytest.fixture(autouse=True)
def _without_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test use kernels that an earlier one has loaded."""
    if objects := sys.modules.get("noria.modelzoo.cpu.objects"):
        monkeypatch.setattr(objects, "_is_used", False)


def _path(request: pytest.FixtureRequest) -> str:
    return request.path.relative_to(HERE).as_posix() if HERE in request.path.parents else ""


@contextmanager
def _keeping_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the compiled programs of a module for later runs, in pytest's cache folder."""
    import jax

    from noria.compile import program_cache

    folder = request.config.cache.mkdir(f"xla-{_path(request).replace('/', '-')}")
    before = {name: jax.config.values[name] for name in KEEP_PROGRAMS}
    for name, value in KEEP_PROGRAMS.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    with pytest.MonkeyPatch.context() as patch:
        # graphs are otherwise compiled without jax's cache
        patch.setattr(program_cache, "without_program_cache", nullcontext())
        yield
    # `_reset_jax` takes the folder away
    for name, value in before.items():
        jax.config.update(name, value)


def _keeps_programs(request: pytest.FixtureRequest) -> bool:
    """Whether programs of a module can be kept: pytest has a folder, and all devices are here."""
    own = (item for item in request.session.items if item.path == request.path)
    absent = ("tpu_compile", "gpu_compile")
    return (
        hasattr(request.config, "cache")
        and not _path(request).startswith(OWN_CACHE)
        and not any(item.get_closest_marker(name) for item in own for name in absent)
    )


def _reset_jax() -> None:
    import jax
    from costs import num_maps  # a plugin, which pytest imports first
    from jax.experimental.compilation_cache.compilation_cache import reset_cache
    from unoptimized import set_optimized

    set_optimized(True)
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        jax.config.update("jax_compilation_cache_dir", None)
        reset_cache()
    if num_maps() > MAX_MAPS:
        jax.clear_caches()
        gc.collect()
