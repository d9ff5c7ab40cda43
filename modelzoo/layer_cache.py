"""Cache entries of layers and of new tokens, as named tuples that declare their logical axes.

Keys have positions along the last axis; values have head features there. Attention reads each as a
matrix in this order. The keys of a cache may be stored in blocks of positions (`key_blocks`).
Layers of latent attention cache only latents, which serve as keys and values.

The first axis of cache arrays is layers: all layers of one block that is scanned (`layer_groups`),
or a single layer. An operation on a slot, such as a fork, applies to the slot in all these layers.

Knows nothing of spans or slots, nor which token is at which entry.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import axes
from .segments import Segments

KeysAndValues = tuple[jax.Array, jax.Array]
"""`k_BKHS`, which may be in blocks, and `v_BKSH`, as attention reads them."""


class PromptKeysValues(NamedTuple):
    """Keys and values of new tokens in one layer; those of padding are undefined."""

    k_BKHT: jax.Array
    v_BKTH: jax.Array

    AXES = (axes.PROMPT_KEYS, axes.PROMPT_VALUES)

    def read(self) -> KeysAndValues:
        """The new tokens as keys and values of one more segment."""
        return self.k_BKHT, self.v_BKTH


class PromptLatents(NamedTuple):
    """Latents and rotated keys of new tokens in one layer."""

    latent_BTH: jax.Array

    AXES = (axes.PROMPT_LATENTS,)

    def read(self) -> KeysAndValues:
        """The new tokens as keys and values of one more segment."""
        return _latents_as_heads(self.latent_BTH)


class KeysValues(NamedTuple):
    """Cached keys and values of layers, one array per segment."""

    k_LBKHS: Segments
    v_LBKSH: Segments

    AXES = (axes.CACHE_KEYS, axes.CACHE_VALUES)
    POSITION_AXES = (4, 3)

    def empty(self) -> "KeysValues":
        """The cache without segments."""
        return KeysValues((), ())

    @property
    def lengths(self) -> list[int]:
        """The number of entries of each segment."""
        return [v.shape[3] for v in self.v_LBKSH]

    def read(self, layer: jax.Array) -> list[KeysAndValues]:
        """Keys and values of one layer, by segment."""
        segments = zip(self.k_LBKHS, self.v_LBKSH, strict=True)
        return [(layer_of(k, layer), layer_of(v, layer)) for k, v in segments]

    def read_all(self) -> list[KeysAndValues]:
        """Keys and values of all layers, by segment."""
        return list(zip(self.k_LBKHS, self.v_LBKSH, strict=True))


class Latents(NamedTuple):
    """Cached latents and rotated keys of layers, one array per segment."""

    latent_LBSH: Segments

    AXES = (axes.CACHE_LATENTS,)
    POSITION_AXES = (2,)

    def empty(self) -> "Latents":
        """The cache without segments."""
        return Latents(())

    @property
    def lengths(self) -> list[int]:
        """The number of entries of each segment."""
        return [x.shape[2] for x in self.latent_LBSH]

    def read(self, layer: jax.Array) -> list[KeysAndValues]:
        """Keys and values of one layer, by segment."""
        return [_latents_as_heads(layer_of(x, layer)) for x in self.latent_LBSH]

    def read_all(self) -> list[KeysAndValues]:
        """Keys and values of all layers, by segment."""
        return list(map(_latents_as_heads, self.latent_LBSH))


LayerCache = KeysValues | Latents
NewEntries = PromptKeysValues | PromptLatents


def layer_of(x_LB: jax.Array, layer: jax.Array) -> jax.Array:
    """One layer of an array whose first axis is layers."""
    if x_LB.shape[0] == 1:
        return x_LB[0]
    return jax.lax.dynamic_index_in_dim(x_LB, layer, axis=0, keepdims=False)


def _latents_as_heads(latent_BSH: jax.Array) -> KeysAndValues:
    """Latents as keys and values of one head.

    The values include the rotated key, so the last features of the attention output are undefined.
    Values without them would be a copy of nearly the whole segment, which costs more.
    """
    return jnp.expand_dims(latent_BSH.swapaxes(-1, -2), -3), jnp.expand_dims(latent_BSH, -3)
