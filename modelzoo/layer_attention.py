"""What a layer does with its queries, keys and values: of a prompt, of a chunk, of single tokens.

All three attend and keep; they differ in what there is to attend to. Each is given what the layers
of a call share, and makes the attention of a layer from its window, from the cache of the layers
that are kept together, and from which of them it is. Knows nothing of projections or of how keys
were made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import axes
from .attention import Attend, Queries, Visibility, with_sinks
from .config import Window
from .kept_layers import KeptLayers, PromptKeysValues, PromptLatents, PromptLayer
from .kv_cache import Positions, append
from .operations import Operations
from .prompt_pieces import PromptPieces, keep_piece, layer_of_slots
from .segment_attention import attend_cached
from .stripes import IN_ORDER

Keep = Callable[[Any, PromptLayer, jax.Array, Window], Any]
"""The cache of layers after one of them, with this window, has made something of new tokens."""


@dataclass
class AttendLayer:
    """What a layer does with its queries and new keys and values: attend, keep what must be kept.

    New keys and values are those of the projections' heads. Where there are latents they are kept
    instead, and attended to where the layer reads its cache.
    """

    attend: Callable[
        [Queries, PromptKeysValues | None, PromptLatents | None],
        tuple[jax.Array, KeptLayers | None],
    ]
    """`out_BTKGH` of queries, and what is kept."""
    reads_cache: bool
    kept: KeptLayers | None = None
    """Once it was called."""

    def __call__(
        self,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None = None,
    ) -> jax.Array:
        """`out_BTKGH` of queries."""
        out_BTKGH, self.kept = self.attend(queries, new, latents)
        return out_BTKGH


class PromptRows(NamedTuple):
    """What attention knows of the rows of whole prompts, beside queries, keys and values."""

    query_position_BT: jax.Array
    """Of all tokens, also where queries and keys are those of some."""
    key_position_BT: jax.Array
    latents: PromptLatents | None = None

    AXES = ((axes.ATTENTION_BATCH, ""), (axes.ATTENTION_BATCH, ""), axes.PROMPT_LATENTS)


@dataclass(frozen=True)
class PromptAttention:
    """Layers of whole prompts attend to the prompt alone."""

    attend: Attend
    """Over all tokens, wherever they are."""
    operations: Operations
    rows: PromptRows
    keep: Keep

    def __call__(self, window: Window, layers: KeptLayers | None, layer: jax.Array) -> AttendLayer:
        is_in_order = self.operations.prompt_stripes == IN_ORDER

        def attend_self(
            queries: Queries, new: PromptKeysValues, rows: PromptRows, _: None
        ) -> tuple[jax.Array, PromptLayer]:
            q_BTKGH, sink_KG = queries
            positions = rows.query_position_BT, rows.key_position_BT
            attended = self.attend(q_BTKGH, *new, Visibility(*positions, window, is_in_order))
            return with_sinks(*attended, sink_KG), _kept(new, rows.latents)

        def attend(
            queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
        ) -> tuple[jax.Array, KeptLayers | None]:
            rows, kept = self.rows._replace(latents=latents), type(_kept(new, latents))
            out_BTKGH, made = self.operations.attend(attend_self, queries, new, rows, None, kept)
            return out_BTKGH, self.keep(layers, made, layer, window)

        return AttendLayer(attend, reads_cache=False)


class ChunkContext(NamedTuple):
    """What attention knows of the rows of a chunk, beside queries, keys and values."""

    position_BT: jax.Array
    """Of all tokens, also where queries are those of some."""
    seen: Positions
    """Of what the rows' slots hold from before."""
    kept_position_BT: jax.Array
    """Of the chunk's own tokens, empty where it is padded."""
    latents: PromptLatents | None = None

    AXES = (
        (axes.ATTENTION_BATCH, ""),
        axes.CACHE_POSITIONS,
        (axes.ATTENTION_BATCH, axes.LENGTH),
        axes.PROMPT_LATENTS,
    )


