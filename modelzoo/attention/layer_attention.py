"""Attention of all layers of a call on slots: for whole prompts, for chunks and for single tokens.

The three differ in the keys that a query may see: those of the prompt, those of the cache and the
chunk, or those of the cache. Each object holds what the layers of one call share, and returns the
attention of a single layer on request. Knows nothing of projections or the computation of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from .. import axes
from ..cache.kv_cache import Positions, append
from ..cache.layer_state import LayerState, NewEntries, PromptKeysValues, PromptLatents
from ..cache.segments import IN_ORDER
from ..layer_config import Attention
from ..operations import Operations
from .attend import Attend, Queries, Slots, Visibility, with_sinks
from .prompt_pieces import PromptPieces, layer_of_slots, write_piece
from .segment_attention import Entries, attend_segments, join_segments

Caches = tuple[Any, ...]
"""The cache of a block, or none."""
WriteCache = Callable[[Any, NewEntries, jax.Array, Attention], Any]
"""`write(cache, cache_update, scan_index, options)`: the cache after a layer wrote to it."""


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
    [Queries, PromptKeysValues | None, PromptLatents | None], tuple[jax.Array, Any]
]
"""Attention of one layer from queries, keys and values, and latents, as in `HeadInputs`; it returns
`out_BTKGH` and the cache update."""


class CallAttention(Protocol):
    """Attention of all layers of a call."""

    reads_cache: ClassVar[bool]
    """Whether queries attend to the cache, not only to the prompt."""

    def layer(
        self, options: Attention, caches: Caches, scan_index: jax.Array, x_BTD: jax.Array
    ) -> AttendLayer:
        """Return the attention of one layer.

        Args:
          options: The attention of the layer.
          caches: The caches of the block that the layer belongs to.
          scan_index: The index of the layer in the arrays of the block.
          x_BTD: The residual stream before the layer.
        """
        ...

    def update_cache(
        self,
        options: Attention,
        cache: Any,
        cache_update: Any,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> Any:
        """Return the cache of the block after the layer.

        Args:
          options: The attention of the layer.
          cache: The cache of the block before the layer.
          cache_update: The second result of the layer's attention.
          scan_index: The index of the layer in the arrays of the block.
          x_BTD: The residual stream after the layer.
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
    rows: PromptRows
    write: WriteCache

    reads_cache: ClassVar[bool] = False

    def layer(
        self, options: Attention, caches: Caches, scan_index: jax.Array, x_BTD: jax.Array
    ) -> AttendLayer:
        """See `CallAttention`."""
        attend = self.operations.attend(
            partial(self._attend, options), options.num_kv_heads, writes_cache=False
        )
        return partial(attend, rows=self.rows, caches=())

    def update_cache(
        self,
        options: Attention,
        cache: LayerState | None,
        cache_update: NewEntries,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> LayerState | None:
        """See `CallAttention`."""
        return self.write(cache, cache_update, scan_index, options)

    def _attend(
        self,
        options: Attention,
        queries: Queries,
        new: PromptKeysValues,
        latents: PromptLatents | None,
        rows: PromptRows,
        caches: Caches,
    ) -> tuple[jax.Array, NewEntries]:
        is_in_order = self.operations.prompt_stripes == IN_ORDER
        q_BTKGH, sink_KG = queries
        visibility = Visibility(*rows, options.window, is_in_order)
        attended = self.attend(q_BTKGH, *new, visibility, scores=options.scaled)
        return with_sinks(*attended, sink_KG), new if latents is None else latents


class ChunkContext(NamedTuple):
    """Positions of the tokens of a chunk and of the cache entries in its slots."""

    position_BT: jax.Array
    """Positions of all tokens, also on devices that have only some of the queries."""
    cached: Positions
    """Positions of the cache entries from before the chunk."""
    chunk_position_BT: jax.Array
    """Positions of the tokens of the chunk, with `EMPTY_POSITION` for padding."""
    slots: Slots | None = None
    """The layer and slots to read, if attention gets whole arrays of the cache."""

    AXES = (
        (axes.ATTENTION_BATCH, ""),
        axes.CACHE_POSITIONS,
        (axes.ATTENTION_BATCH, axes.LENGTH),
        (),
    )


@dataclass(frozen=True)
class ChunkAttention:
    """Attention of chunks: each layer attends to its slots and the chunk, then writes the chunk.

    Chunks in pages have an attention of their own (`page_attention`).
    """

    attend: Attend
    operations: Operations
    cache_operations: Operations
    """The operations by which the cache is laid out."""
    rows: PromptPieces
    context: ChunkContext
    num_unseen: int
    """The number of last entries that no token of the chunk sees, in layers without rolling
    buffers."""
    reads_slots: bool
    """Whether `attend` reads the slots of a cache itself (see `SlotReader`)."""

    reads_cache: ClassVar[bool] = True

    def layer(
        self, options: Attention, caches: Caches, scan_index: jax.Array, x_BTD: jax.Array
    ) -> AttendLayer:
        """See `CallAttention`."""
        rows, context = self.rows.after(x_BTD, self.operations), self.context
        slots = Slots(scan_index, rows.slot_B)
        if self.operations.has_cache_of(self.cache_operations):
            context = context._replace(slots=slots)
        else:
            num_unseen = 0 if context.cached.is_rolling(options.window) else self.num_unseen
            (own,) = caches
            caches = (self._take(own, options, slots, num_unseen),)
        attend = self.operations.attend(
            partial(self._attend, options), options.num_kv_heads, writes_cache=False
        )
        return partial(attend, rows=context, caches=caches)

    def _take(
        self, cache: LayerState, options: Attention, slots: Slots, num_unseen: int
    ) -> LayerState:
        """The entries of one layer in some slots of a cache, with the heads of attention."""
        num_heads = self.operations.num_cache_heads(options.num_kv_heads)
        return layer_of_slots(
            cache, *slots, num_unseen, num_heads, options.cache_dim, self.cache_operations
        )

    def update_cache(
        self,
        options: Attention,
        cache: LayerState,
        cache_update: NewEntries,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> LayerState:
        """See `CallAttention`."""
        # XLA copies the cache for a write that may run before the layer has read it
        rows = self.rows.after(x_BTD, self.operations)
        is_rolling = self.context.cached.is_rolling(options.window)
        return write_piece(cache, cache_update, scan_index, rows, is_rolling, self.cache_operations)

    def _attend(
        self,
        options: Attention,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None,
        rows: ChunkContext,
        caches: Caches,
    ) -> tuple[jax.Array, NewEntries]:
        new_entries = new if latents is None else latents
        assert new_entries is not None
        window = options.window
        cached_position_BS = rows.cached.for_window(window)
        (own,) = caches
        cached = own.read_layer(jnp.int32(0)) if rows.slots is None else own.keys_values()
        # segments of which no token sees anything are left out
        entries = Entries(
            [*cached[: len(cached_position_BS)], new_entries.read()],
            (*cached_position_BS, rows.chunk_position_BT),
        )
        if rows.slots is not None and not self.reads_slots:
            entries = join_segments(entries, rows.slots)
        attend = partial(self.attend, scores=options.scaled)
        attend_entries = partial(attend_segments, attend, window, slots=rows.slots)
        attend_all = self.operations.over_cache(attend_entries, window)
        attended = attend_all(queries.q_BTKGH, rows.position_BT, entries)
        return with_query_heads(queries, *attended), new_entries


class TokenRows(NamedTuple):
    """Positions of the tokens of a decode step and of the cache entries, and the layer."""

    position_B: jax.Array
    positions: Positions
    scan_index: jax.Array

    AXES = ((axes.ATTENTION_BATCH,), axes.CACHE_POSITIONS, ())


@dataclass(frozen=True)
class TokenAttention:
    """Attention of decode: each layer writes one token per row to the cache, then attends to it."""

    attend: Attend
    operations: Operations
    rows: TokenRows
    """Positions, those of the new tokens included; the layer is set for each layer."""

    reads_cache: ClassVar[bool] = True

    def layer(
        self, options: Attention, caches: Caches, scan_index: jax.Array, x_BTD: jax.Array
    ) -> AttendLayer:
        """See `CallAttention`."""
        rows = self.rows._replace(scan_index=scan_index)
        attend = self.operations.attend(
            partial(self._attend, options), options.num_kv_heads, writes_cache=True
        )
        return partial(attend, rows=rows, caches=caches)

    def update_cache(
        self,
        options: Attention,
        cache: LayerState,
        cache_update: LayerState,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> LayerState:
        """See `CallAttention`. Attention has already written the cache."""
        return cache_update

    def _attend(
        self,
        options: Attention,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None,
        rows: TokenRows,
        caches: Caches,
    ) -> tuple[jax.Array, LayerState]:
        new_entries = new if latents is None else latents
        assert new_entries is not None
        (own,), window = caches, options.window
        entry_B = rows.positions.entry(rows.position_B, window)
        local_B, layer = self.operations.stripe.local_index(entry_B), rows.scan_index
        own = append(own, new_entries, local_B, layer)
        entries = Entries(own.read_layer(layer), rows.positions.for_window(window))
        attend = partial(self.attend, scores=options.scaled)
        attend_entries = partial(attend_segments, attend, window)
        attend_all = self.operations.over_cache(attend_entries, window)
        attended = attend_all(queries.q_BTKGH, rows.position_B[:, None], entries)
        return with_query_heads(queries, *attended), own


def with_query_heads(queries: Queries, out_BTKGH: jax.Array, lse_BTKG: jax.Array) -> jax.Array:
    """Apply the sinks to results over all entries, and group them by the heads of the queries."""
    q_BTKGH, sink_KG = queries
    return with_sinks(out_BTKGH, lse_BTKG, sink_KG).reshape(*q_BTKGH.shape[:-1], -1)
