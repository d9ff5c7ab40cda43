"""A product of activations and a weight, with the einsum that says which features it sums over.

Knows nothing of layouts, or of how weights are stored.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Labels(NamedTuple):
    """The dimension letters of an einsum."""

    x: str
    weight: str
    out: str

    @classmethod
    def of(cls, equation: str) -> "Labels":
        """The labels of an einsum of activations and a weight, such as `BTD,DF->BTF`."""
        inputs, out = equation.split("->")
        x, weight = inputs.split(",")
        return cls(x, weight, out)


class Product(NamedTuple):
    """A product of activations and a weight, linear in both, valid for whole arrays and for parts.

    The result is in float32, or in int32 if both are integers. `multiply` rounds it once, after it
    has multiplied it with scales.
    """

    equation: str
    """The einsum; activations may have more leading axes."""
    function: Callable[[jax.Array, jax.Array], jax.Array]
    """The function of activations and weight that computes it."""

    @property
    def labels(self) -> Labels:
        """The labels of the equation."""
        return Labels.of(self.equation)

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return self.function(x, weight)


def einsum(equation: str, with_leading: str | None = None) -> Product:
    """The product of an equation, whose first axis of activations is rows.

    Args:
      equation: The einsum.
      with_leading: The same with any leading axes of activations, where there may be more.
    """
    return Product(equation, partial(einsum_product, with_leading or equation))


def einsum_product(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The einsum of activations and a weight, in float32, or in int32 if `x` has integers."""
    # XLA for CPU converts the whole weight for a product with a bfloat16 result
    rows = _at_least_two_rows(x)
    out = jnp.einsum(equation, rows, weight, preferred_element_type=_sum_dtype(x))
    return out[: len(x)]


def gate_up_product(x: jax.Array, gate_up_PDF: jax.Array) -> jax.Array:
    """Gate and up `[P, ..., F]` of `x` `[..., D]`, in float32, or in int32 if `x` has integers."""
    # a batch of two products: one call, and no backend needs another memory layout of the weights
    rows = _at_least_two_rows(x)
    x_P = jnp.broadcast_to(rows[None], (2, *rows.shape))
    equation, dtype = "P...D,PDF->P...F", _sum_dtype(x)
    out = jnp.einsum(equation, x_P, gate_up_PDF, preferred_element_type=dtype)
    return out[:, : len(x)]


def _sum_dtype(x: jax.Array) -> jax.typing.DTypeLike:
    """The dtype in which products of `x` are summed."""
    return jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32


def _at_least_two_rows(x: jax.Array) -> jax.Array:
    """`x`, repeated if it is a single row: XLA for CPU would convert the whole bfloat16 weight."""
    is_one = x.dtype == jnp.bfloat16 and x.shape[0] == 1 and (x.ndim == 2 or x.shape[1] == 1)
    return jnp.concatenate([x, x]) if is_one else x
