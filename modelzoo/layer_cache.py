"""Entries that layers keep, in the cache and of new tokens: named tuples that declare their axes.

Keys lie with positions along the last axis and values with heads' entries there: the order in which
each is read as a matrix. The keys of a cache may lie in blocks of positions (`key_blocks`). Layers
of latent attention keep latents alone, which are keys and values.

Arrays of the cache lead with layers: those of a place that are scanned (`layer_groups`), or one.
Whatever is done to a row is done to that row of all of them.

Knows nothing of spans, slots or what lies at which entry.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import axes
from .segments import Segments

KeysAndValues = tuple[jax.Array, jax.Array]
"""`k_BKHS`, which may lie in blocks, and `v_BKSH`, as attention reads them."""


class PromptKeysValues(NamedTuple):
    """Keys and values that one layer made of new tokens; of padding they mean nothing."""

    k_BKHT: jax.Array
    v_BKTH: jax.Array

    AXES = (axes.PROMPT_KEYS, axes.PROMPT_VALUES)

    def read(self) -> KeysAndValues:
        """The tokens as one more segment."""
        return self.k_BKHT, self.v_BKTH


class PromptLatents(NamedTuple):
    """Latents and rotated keys that one layer made of new tokens."""

    latent_BTH: jax.Array

    AXES = (axes.PROMPT_LATENTS,)

    def read(self) -> KeysAndValues:
        """The tokens as one more segment."""
        return _latents_as_heads(self.latent_BTH)


class KeysValues(NamedTuple):
    """Keys and values of layers, one array a segment."""

    k_LBKHS: Segments
    v_LBKSH: Segments

    AXES = (axes.CACHE_KEYS, axes.CACHE_VALUES)
    POSITION_AXES = (4, 3)

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""
        return [v.shape[3] for v in self.v_LBKSH]

    def read(self, layer: jax.Array) -> list[KeysAndValues]:
        """Each segment of one layer."""
        segments = zip(self.k_LBKHS, self.v_LBKSH, strict=True)
        return [(layer_of(k, layer), layer_of(v, layer)) for k, v in segments]

    def read_all(self) -> list[KeysAndValues]:
        """Each segment of all layers."""
        return list(zip(self.k_LBKHS, self.v_LBKSH, strict=True))


class Latents(NamedTuple):
    """Latents and rotated keys of layers, one array a segment."""

    latent_LBSH: Segments

    AXES = (axes.CACHE_LATENTS,)
    POSITION_AXES = (2,)

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""
        return [x.shape[2] for x in self.latent_LBSH]

    def read(self, layer: jax.Array) -> list[KeysAndValues]:
        """Each segment of one layer."""
        return [_latents_as_heads(layer_of(x, layer)) for x in self.latent_LBSH]

    def read_all(self) -> list[KeysAndValues]:
        """Each segment of all layers."""
        return list(map(_latents_as_heads, self.latent_LBSH))


LayerCache = KeysValues | Latents
PromptLayer = PromptKeysValues | PromptLatents


def layer_of(x_LB: jax.Array, layer: jax.Array) -> jax.Array:
    """One layer of an array that leads with layers."""
    if x_LB.shape[0] == 1:
        return x_LB[0]
    return jax.lax.dynamic_index_in_dim(x_LB, layer, axis=0, keepdims=False)


def _latents_as_heads(latent_BSH: jax.Array) -> KeysAndValues:
    """Latents as keys and values of one head.

    Of what attention makes of such values, entries past the latent mean nothing. That is less work
    than values without them, which would be a copy of nearly all of the segment.
    """
    return jnp.expand_dims(latent_BSH.swapaxes(-1, -2), -3), jnp.expand_dims(latent_BSH, -3)
