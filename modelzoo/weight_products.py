"""Products of activations with weights, on one device and in the form that every backend runs fast.

An `Operations` of a layout multiplies parts of arrays with the same functions. Knows nothing of
layouts.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    # a start from a bundle loads executables before flax
    from flax import nnx

    Weight = nnx.Param | jax.Array
    """A parameter, or the part of it on one device."""

Axes = tuple[str, ...]
"""The logical axes of an array."""
Product = Callable[[jax.Array, jax.Array], jax.Array]
"""A product of activations and a weight, linear in both, valid for whole arrays and for parts."""
Project = Callable[..., jax.Array]
"""The type of `Operations.project`."""


def multiply(
    equation: str,
    product: Product,
    x: jax.Array,
    weight: "Weight",
    x_axes: Axes = (),
    out_axes: Axes = (),
) -> jax.Array:
    """Multiply activations with a weight on one device; see `Operations.project`."""
    del equation, x_axes, out_axes
    return product(x, weight[...])


def axes_of(weight: "Weight") -> Axes:
    """The logical axes that a parameter declares."""
    assert not isinstance(weight, jax.Array), "a part of a parameter declares no axes"
    return weight.get_metadata()["logical_axes"]


def einsum(equation: str, dtype: jax.typing.DTypeLike | None = None) -> tuple[str, Product]:
    """An equation and its product, with a result in `dtype`, or in the dtype of the activations."""
    return equation, partial(einsum_product, equation, dtype=dtype)


def einsum_product(
    equation: str,
    x: jax.Array,
    weight: jax.Array,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """The einsum of activations and a weight, accumulated in float32 and rounded once.

    Args:
      equation: The einsum; the first axis of activations is rows.
      x: Activations.
      weight: The weight.
      dtype: The dtype of the result; by default that of `x`.
    """
    # XLA for CPU converts the whole weight for a product with a bfloat16 result
    rows = _at_least_two_rows(x)
    out = jnp.einsum(equation, rows, weight, preferred_element_type=jnp.float32)
    return out[: len(x)].astype(dtype or x.dtype)


def _at_least_two_rows(x: jax.Array) -> jax.Array:
    """`x`, repeated if it is a single row: XLA for CPU would convert the whole bfloat16 weight."""
    is_one = x.dtype == jnp.bfloat16 and x.shape[0] == 1 and (x.ndim == 2 or x.shape[1] == 1)
    return jnp.concatenate([x, x]) if is_one else x


def gate_up_product(
    x: jax.Array, gate_up_PDF: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Gate and up `[P, ..., F]` of `x` `[..., D]`, in `dtype` or in the dtype of `x`."""
    # a batch of two products: one call, and no backend needs another memory layout of the weights
    rows = _at_least_two_rows(x)
    x_P = jnp.broadcast_to(rows[None], (2, *rows.shape))
    out = jnp.einsum("P...D,PDF->P...F", x_P, gate_up_PDF, preferred_element_type=jnp.float32)
    return out[:, : len(x)].astype(dtype or x.dtype)
