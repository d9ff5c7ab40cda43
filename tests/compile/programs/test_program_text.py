"""The text of a program: the compiler's own text if there is any, and otherwise XLA's."""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from program_bytes import hbm_bytes

from noria.compile.program_cache import compile_program
from noria.compile.programs.program_text import program_text


@dataclass
class Unwritten:
    """An executable that XLA cannot write as text."""

    def as_text(self) -> str:
        raise RuntimeError("UNIMPLEMENTED: asynchronous slices")


EXECUTABLE = cast(jax.stages.Compiled, Unwritten())


def lower(function, device) -> jax.stages.Lowered:
    """Lower a function of a square matrix on one device."""
    placed = SingleDeviceSharding(device)
    square = jax.ShapeDtypeStruct((512, 512), "float32")
    return jax.jit(function, in_shardings=placed, out_shardings=placed).lower(square)


def test_the_largest_program_that_the_compiler_wrote_is_the_graphs(tmp_path):
    for name, text in (("0.jit_f", "the graph"), ("1.copy", "small"), ("1.jit_f", "small")):
        (tmp_path / f"module_{name}.after_codegen.txt").write_text(text)
    (tmp_path / "module_0.jit_f.before_optimizations.txt").write_text("longer, of another pass")
    assert program_text(EXECUTABLE, tmp_path) == "the graph"


def test_there_is_none_where_xla_can_write_none(tmp_path):
    assert program_text(EXECUTABLE) is None
    assert program_text(EXECUTABLE, tmp_path) is None


def test_on_the_cpu_the_executable_has_it(tmp_path):
    lowered = lower(jnp.tanh, jax.devices()[0])
    executable = compile_program(lowered, {}, tmp_path)
    assert "tanh" in (program_text(executable, tmp_path) or "")
    assert not list(tmp_path.iterdir())


@pytest.mark.tpu_compile
def test_a_tpus_compiler_writes_what_the_executable_says(tmp_path):
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    executable = compile_program(lower(lambda x: jnp.tanh(x @ x), device), {}, tmp_path)
    written, said = program_text(executable, tmp_path), executable.as_text()
    assert written and said
    assert program_text(EXECUTABLE, tmp_path) == written, "it is the compiler's, not XLA's"
    assert hbm_bytes(written) == hbm_bytes(said) == 2 * 512 * 512 * 4
