"""Cache entries of layers and of new tokens, as named tuples that declare their logical axes.

Keys have positions along the last axis; values have head features there. Attention reads each as a
matrix in this order. The keys of a cache may be stored in blocks of positions (`segments`). Layers
of latent attention cache only latents, which serve as keys and values. Each kind of cache has a
form in codes with scales (`entry_codes`); new tokens are never in codes.

The first axis of cache arrays is layers: all layers of one block that is scanned (`layer_groups`),
or a single layer. An operation on a slot, such as a fork, applies to the slot in all these layers.

Knows nothing of spans or slots, nor which token is at which entry.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from .entry_codes import EntryCodes, encode
from .segments import Segments

KeysAndValues = tuple[jax.Array | EntryCodes, jax.Array | EntryCodes]
"""`k_BKHS`, which may be in blocks, and `v_BKSH`, as attention reads them."""
Splits = tuple[int, ...]
"""The features of an entry at which the parts after the first one begin; codes of each part have a
scale of their own (`DecoderConfig.entry_splits`)."""


class PromptKeysValues(NamedTuple):
    """Keys and values of new tokens in one layer; those of padding are undefined."""

    k_BKHT: jax.Array
    v_BKTH: jax.Array

    AXES = (axes.PROMPT_KEYS, axes.PROMPT_VALUES)
    POSITION_AXES = (3, 2)

    def read(self) -> KeysAndValues:
        """The new tokens as keys and values of one more segment."""
        return self.k_BKHT, self.v_BKTH


class PromptLatents(NamedTuple):
    """Latents and rotated keys of new tokens in one layer."""

    latent_BTH: jax.Array

    AXES = (axes.PROMPT_LATENTS,)
    POSITION_AXES = (1,)

    def read(self) -> KeysAndValues:
        """The new tokens as keys and values of one more segment."""
        return _latents_as_heads(self.latent_BTH)


class KeysValues(NamedTuple):
    """Cached keys and values of layers, one array per segment."""

    k_LBKHS: Segments
    v_LBKSH: Segments

    AXES = (axes.CACHE_KEYS, axes.CACHE_VALUES)
    POSITION_AXES = (4, 3)
    FEATURE_AXES = (3, 4)

    def encode(self, new: tuple[jax.Array, ...], splits: Splits) -> tuple[jax.Array, ...]:
        """New entries as this cache stores them: an array for each of its fields."""
        del splits
        return new

    @property
    def lengths(self) -> list[int]:
        """The number of entries of each segment."""
        return [v.shape[3] for v in self.v_LBKSH]

    def as_attended(self, splits: Splits) -> list[KeysAndValues]:
        """Keys and values by segment; with the axis of layers if the cache has one."""
        del splits
        return list(zip(self.k_LBKHS, self.v_LBKSH, strict=True))


class Latents(NamedTuple):
    """Cached latents and rotated keys of layers, one array per segment."""

    latent_LBSH: Segments

    AXES = (axes.CACHE_LATENTS,)
    POSITION_AXES = (2,)
    FEATURE_AXES = (3,)

    def encode(self, new: tuple[jax.Array, ...], splits: Splits) -> tuple[jax.Array, ...]:
        """New entries as this cache stores them: an array for each of its fields."""
        del splits
        return new

    @property
    def lengths(self) -> list[int]:
        """The number of entries of each segment."""
        return [x.shape[2] for x in self.latent_LBSH]

    def as_attended(self, splits: Splits) -> list[KeysAndValues]:
        """Keys and values by segment; with the axis of layers if the cache has one."""
        del splits
        return list(map(_latents_as_heads, self.latent_LBSH))


class CodedKeysValues(NamedTuple):
    """Cached keys and values of layers in codes, one array per segment."""

    k_LBKHS: Segments
    v_LBKSH: Segments
    k_scale_LBKS: Segments
    v_scale_LBKS: Segments

    AXES = (*KeysValues.AXES, axes.CACHE_SCALES, axes.CACHE_SCALES)
    POSITION_AXES = (*KeysValues.POSITION_AXES, 3, 3)
    FEATURE_AXES = (*KeysValues.FEATURE_AXES, None, None)

    def encode(self, new: tuple[jax.Array, ...], splits: Splits) -> tuple[jax.Array, ...]:
        """New entries as this cache stores them: an array for each of its fields."""
        dtypes = self.k_LBKHS[0].dtype, self.k_scale_LBKS[0].dtype
        k_BKHT, v_BKTH = new
        num_features = self.v_LBKSH[0].shape[4]
        k_BKHT, (k_scale_BKT,) = encode(k_BKHT, 2, *dtypes, splits, num_features)
        v_BKTH, (v_scale_BKT,) = encode(v_BKTH, 3, *dtypes, splits, num_features)
        return k_BKHT, v_BKTH, k_scale_BKT, v_scale_BKT

    @property
    def lengths(self) -> list[int]:
        """The number of entries of each segment."""
        return [v.shape[3] for v in self.v_LBKSH]

    def as_attended(self, splits: Splits) -> list[KeysAndValues]:
        """Keys and values by segment; with the axis of layers if the cache has one."""
        del splits

        def side(codes: Segments, scales: Segments) -> list[EntryCodes]:
            scales = tuple(jnp.expand_dims(scale, -2) for scale in scales)
            return list(map(EntryCodes, codes, scales))

        keys, values = side(self.k_LBKHS, self.k_scale_LBKS), side(self.v_LBKSH, self.v_scale_LBKS)
        return list(zip(keys, values, strict=True))


class CodedLatents(NamedTuple):
    """Cached latents and rotated keys of layers in codes, one array per segment."""

    latent_LBSH: Segments
    scale_LBPS: Segments

    AXES = (*Latents.AXES, axes.CACHE_LATENT_SCALES)
    POSITION_AXES = (*Latents.POSITION_AXES, 3)
    FEATURE_AXES = (*Latents.FEATURE_AXES, None)

    def encode(self, new: tuple[jax.Array, ...], splits: Splits) -> tuple[jax.Array, ...]:
        """New entries as this cache stores them: an array for each of its fields."""
        dtypes = self.latent_LBSH[0].dtype, self.scale_LBPS[0].dtype
        (latent_BTH,) = new
        codes, scales = encode(latent_BTH, 2, *dtypes, splits, self.latent_LBSH[0].shape[3])
        return codes, jnp.stack(scales, axis=1)

    @property
    def lengths(self) -> list[int]:
        """The number of entries of each segment."""
        return [x.shape[2] for x in self.latent_LBSH]

    def as_attended(self, splits: Splits) -> list[KeysAndValues]:
        """Keys and values by segment; with the axis of layers if the cache has one."""

        def segment(latent_LBSH: jax.Array, scale_LBPS: jax.Array) -> KeysAndValues:
            keys, values = _latents_as_heads(latent_LBSH)
            scale_LB1PS = jnp.expand_dims(scale_LBPS, -3)
            return EntryCodes(keys, scale_LB1PS, splits), EntryCodes(values, scale_LB1PS, splits)

        return list(map(segment, self.latent_LBSH, self.scale_LBPS))


class NoEntries(NamedTuple):
    """The cache of layers without attention."""

    AXES = ()


LayerCache = KeysValues | Latents | CodedKeysValues | CodedLatents
NewEntries = PromptKeysValues | PromptLatents


def without_segments(cache: LayerCache) -> LayerCache:
    """The same kind of cache, without entries."""
    return cache._make(() for _ in cache)


def read_layer(cache: LayerCache, layer: jax.Array, splits: Splits) -> list[KeysAndValues]:
    """Keys and values of one layer, by segment."""
    return jax.tree.map(lambda x: layer_of(x, layer), cache).as_attended(splits)


def layer_of(x_LB: jax.Array, layer: jax.Array) -> jax.Array:
    """One layer of an array whose first axis is layers."""
    if x_LB.shape[0] == 1:
        return x_LB[0]
    return jax.lax.dynamic_index_in_dim(x_LB, layer, axis=0, keepdims=False)


def _latents_as_heads(latent_BSH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Latents as keys and values of one head.

    The values include the rotated key, so the last features of the attention output are undefined.
    Values without them would be a copy of nearly the whole segment, which costs more.
    """
    return jnp.expand_dims(latent_BSH.swapaxes(-1, -2), -3), jnp.expand_dims(latent_BSH, -3)
