"""Attention of the layers of one call: of whole prompts, of chunks, of single tokens.

All three attend and say what is kept. They differ in what there is to attend to. Each is made once
for a call, from what its layers share, and gives the attention of every layer. Knows nothing of
projections or of how keys were made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from . import axes
from .attention import Attend, Queries, Slots, Visibility, with_sinks
from .config import Window
from .kept_layers import KeptLayers, PromptKeysValues, PromptLatents, PromptLayer
from .kv_cache import Positions, append
from .operations import Operations
from .prompt_pieces import PromptPieces, keep_piece, layer_of_slots
from .segment_attention import attend_segments
from .stripes import IN_ORDER

Keep = Callable[[Any, PromptLayer, jax.Array, Window], Any]
"""`keep(cache, made, scan_index, window)`: the cache of layers with what one of them made."""


class LayerAttention(NamedTuple):
    """Attention of one layer, as its block calls it."""

    attend: Callable[
        [Queries, PromptKeysValues | None, PromptLatents | None], tuple[jax.Array, Any]
    ]
    """`out_BTKGH` of queries, and what the layer made to be kept.

    New keys and values are those of the projections' heads. Latents, where there are any, are kept
    instead of them. A layer that reads its cache attends to latents, and passes no keys and values.
    """
    reads_cache: bool


class CallAttention(Protocol):
    """Attention of all layers of a call."""

    def layer(
        self, window: Window, cache: Any, scan_index: jax.Array, x_BTD: jax.Array
    ) -> LayerAttention:
        """The attention of the layer `scan_index` of those that `cache` belongs to.

        `x_BTD` is the residual stream before the layer.
        """
        ...

    def keep(
        self, window: Window, cache: Any, made: Any, scan_index: jax.Array, x_BTD: jax.Array
    ) -> Any:
        """The cache with what the layer made. `x_BTD` is the residual stream after the layer."""
        ...


class PromptRows(NamedTuple):
    """Positions of the tokens of whole prompts."""

    query_position_BT: jax.Array
    """Positions of all tokens, also where queries and keys are those of some."""
    key_position_BT: jax.Array

    AXES = ((axes.ATTENTION_BATCH, ""), (axes.ATTENTION_BATCH, ""))


@dataclass(frozen=True)
class PromptAttention:
    """Layers of whole prompts attend to the prompt alone."""

    attend: Attend
    """Attention to all tokens, wherever they are."""
    operations: Operations
    rows: PromptRows
    write: Keep

    def layer(
        self, window: Window, cache: KeptLayers | None, scan_index: jax.Array, x_BTD: jax.Array
    ) -> LayerAttention:
        """See `CallAttention`."""
        attend = self.operations.attend(partial(self._attend, window), writes_cache=False)
        return LayerAttention(partial(attend, rows=self.rows, cache=None), reads_cache=False)

    def keep(
        self,
        window: Window,
        cache: KeptLayers | None,
        made: PromptLayer,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> KeptLayers | None:
        """See `CallAttention`."""
        return self.write(cache, made, scan_index, window)

    def _attend(
        self,
        window: Window,
        queries: Queries,
        new: PromptKeysValues,
        latents: PromptLatents | None,
        rows: PromptRows,
        cache: None,
    ) -> tuple[jax.Array, PromptLayer]:
        is_in_order = self.operations.prompt_stripes == IN_ORDER
        q_BTKGH, sink_KG = queries
        attended = self.attend(q_BTKGH, *new, Visibility(*rows, window, is_in_order))
        return with_sinks(*attended, sink_KG), new if latents is None else latents


class ChunkContext(NamedTuple):
    """Positions of the tokens of a chunk, and of what its rows' slots hold."""

    position_BT: jax.Array
    """Positions of all tokens, also where queries are those of some."""
    seen: Positions
    """Positions of the entries from before the chunk."""
    kept_position_BT: jax.Array
    """Positions of the chunk's own tokens, empty where it is padded."""
    slots: Slots | None = None
    """The layer and slots of the rows, where attention has all of the cache."""

    AXES = (
        (axes.ATTENTION_BATCH, ""),
        axes.CACHE_POSITIONS,
        (axes.ATTENTION_BATCH, axes.LENGTH),
        (),
    )


