"""A context in which kernels for GPUs run on the CPU, in jax's interpreter for them.

The interpreter lacks layouts, transposed references and accumulators with a value. Here layouts are
left out, and products are those of arrays. Copies, barriers and the order of threads are the
interpreter's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import force_gpu_interpret_mode
from jax.experimental import pallas as pl


class Accumulator:
    """The sum of products."""

    def __init__(self, value: jax.Array):
        self.value = value

    def __getitem__(self, _: Any) -> jax.Array:
        return self.value


class Transposed(NamedTuple):
    """A reference whose two axes are swapped."""

    ref: Any


def _wgmma(accumulator: Accumulator, x: Any, y: Any) -> None:
    y = y.ref[...].T if isinstance(y, Transposed) else y[...]
    product = jnp.dot(x[...], y, preferred_element_type=jnp.float32)
    accumulator.value = accumulator.value + product


def _run_scoped(body: Any, kind: Any) -> Any:
    return body(Accumulator(jnp.zeros(kind.shape, kind.dtype)))


def _run_state(body: Any) -> Any:
    def run(value: jax.Array) -> jax.Array:
        accumulator = Accumulator(value)
        body(accumulator)
        return accumulator.value

    return run


@contextmanager
def interpreted_on_cpu() -> Iterator[None]:
    """Run kernels of Mosaic GPU in the interpreter."""
    with pytest.MonkeyPatch.context() as patch, force_gpu_interpret_mode():
        patch.setattr(plgpu, "layout_cast", lambda x, _: x)
        patch.setattr(plgpu, "load", lambda ref, _, layout: ref[...])
        patch.setattr(
            plgpu,
            "broadcasted_iota",
            lambda dtype, shape, axis, layout: jax.lax.broadcasted_iota(dtype, shape, axis),
        )
        patch.setattr(plgpu, "transpose_ref", lambda ref, _: Transposed(ref))
        patch.setattr(plgpu, "wgmma", _wgmma)
        patch.setattr(plgpu.WGMMAAccumulatorRef, "init", staticmethod(lambda value: value))
        patch.setattr(pl, "run_scoped", _run_scoped)
        patch.setattr(pl, "run_state", _run_state)
        yield
