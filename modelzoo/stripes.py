"""Tokens change_stripes out like cards: token p in stripe p mod n, at place p // n of it.

Every stripe has tokens from all over a row, so devices that hold one each share the work of causal
attention evenly, and a beginning of the row is a beginning of each stripe. One stripe is the order
of the tokens themselves. Knows nothing of meshes.

Source: Brandon et al. 2023, "Striped Attention" (2311.09431), section 3.
"""

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)

ELSEWHERE = -1
"""Place of an entry that another stripe holds; nothing is written there."""


@dataclass(frozen=True)
class Stripes:
    """Arrays of tokens, stripe after stripe: of 6 tokens in 2 stripes `[0, 2, 4, 1, 3, 5]`."""

    count: int = 1

    def permute(self, x: Array, axis: int) -> Array:
        """Tokens in order along `axis`, of a number that divides, as stripes."""
        return _transposed(x, axis, -1, self.count)

    def restore(self, x: Array, axis: int) -> Array:
        """The inverse of `permute`."""
        return _transposed(x, axis, self.count, -1)


@dataclass(frozen=True)
class Stripe:
    """One of `count` stripes."""

    index: jax.Array | int = 0
    count: int = 1

    def num_tokens(self, length: jax.Array) -> jax.Array:
        """How many of a row's first `length` tokens lie here."""
        return (length - self.index + self.count - 1) // self.count

    def position(self, place: jax.Array) -> jax.Array:
        """The token at a place."""
        return place * self.count + self.index

    def local_index(self, position: jax.Array) -> jax.Array:
        """The place of a token, or `ELSEWHERE`."""
        is_here = position % self.count == self.index
        return jnp.where(is_here, position // self.count, ELSEWHERE)


IN_ORDER = Stripes()
ONE_STRIPE = Stripe()


def change_stripes(x: jax.Array, axis: int, lies: Stripes, wanted: Stripes, fill: int) -> jax.Array:
    """Tokens in other stripes than they came in, filled up to as many as divide."""
    if lies == wanted:
        return x
    x = lies.restore(x, axis)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % wanted.count)
    return wanted.permute(jnp.pad(x, padding, constant_values=fill), axis)


def _transposed(x: Array, axis: int, major: int, minor: int) -> Array:
    split = x.reshape(*x.shape[:axis], major, minor, *x.shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(x.shape)
