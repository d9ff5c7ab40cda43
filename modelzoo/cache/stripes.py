"""The places of tokens that are split over devices.

*Stripes* split the tokens of a sequence: token p is in stripe p mod n, at index p // n. Each stripe
has tokens from the whole sequence, so devices with one stripe each share the work of causal
attention evenly. A prefix of the sequence is a prefix of each stripe. With one stripe, tokens are
in their original order. Source: Brandon et al. 2023, "Striped Attention" (2311.09431), section 3.

Knows nothing of layers, rows, meshes or the contents of entries.
"""

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)

EMPTY_POSITION = -1
"""The position of an entry that holds no token."""


@dataclass(frozen=True)
class Stripes:
    """An order of tokens, stripe after stripe: 6 tokens in 2 stripes are `[0, 2, 4, 1, 3, 5]`."""

    count: int = 1

    def permute(self, x: Array, axis: int) -> Array:
        """Reorder tokens along `axis` into stripes. `count` must divide the number of tokens."""
        return _transpose(x, axis, -1, self.count)

    def restore(self, x: Array, axis: int) -> Array:
        """Put tokens back in order: the inverse of `permute`."""
        return _transpose(x, axis, self.count, -1)


@partial(jax.tree_util.register_dataclass, data_fields=["index"], meta_fields=["count"])
@dataclass(frozen=True)
class Stripe:
    """One stripe out of `count`."""

    index: jax.Array | int = 0
    count: int = 1

    def position(self, local_index: jax.Array) -> jax.Array:
        """The position of the token at an index of this stripe."""
        return local_index * self.count + self.index


IN_ORDER = Stripes()
ONE_STRIPE = Stripe()


def change_stripes(x: jax.Array, axis: int, current: Stripes, target: Stripes) -> jax.Array:
    """Reorder tokens from one number of stripes to another; zeros pad them to whole stripes."""
    if current == target:
        return x
    size = x.shape[axis] + -x.shape[axis] % target.count
    whole = pad_end(current.restore(x, axis), axis, size)
    return target.permute(whole, axis)


def pad_end(x: jax.Array, axis: int, size: int, fill: int = 0) -> jax.Array:
    """Pad an axis at its end, so that it has `size` places."""
    if x.shape[axis] == size:
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding, constant_values=fill)


def _transpose(x: Array, axis: int, major: int, minor: int) -> Array:
    split = x.reshape(*x.shape[:axis], major, minor, *x.shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(x.shape)
