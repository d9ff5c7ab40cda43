"""Attention of all layers of a call: what its layers share, and that of whole prompts.

A call is an object that knows the positions of its tokens and returns the attention of a single
layer on request. Whole prompts attend to themselves; other rows attend to their pages
(`page_attention`). Knows nothing of projections or the computation of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from .. import axes
from ..cache.layer_state import LayerState, NewEntries, PromptKeysValues, PromptLatents
from ..cache.stripes import IN_ORDER
from ..layer_config import Attention
from ..operations import Operations
from .attend import Attend, Queries, Visibility, with_sinks

Positions = jax.Array | np.ndarray
"""Positions of tokens; a numpy array becomes a constant of the graph."""


class HeadInputs(NamedTuple):
    """The inputs of the attention of one layer, which its projections compute."""

    x_BTD: jax.Array
    """The input of the projections; a parallel feed-forward part reads it, too."""
    queries: Queries
    new: PromptKeysValues | None
    """New keys and values, with the heads of the projections. A layer with latents that reads its
    cache attends to latents, and has none."""
    latents: PromptLatents | None
    """New latents, which are cached instead of keys and values."""


AttendLayer = Callable[
    [Queries, PromptKeysValues | None, PromptLatents | None],
    tuple[jax.Array, LayerState | None],
]
"""Attention of one layer from queries, keys and values, and latents, as in `HeadInputs`; it returns
`out_BTKGH` and the memory of the block after the layer."""


class CallAttention(Protocol):
    """Attention of all layers of a call."""

    reads_cache: ClassVar[bool]
    """Whether queries attend to the cache, not only to the prompt."""

    @property
    def position_BT(self) -> Positions:
        """The position of each token, padding included; the first axis may be 1."""
        ...

    @property
    def is_token_BT(self) -> jax.Array:
        """Whether a token is none of padding."""
        ...

    def layer(
        self, options: Attention, cache: LayerState | None, scan_index: jax.Array
    ) -> AttendLayer:
        """Return the attention of one layer.

        Args:
          options: The attention of the layer.
          cache: The memory of the block that the layer belongs to; None without a cache.
          scan_index: The index of the layer in the arrays of the block.
        """
        ...


class PromptRows(NamedTuple):
    """Positions of the tokens of whole prompts."""

    query_position_BT: jax.Array
    """Positions of all tokens, also on devices that have only some of the queries and keys."""
    key_position_BT: jax.Array
    """The same, with `EMPTY_POSITION` for padding."""

    AXES = ((axes.ATTENTION_BATCH, ""), (axes.ATTENTION_BATCH, ""))


@dataclass(frozen=True)
class PromptAttention:
    """Attention of whole prompts: each layer attends only to the prompt."""

    attend: Attend
    """Attention to all tokens of the prompt, also to those on other devices."""
    operations: Operations
    position_BT: Positions
    is_token_BT: jax.Array
    rows: PromptRows
    write: Callable[[LayerState, NewEntries, jax.Array], LayerState] | None
    """`write(cache, new, scan_index)`: the memory after a layer wrote to it; None without a cache.
    """

    reads_cache: ClassVar[bool] = False

    def layer(
        self, options: Attention, cache: LayerState | None, scan_index: jax.Array
    ) -> AttendLayer:
        """See `CallAttention`."""
        attend = self.operations.attend(partial(self._attend, options), options.num_kv_heads)

        def attend_and_write(
            queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
        ) -> tuple[jax.Array, LayerState | None]:
            out_BTKGH, entries = attend(queries, new, latents, self.rows, None)
            if self.write is None or cache is None:
                return out_BTKGH, cache
            return out_BTKGH, self.write(cache, entries, scan_index)

        return attend_and_write

    def _attend(
        self,
        options: Attention,
        queries: Queries,
        new: PromptKeysValues,
        latents: PromptLatents | None,
        rows: PromptRows,
        cache: None,
    ) -> tuple[jax.Array, NewEntries]:
        is_in_order = self.operations.prompt_stripes == IN_ORDER
        q_BTKGH, sink_KG = queries
        visibility = Visibility(*rows, options.window, is_in_order)
        attended = self.attend(q_BTKGH, *new, visibility, scores=options.scaled)
        return with_sinks(*attended, sink_KG), new if latents is None else latents
