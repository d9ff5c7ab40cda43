"""Moves of numbers of large arrays, which on the CPU touch nothing else.

Knows nothing of what arrays hold.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from . import PUT_LINES, PUT_RANK, TAKE_PAIRS
from .objects import is_loaded


def take_units(x: jax.Array, place_MW: jax.Array, size: int) -> jax.Array:
    """Units of numbers that lie together, as `[M, W * size]`.

    Args:
      x: The array, of rank 2.
      place_MW: The places of units in it, all inside.
      size: The numbers of a unit.
    """

    def take(x: jax.Array, place_MW: jax.Array) -> jax.Array:
        taken = x.reshape(-1, size).at[place_MW].get(mode="promise_in_bounds")
        return taken.reshape(len(place_MW), -1)

    def take_on_cpu(x: jax.Array, place_MW: jax.Array) -> jax.Array:
        M, W = place_MW.shape
        call = jax.ffi.ffi_call(TAKE_PAIRS, jax.ShapeDtypeStruct((M, W * size), x.dtype))
        return call(x, place_MW.astype(jnp.int32))

    if x.dtype != jnp.bfloat16 or not is_loaded():
        return take(x, place_MW)
    return jax.lax.platform_dependent(x, place_MW, cpu=take_on_cpu, default=take)


def put_lines(
    x: jax.Array,
    new_MW: jax.Array,
    place_M: jax.Array,
    put: Callable[[], jax.Array],
) -> jax.Array:
    """Replace lines of W numbers of an array.

    NOTE: XLA for the CPU converts all of a bfloat16 array to float32, and back, to write one line.
    It copies an array that gets another shape for the kernel, so this takes keys and values alone.

    Args:
      x: The array, which is updated in place if it is donated.
      new_MW: The lines, in the dtype of the array.
      place_M: Their places among the lines of the array, all different; those outside are dropped.
      put: Computes the result where the kernel does not serve.
    """

    def put_on_cpu(x: jax.Array, new_MW: jax.Array, place_M: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = jax.ffi.ffi_call(PUT_LINES, result, input_output_aliases={0: 0})
        return call(x, new_MW, place_M.astype(jnp.int32))

    has_form = x.ndim == PUT_RANK and not new_MW.shape[1] % 2
    if x.dtype != jnp.bfloat16 or not has_form or not is_loaded():
        return put()
    return jax.lax.platform_dependent(
        x, new_MW, place_M, cpu=put_on_cpu, default=lambda *arrays: put()
    )
