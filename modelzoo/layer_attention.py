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
from .kv_cache import Positions, append
from .layer_cache import LayerCache, PromptKeysValues, PromptLatents, PromptLayer
from .operations import Operations
from .prompt_pieces import PromptPieces, layer_of_slots, write_piece
from .segment_attention import attend_segments
from .stripes import IN_ORDER

WriteCache = Callable[[Any, PromptLayer, jax.Array, Window], Any]
"""`write(cache, cache_update, scan_index, window)`: the cache after a layer wrote to it."""


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
        self, window: Window, cache: Any, cache_update: Any, scan_index: jax.Array, x_BTD: jax.Array
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
    write: WriteCache

    def layer(
        self, window: Window, cache: LayerCache | None, scan_index: jax.Array, x_BTD: jax.Array
    ) -> LayerAttention:
        """See `CallAttention`."""
        attend = self.operations.attend(partial(self._attend, window), writes_cache=False)
        return LayerAttention(partial(attend, rows=self.rows, cache=None), reads_cache=False)

    def keep(
        self,
        window: Window,
        cache: LayerCache | None,
        cache_update: PromptLayer,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> LayerCache | None:
        """See `CallAttention`."""
        return self.write(cache, cache_update, scan_index, window)

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
    cache_operations: Operations
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
        self, window: Window, cache: LayerCache, scan_index: jax.Array, x_BTD: jax.Array
    ) -> LayerAttention:
        """See `CallAttention`."""
        slot_B = self.rows.after(x_BTD, self.operations).slot_B
        context = self.context
        if self.operations.has_cache_of(self.cache_operations):
            context = context._replace(slots=Slots(scan_index, slot_B))
        else:
            num_left = 0 if context.seen.is_rolling(window) else self.num_unseen
            heads = self.num_heads, self.head_dim
            cache = layer_of_slots(
                cache, scan_index, slot_B, num_left, *heads, self.cache_operations
            )
        attend = self.operations.attend(partial(self._attend, window), writes_cache=False)
        return LayerAttention(partial(attend, rows=context, cache=cache), reads_cache=True)

    def keep(
        self,
        window: Window,
        cache: LayerCache,
        cache_update: PromptLayer,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> LayerCache:
        """See `CallAttention`."""
        # a write that is not known to come after the layer's read is made in a copy
        rows = self.rows.after(x_BTD, self.operations)
        is_rolling = self.context.seen.is_rolling(window)
        return write_piece(cache, cache_update, scan_index, rows, is_rolling, self.cache_operations)

    def _attend(
        self,
        window: Window,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None,
        rows: ChunkContext,
        cache: LayerCache,
    ) -> tuple[jax.Array, PromptLayer]:
        cache_update = new if latents is None else latents
        assert cache_update is not None
        seen_BS = rows.seen.of(window)
        old = cache.read(jnp.int32(0)) if rows.slots is None else cache.read_all()
        # of the last segment there may be nothing to be seen
        entries = [*old[: len(seen_BS)], cache_update.read()], (*seen_BS, rows.kept_position_BT)
        attend_entries = partial(attend_segments, self.attend, window, slots=rows.slots)
        attend_all = self.operations.over_cache(attend_entries, window)
        attended = attend_all(queries.q_BTKGH, rows.position_BT, entries)
        return _of_queries(queries, *attended), cache_update


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
        self, window: Window, cache: LayerCache, scan_index: jax.Array, x_BTD: jax.Array
    ) -> LayerAttention:
        """See `CallAttention`."""
        rows = TokenRows(self.position_B, self.positions, scan_index)
        attend = self.operations.attend(partial(self._attend, window), writes_cache=True)
        return LayerAttention(partial(attend, rows=rows, cache=cache), reads_cache=True)

    def keep(
        self,
        window: Window,
        cache: LayerCache,
        cache_update: LayerCache,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> LayerCache:
        """See `CallAttention`. Attention has written the cache by then."""
        return cache_update

    def _attend(
        self,
        window: Window,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None,
        rows: TokenRows,
        cache: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        cache_update = new if latents is None else latents
        assert cache_update is not None
        position_B, positions, scan_index = rows
        entry_B = self.operations.stripe.local_index(positions.entry(position_B, window))
        cache = append(cache, cache_update, entry_B, scan_index)
        entries = cache.read(scan_index), positions.of(window)
        attend_entries = partial(attend_segments, self.attend, window)
        attend_all = self.operations.over_cache(attend_entries, window)
        attended = attend_all(queries.q_BTKGH, position_B[:, None], entries)
        return _of_queries(queries, *attended), cache


def _of_queries(queries: Queries, out_BTKGH: jax.Array, lse_BTKG: jax.Array) -> jax.Array:
    """Results of all entries with the sinks, by the heads of the queries."""
    q_BTKGH, sink_KG = queries
    return with_sinks(out_BTKGH, lse_BTKG, sink_KG).reshape(*q_BTKGH.shape[:-1], -1)
