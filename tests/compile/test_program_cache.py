"""Graphs do not use jax's program cache, whatever its settings; afterwards it is on again."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from noria.compile.program_cache import compile_program, without_program_cache
from noria.compile.targets import find_target
from noria.runtime.bundles import compilation_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def folder(tmp_path):
    """The folder of jax's cache, switched on; the settings are restored afterwards."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    compilation_cache.enable(pytest.fail, tmp_path / "xla")
    reset_cache()
    yield tmp_path / "xla"
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def compile_for(name: str) -> None:
    sharding = find_target(name).placement().replicated
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    # a new function each time, as jax keeps compiled functions
    compile_program(jax.jit(lambda x: x + 1, out_shardings=sharding).lower(x), {})


def compile_something_else() -> None:
    jax.jit(lambda x: x + 2).lower(jnp.zeros(8)).compile()


def kept(folder):
    return [path for path in folder.iterdir() if path.name.endswith("-cache")]


@pytest.mark.parametrize(
    "target", ["cpu", pytest.param("tpu:v5e:2x4", marks=pytest.mark.tpu_compile)]
)
def test_a_graph_is_neither_kept_nor_looked_up(folder, target):
    before = len(kept(folder))
    compile_for(target)
    compile_for(target)
    assert len(kept(folder)) == before
    compile_something_else()
    assert len(kept(folder)) > before


def test_what_compiles_anew_is_not_kept_until_the_last_has_left(folder):
    with without_program_cache:
        with without_program_cache:
            compile_something_else()
        compile_something_else()
        assert not kept(folder)
    compile_something_else()
    assert kept(folder)


def test_a_cache_that_the_user_has_turned_off_stays_off(folder):
    jax.config.update("jax_enable_compilation_cache", False)
    compile_for("cpu")
    compile_something_else()
    assert not kept(folder)
