"""Memory of layers and entries of new tokens, as trees of arrays that declare their logical axes.

New keys have tokens along the last axis; new values have head features there. Attention reads each
as a matrix in this order. New tokens are never in codes.

The first axis of the arrays of a layer's memory is layers: all layers of one block that is scanned
(`layer_groups`), or a single layer. An operation on a page, such as a copy, applies to the page in
all these layers.

Knows nothing of slots, nor which token is at which entry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from .state_spec import KeysAndValues, StateSpec


class PromptKeysValues(NamedTuple):
    """Keys and values of new tokens in one layer; those of padding are undefined."""

    k_BKHT: jax.Array
    v_BKTH: jax.Array

    AXES = (axes.PROMPT_KEYS, axes.PROMPT_VALUES)
    POSITION_AXES = (3, 2)


class PromptLatents(NamedTuple):
    """Latents and rotated keys of new tokens in one layer."""

    latent_BTH: jax.Array

    AXES = (axes.PROMPT_LATENTS,)
    POSITION_AXES = (1,)


NewEntries = PromptKeysValues | PromptLatents


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerState:
    """The memory of the layers of one block: pages of entries."""

    arrays: Mapping[str, jax.Array]
    """Each array of the specification, by its name."""
    spec: StateSpec = field(metadata={"static": True})

    @classmethod
    def empty(
        cls, spec: StateSpec, layers: int, pages: int, entries: int, head_shards: int = 1
    ) -> "LayerState":
        """Memory of zeros.

        Args:
          spec: The arrays.
          layers: The number of layers.
          pages: The number of pages.
          entries: The entries of a page.
          head_shards: The number of shards of query heads.
        """
        size = layers, pages, entries, head_shards
        return cls(
            {
                name: jnp.zeros(array.shape(*size), array.dtype)
                for name, array in spec.arrays.items()
            },
            spec,
        )

    def map(self, visit: Callable[..., Any], *others: Mapping[str, Any]) -> "LayerState":
        """Apply `visit(array, its description, *others)` to every array, with what others have."""
        return replace(
            self,
            arrays={
                name: visit(self.arrays[name], array, *(other[name] for other in others))
                for name, array in self.spec.arrays.items()
            },
        )

    @property
    def page(self) -> int:
        """The number of entries of a page."""
        name, array = next(iter(self.spec.arrays.items()))
        return self.arrays[name].shape[array.position_axis]

    @property
    def num_pages(self) -> int:
        """The number of pages."""
        return next(iter(self.arrays.values())).shape[1]

    def keys_values(self) -> KeysAndValues:
        """Keys and values of all pages, each `[layers * pages, heads, entries, features]`.

        The pages of a layer follow those of the layer before it, so none is sliced out.
        """
        return self.spec.keys_values(
            {name: x.reshape(-1, *x.shape[2:]) for name, x in self.arrays.items()}
        )


Cache = tuple[LayerState | None, ...]
"""The memory of each block of the decoder, in order; None for layers without attention."""