@dataclass(frozen=True)
class ChunkAttention:
    """Layers of a chunk attend to what its slots hold and to the chunk, and write that there."""

    attend: Attend
    operations: Operations
    stored: Operations
    """The operations of the cache."""
    rows: PromptPieces
    context: ChunkContext
    num_heads: int
    """Key/value heads that attention has."""
    head_dim: int
    """Numbers of a head or latent."""
    num_unseen: int
    """Last entries that no token of the chunk sees, of layers that keep every position."""

    def layer(
        self, window: Window, cache: KeptLayers, scan_index: jax.Array, x_BTD: jax.Array
    ) -> LayerAttention:
        """See `CallAttention`."""
        slot_B = self.rows.after(x_BTD, self.operations).slot_B
        context = self.context
        if self.operations.has_cache_of(self.stored):
            context = context._replace(slots=Slots(scan_index, slot_B))
        else:
            num_left = 0 if context.seen.is_ring(window) else self.num_unseen
            heads = self.num_heads, self.head_dim
            cache = layer_of_slots(cache, scan_index, slot_B, num_left, *heads, self.stored)
        attend = self.operations.attend(partial(self._attend, window), writes_cache=False)
        return LayerAttention(partial(attend, rows=context, cache=cache), reads_cache=True)

    def keep(
        self,
        window: Window,
        cache: KeptLayers,
        made: PromptLayer,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> KeptLayers:
        """See `CallAttention`."""
        # a write that is not known to come after the layer's read is made in a copy
        rows = self.rows.after(x_BTD, self.operations)
        is_ring = self.context.seen.is_ring(window)
        return keep_piece(cache, made, scan_index, rows, is_ring, self.stored)

    def _attend(
        self,
        window: Window,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None,
        rows: ChunkContext,
        cache: KeptLayers,
    ) -> tuple[jax.Array, PromptLayer]:
        made = new if latents is None else latents
        assert made is not None
        seen_BS = rows.seen.of(window)
        old = cache.read(jnp.int32(0)) if rows.slots is None else cache.read_all()
        # of the last segment there may be nothing to be seen
        entries = [*old[: len(seen_BS)], made.read()], (*seen_BS, rows.kept_position_BT)
        attend_entries = partial(attend_segments, self.attend, window, slots=rows.slots)
        attend_all = self.operations.over_cache(attend_entries, window)
        attended = attend_all(queries.q_BTKGH, rows.position_BT, entries)
        return _of_queries(queries, *attended), made


class TokenRows(NamedTuple):
    """Positions of the tokens of a decode step and of the cache's entries, and the layer."""

    position_B: jax.Array
    positions: Positions
    scan_index: jax.Array

    AXES = ((axes.ATTENTION_BATCH,), axes.CACHE_POSITIONS, ())


@dataclass(frozen=True)
class TokenAttention:
    """Layers of one token a row write it to the cache, then attend to the cache."""

    attend: Attend
    operations: Operations
    position_B: jax.Array
    positions: Positions
    """Positions of the cache's entries, the new tokens' included."""

    def layer(
        self, window: Window, cache: KeptLayers, scan_index: jax.Array, x_BTD: jax.Array
    ) -> LayerAttention:
        """See `CallAttention`."""
        rows = TokenRows(self.position_B, self.positions, scan_index)
        attend = self.operations.attend(partial(self._attend, window), writes_cache=True)
        return LayerAttention(partial(attend, rows=rows, cache=cache), reads_cache=True)

    def keep(
        self,
        window: Window,
        cache: KeptLayers,
        made: KeptLayers,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> KeptLayers:
        """See `CallAttention`. Attention has written the cache by then."""
        return made

    def _attend(
        self,
        window: Window,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None,
        rows: TokenRows,
        cache: KeptLayers,
    ) -> tuple[jax.Array, KeptLayers]:
        made = new if latents is None else latents
        assert made is not None
        position_B, positions, scan_index = rows
        entry_B = self.operations.stripe.place(positions.entry(position_B, window))
        cache = append(cache, made, entry_B, scan_index)
        entries = cache.read(scan_index), positions.of(window)
        attend_entries = partial(attend_segments, self.attend, window)
        attend_all = self.operations.over_cache(attend_entries, window)
        attended = attend_all(queries.q_BTKGH, position_B[:, None], entries)
        return _of_queries(queries, *attended), cache


def _of_queries(queries: Queries, out_BTKGH: jax.Array, lse_BTKG: jax.Array) -> jax.Array:
    """Results of all entries with the sinks, by the heads of the queries."""
    q_BTKGH, sink_KG = queries
    return with_sinks(out_BTKGH, lse_BTKG, sink_KG).reshape(*q_BTKGH.shape[:-1], -1)
