"""Products of activations with weights, on one device and in the form that every backend runs fast.

An `Operations` of a layout multiplies parts of arrays with the same functions. Knows nothing of
layouts.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .quantised_weight import QuantisedWeight, multiply_codes

if TYPE_CHECKING:
    # a start from a bundle loads executables before it imports flax
    from flax import nnx

    Weight = nnx.Param | jax.Array | QuantisedWeight
    """A parameter, or the part of it on one device. A parameter may have a quantised value."""

Axes = tuple[str, ...]
"""The logical axes of an array."""
Product = Callable[[jax.Array, jax.Array], jax.Array]
"""A product of activations and a weight, linear in both, valid for whole arrays and for parts.

The result is in float32, or in int32 if both are integers. `multiply` rounds it once, after it has
multiplied it with scales.
"""
Project = Callable[..., jax.Array]
"""The type of `Operations.project`."""


def multiply(
    equation: str,
    product: Product,
    x: jax.Array,
    weight: "Weight",
    x_axes: Axes = (),
    out_axes: Axes = (),
    dtype: jax.typing.DTypeLike | None = None,
    max_over_parts: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Multiply activations with a weight on one device; see `Operations.project`.

    `max_over_parts` is that of `multiply_codes`.
    """
    del x_axes, out_axes
    value = weight[...]
    if isinstance(value, QuantisedWeight):
        out = multiply_codes(equation, product, x, value, max_over_parts)
    else:
        out = product(x, value)
    return out.astype(dtype or x.dtype)


def axes_of(weight: "Weight") -> Axes:
    """The logical axes that a parameter declares."""
    assert not isinstance(weight, jax.Array | QuantisedWeight), "a part declares no axes"
    return weight.get_metadata()["logical_axes"]


def einsum(equation: str) -> tuple[str, Product]:
    """An equation and its product."""
    return equation, partial(einsum_product, equation)


def einsum_product(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The einsum of activations and a weight, in float32, or in int32 if `x` has integers.

    Args:
      equation: The einsum; the first axis of activations is rows.
      x: Activations.
      weight: The weight.
    """
    # XLA for CPU converts the whole weight for a product with a bfloat16 result
    rows = _at_least_two_rows(x)
    out = jnp.einsum(equation, rows, weight, preferred_element_type=_sum_dtype(x))
    return out[: len(x)]


def _sum_dtype(x: jax.Array) -> jax.typing.DTypeLike:
    """The dtype in which products of `x` are summed."""
    return jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32


def _at_least_two_rows(x: jax.Array) -> jax.Array:
    """`x`, repeated if it is a single row: XLA for CPU would convert the whole bfloat16 weight."""
    is_one = x.dtype == jnp.bfloat16 and x.shape[0] == 1 and (x.ndim == 2 or x.shape[1] == 1)
    return jnp.concatenate([x, x]) if is_one else x


def gate_up_product(x: jax.Array, gate_up_PDF: jax.Array) -> jax.Array:
    """Gate and up `[P, ..., F]` of `x` `[..., D]`, in float32, or in int32 if `x` has integers."""
    # a batch of two products: one call, and no backend needs another memory layout of the weights
    rows = _at_least_two_rows(x)
    x_P = jnp.broadcast_to(rows[None], (2, *rows.shape))
    equation, dtype = "P...D,PDF->P...F", _sum_dtype(x)
    out = jnp.einsum(equation, x_P, gate_up_PDF, preferred_element_type=dtype)
    return out[:, : len(x)]
