"""Memory of layers and entries of new tokens, as trees of arrays that declare their logical axes.

Keys have positions along the last axis; values have head features there. Attention reads each as a
matrix in this order. New tokens are never in codes.

The first axis of the arrays of a layer's memory is layers: all layers of one block that is scanned
(`layer_groups`), or a single layer. An operation on a slot, such as a fork, applies to the slot in
all these layers.

Knows nothing of spans or slots, nor which token is at which entry.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..weights.weight_products import Axes
from .segments import Segments
from .state_spec import KeysAndValues, StateSpec, latents_as_heads


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
        return latents_as_heads(self.latent_BTH)


NewEntries = PromptKeysValues | PromptLatents


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerState:
    """The memory that the layers of one block have of every slot."""

    arrays: Mapping[str, Segments]
    """The segments of each array of the specification, by its name."""
    spec: StateSpec = field(metadata={"static": True})

    @classmethod
    def empty(
        cls, spec: StateSpec, layers: int, sizes: Sequence[tuple[int, int]], head_shards: int = 1
    ) -> "LayerState":
        """Memory of zeros.

        Args:
          spec: The arrays.
          layers: The number of layers.
          sizes: The slots and the entries of each segment.
          head_shards: The number of shards of query heads.
        """
        return cls(
            {
                name: tuple(
                    jnp.zeros(array.shape(layers, *size, head_shards), array.dtype)
                    for size in sizes
                )
                for name, array in spec.arrays.items()
            },
            spec,
        )

    def map(self, visit: Callable[..., Any], *others: Mapping[str, Any]) -> "LayerState":
        """Apply `visit(segments, array, *others)` to every array, with what others have of it."""
        return replace(
            self,
            arrays={
                name: visit(self.arrays[name], array, *(other[name] for other in others))
                for name, array in self.spec.arrays.items()
            },
        )

    def map_axes(self, visit: Callable[[Axes], Any]) -> "LayerState":
        """A tree with `visit(logical_axes)` in the place of each array's segments."""
        return self.map(lambda _, array: visit(array.axes))

    @property
    def lengths(self) -> list[int]:
        """The number of entries of each segment."""
        name, array = next(pair for pair in self.spec.arrays.items() if not pair[1].blocks)
        return [x.shape[array.position_axis] for x in self.arrays[name]]

    @property
    def num_slots(self) -> int:
        """The slots of the first segment, which has all of them, or the pages of a pool."""
        return next(iter(self.arrays.values()))[0].shape[1]

    def keys_values(self) -> list[KeysAndValues]:
        """Keys and values by segment; with the axis of layers if the arrays have one."""
        names = list(self.spec.arrays)
        return [
            self.spec.keys_values(dict(zip(names, segment, strict=True)))
            for segment in zip(*(self.arrays[name] for name in names), strict=True)
        ]

    def read_layer(self, layer: jax.Array) -> list[KeysAndValues]:
        """Keys and values of one layer, by segment."""
        return jax.tree.map(lambda x: layer_of(x, layer), self).keys_values()

    def pages(self) -> KeysAndValues:
        """Keys and values of a cache in pages, each `[layers * pages, heads, entries, features]`.

        The pages of a layer follow those of the layer before it, so none is sliced out.
        """

        return self.spec.page_entries(
            {name: x.reshape(-1, *x.shape[2:]) for name, (x,) in self.arrays.items()}
        )


def layer_of(x_LB: jax.Array, layer: jax.Array) -> jax.Array:
    """One layer of an array whose first axis is layers."""
    if x_LB.shape[0] == 1:
        return x_LB[0]
    return jax.lax.dynamic_index_in_dim(x_LB, layer, axis=0, keepdims=False)