@dataclass(frozen=True)
class ChunkAttention:
    """Layers of a chunk attend to what its slots hold and to the chunk, and write that there."""

    attend: Attend
    operations: Operations
    stored: Operations
    """Those of the cache."""
    rows: PromptPieces
    context: ChunkContext
    num_heads: int
    """Key/value heads that attention has."""
    num_unseen: int
    """Last entries that no token of the chunk sees, of layers that keep every position."""

    def __call__(self, window: Window, layers: KeptLayers, layer: jax.Array) -> AttendLayer:
        is_ring = self.context.seen.is_ring(window)

        def attend_chunk(
            queries: Queries, new: PromptKeysValues | None, context: ChunkContext, old: KeptLayers
        ) -> tuple[jax.Array, PromptLayer]:
            q_BTKGH, sink_KG = queries
            kept = _kept(new, context.latents)
            key_position_BS = (*context.seen.of(window), context.kept_position_BT)
            entries = [*old.read(jnp.int32(0)), kept.read()]
            out_BTKGH = attend_cached(
                self.attend, q_BTKGH, entries, context.position_BT, key_position_BS, window,
                sink_KG, self.operations,
            )  # fmt: skip
            return out_BTKGH, kept

        def attend(
            queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
        ) -> tuple[jax.Array, KeptLayers]:
            rows = self.rows.after(queries.q_BTKGH, self.operations)
            num_left = 0 if is_ring else self.num_unseen
            old = layer_of_slots(layers, layer, rows.slot_B, num_left, self.num_heads, self.stored)
            context, kept = self.context._replace(latents=latents), type(_kept(new, latents))
            out_BTKGH, made = self.operations.attend(attend_chunk, queries, new, context, old, kept)
            # a write that is not known to come after this read is made in a copy
            written = rows.after(out_BTKGH, self.operations)
            return out_BTKGH, keep_piece(layers, made, layer, written, is_ring, self.stored)

        return AttendLayer(attend, reads_cache=True)


class CachedRows(NamedTuple):
    """What attention knows of rows of one token, beside queries, keys and values."""

    position_B: jax.Array
    positions: Positions
    """Of the cache's entries."""
    layer: jax.Array
    """Which of the layers that are kept together."""
    latents: PromptLatents | None = None

    AXES = ((axes.ATTENTION_BATCH,), axes.CACHE_POSITIONS, (), axes.PROMPT_LATENTS)


@dataclass(frozen=True)
class TokenAttention:
    """Layers of one token a row keep it in the cache, and attend to the cache."""

    attend: Attend
    operations: Operations
    position_B: jax.Array
    positions: Positions
    """Of the cache's entries."""

    def __call__(self, window: Window, layers: KeptLayers, layer: jax.Array) -> AttendLayer:
        operations = self.operations

        def attend_cache(
            queries: Queries, new: PromptKeysValues | None, rows: CachedRows, old: KeptLayers
        ) -> tuple[jax.Array, KeptLayers]:
            q_BTKGH, sink_KG = queries
            position_B, positions, layer, latents = rows
            entry_B = operations.stripe.place(positions.entry(position_B, window))
            kept = append(old, _kept(new, latents), entry_B, layer)
            out_BTKGH = attend_cached(
                self.attend, q_BTKGH, kept.read(layer), position_B[:, None], positions.of(window),
                window, sink_KG, operations,
            )  # fmt: skip
            return out_BTKGH, kept

        def attend(
            queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
        ) -> tuple[jax.Array, KeptLayers]:
            rows = CachedRows(self.position_B, self.positions, layer, latents)
            return operations.attend(attend_cache, queries, new, rows, layers, type(layers))

        return AttendLayer(attend, reads_cache=True)


def _kept(new: PromptKeysValues | None, latents: PromptLatents | None) -> PromptLayer:
    """What is kept of new tokens."""
    kept = new if latents is None else latents
    assert kept is not None
    return kept
