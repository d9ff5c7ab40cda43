"""Moves of numbers of large arrays, which on the CPU touch nothing else.

Knows nothing of what arrays hold.
"""

import jax
import jax.numpy as jnp

from . import PUT_LINES, TAKE_PAIRS
from .objects import is_loaded

_RANK = 5
"""The axes of an array of the cache: layers, pages, heads, entries, features."""


def needs_kernel(x: jax.Array) -> bool:
    """Whether a kernel must write lines of an array with features as its last axis.

    NOTE: XLA for the CPU converts all of a bfloat16 array to float32, and back, to write one.
    """
    is_line = x.ndim == _RANK and not x.shape[-1] % 2
    return x.dtype == jnp.bfloat16 and is_line and is_loaded()


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


def put_lines(x: jax.Array, new_MW: jax.Array, place_M: jax.Array) -> jax.Array:
    """Replace lines of W numbers of an array for which `needs_kernel`.

    Args:
      x: The array, of rank 5, which is updated in place if it is donated. XLA would copy it to
        another shape.
      new_MW: The lines, in the dtype of the array.
      place_M: Their places among the lines of the array, all different; those outside are dropped.
    """

    def put(x: jax.Array, new_MW: jax.Array, place_M: jax.Array) -> jax.Array:
        lines = x.reshape(-1, new_MW.shape[1])
        return lines.at[place_M].set(new_MW, mode="drop", unique_indices=True).reshape(x.shape)

    def put_on_cpu(x: jax.Array, new_MW: jax.Array, place_M: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = jax.ffi.ffi_call(PUT_LINES, result, input_output_aliases={0: 0})
        return call(x, new_MW, place_M.astype(jnp.int32))

    return jax.lax.platform_dependent(x, new_MW, place_M, cpu=put_on_cpu, default=put)
