"""What is kept of a layer, in the cache and of a prompt: named tuples that declare their axes.

Keys lie with positions along the last axis and values with heads' entries there: the order in which
each is read as a matrix. Layers of latent attention keep latents alone, which are keys and values.

Layers that run in turns (`layer_groups`) keep what they keep in one array, which leads with them:
whatever is done to a row is done to that row of all of them.

Knows nothing of spans, slots or what lies at which entry.
"""

from typing import NamedTuple

import jax

from . import axes
from .segments import Segments


class KeysValues(NamedTuple):
    """Keys and values of one layer, one array a segment."""

    k_BKHS: Segments
    v_BKSH: Segments

    AXES = (axes.CACHE_KEYS, axes.CACHE_VALUES)
    POSITION_AXES = (3, 2)

    def read(self) -> list[tuple[jax.Array, jax.Array]]:
        """`k_BKHS` and `v_BKSH` of each segment."""
        return list(zip(self.k_BKHS, self.v_BKSH, strict=True))


class Latents(NamedTuple):
    """Latents and rotated keys of one layer, one array a segment."""

    kept_BSH: Segments

    AXES = (axes.CACHE_LATENTS,)
    POSITION_AXES = (1,)

    def read(self) -> list[tuple[jax.Array, jax.Array]]:
        """`k_BKHS` and `v_BKSH` of each segment: of one head, keys and values in one.

        Of what attention makes of such values, entries past the latent mean nothing. That is less
        work than values without them, which would be a copy of nearly all of the segment.
        """
        return [(x_BSH.swapaxes(1, 2)[:, None], x_BSH[:, None]) for x_BSH in self.kept_BSH]


class LayersKeysValues(NamedTuple):
    """Keys and values of layers that run in turns."""

    k_LBKHS: Segments
    v_LBKSH: Segments

    AXES = tuple(map(axes.of_layers, KeysValues.AXES))
    POSITION_AXES = (4, 3)

    def layer(self, turn: jax.Array) -> KeysValues:
        """Those of one layer."""
        return KeysValues(_layer(self.k_LBKHS, turn), _layer(self.v_LBKSH, turn))


class LayersLatents(NamedTuple):
    """Latents and rotated keys of layers that run in turns."""

    kept_LBSH: Segments

    AXES = tuple(map(axes.of_layers, Latents.AXES))
    POSITION_AXES = (2,)

    def layer(self, turn: jax.Array) -> Latents:
        """Those of one layer."""
        return Latents(_layer(self.kept_LBSH, turn))


OneLayer = KeysValues | Latents
KeptLayer = OneLayer | LayersKeysValues | LayersLatents


def one_layer(kept: KeptLayer, turn: jax.Array | None) -> OneLayer:
    """What the layer whose turn it is keeps; of a layer that has no turns that is all."""
    if isinstance(kept, OneLayer):
        return kept
    assert turn is not None, "layers kept together run in turns"
    return kept.layer(turn)


def _layer(segments: Segments, turn: jax.Array) -> Segments:
    take = jax.lax.dynamic_index_in_dim
    return tuple(take(x, turn, axis=0, keepdims=False) for x in segments)


class PromptKeysValues(NamedTuple):
    """Keys and values a prefill made for one layer; entries past the true length are padding."""

    k_BKHT: jax.Array
    v_BKTH: jax.Array

    AXES = (axes.PROMPT_KEYS, axes.PROMPT_VALUES)


class PromptLatents(NamedTuple):
    """Latents and rotated keys a prefill made for one layer, padded likewise."""

    kept_BTH: jax.Array

    AXES = (axes.PROMPT_LATENTS,)


class PromptLayersKeysValues(NamedTuple):
    """Keys and values a prefill made for layers that run in turns."""

    k_LBKHT: jax.Array
    v_LBKTH: jax.Array

    AXES = tuple(map(axes.of_layers, PromptKeysValues.AXES))


class PromptLayersLatents(NamedTuple):
    """Latents and rotated keys a prefill made for layers that run in turns."""

    kept_LBTH: jax.Array

    AXES = tuple(map(axes.of_layers, PromptLatents.AXES))


PromptLayer = PromptKeysValues | PromptLatents
PromptLayers = PromptLayersKeysValues | PromptLayersLatents


def in_turns(made: PromptLayer) -> PromptLayers:
    """What layers made one after the other, in arrays that lead with them."""
    if isinstance(made, PromptKeysValues):
        return PromptLayersKeysValues(*made)
    return PromptLayersLatents(*made)
