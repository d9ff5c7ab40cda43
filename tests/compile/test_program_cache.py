"""jax's cache of programs: for devices that are there, and not for others or on request."""

import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from noria.compile.program_cache import anew, compile_program
from noria.compile.targets import find_target
from noria.runtime import compilation_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def folder(tmp_path):
    """Of the cache, which is on; settings are as before afterwards."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    compilation_cache.enable(pytest.fail, tmp_path)
    reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def compile_for(name: str, **options: float) -> jax.stages.Compiled:
    sharding = find_target(name).placement().replicated
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    # a function of its own each time: jax keeps what it has compiled of another
    return compile_program(jax.jit(lambda x: x + 1, out_shardings=sharding).lower(x), options)


def kept(folder):
    return [path for path in folder.iterdir() if path.name.endswith("-cache")]


def test_a_program_is_kept(folder):
    compile_for("cpu")
    assert len(kept(folder)) == 1


def test_programs_with_other_options_are_other_entries(folder):
    for level in (1, 2, 2):
        compile_for("cpu", xla_backend_optimization_level=level)
    assert len(kept(folder)) == 2
    compile_for("cpu")
    assert len(kept(folder)) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"not compressed",
        lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        lambda content: zlib.compress(b"of another version"),
    ],
    ids=["empty", "cut", "garbage", "a bit", "other content"],
)
def test_a_damaged_entry_is_compiled_again_with_a_word(folder, damage):
    compile_for("cpu")
    (entry,) = kept(folder)
    entry.write_bytes(damage(entry.read_bytes()))
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        compiled = compile_for("cpu")
    np.testing.assert_array_equal(compiled(np.zeros(8, np.float32)), np.ones(8))


def test_a_cache_that_is_gone_costs_a_word_and_no_program(folder):
    compile_for("cpu")
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match="Error writing persistent compilation cache entry"):
        compiled = compile_for("cpu")
    np.testing.assert_array_equal(compiled(np.zeros(8, np.float32)), np.ones(8))


@pytest.mark.tpu_compile
def test_a_program_for_absent_devices_is_neither_kept_nor_looked_up(folder):
    compile_for("tpu:v5e:2x4")
    # looked up, it would be found now, and cannot be loaded
    compile_for("tpu:v5e:2x4")
    assert not kept(folder)
    compile_for("cpu")
    assert len(kept(folder)) == 1


def test_what_compiles_anew_is_not_kept_until_the_last_has_left(folder):
    with anew:
        with anew:
            compile_for("cpu")
        compile_for("cpu")
        assert not kept(folder)
    compile_for("cpu")
    assert kept(folder)


def test_a_cache_that_the_user_has_turned_off_stays_off(folder):
    jax.config.update("jax_enable_compilation_cache", False)
    with anew:
        pass
    compile_for("cpu")
    assert not kept(folder)
