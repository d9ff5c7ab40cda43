"""What a layer does with its queries, keys and values: of a prompt, of a chunk, of single tokens.

All three attend and keep; they differ in what there is to attend to, and where it is kept. Each is
given what the layers of a call share, and makes the attention of a layer from its window, from what
of the cache it has, and from its turn. Knows nothing of projections or of how keys were made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from . import axes
from .attention import Attend, Queries, Visibility, with_sinks
from .chunk_cache import ChunkRows, keep_chunk, layer_of_slots, with_chunk
from .config import Window
from .kept_layers import (
    KeptLayer,
    OneLayer,
    PromptKeysValues,
    PromptLatents,
    PromptLayer,
    one_layer,
)
from .kv_cache import Positions, append
from .operations import Operations
from .segment_attention import attend_cached
from .stripes import IN_ORDER

Kept = KeptLayer | PromptLayer


@dataclass
class AttendLayer:
    """What a layer does with its queries and new keys and values: attend, keep what must be kept.

    New keys and values are those of the projections' heads. Where there are latents they are kept
    instead, and attended to where the layer reads its cache.
    """

    attend: Callable[
        [Queries, PromptKeysValues | None, PromptLatents | None], tuple[jax.Array, Kept]
    ]
    """`out_BTKGH` of queries, and what is kept."""
    reads_cache: bool
    kept: Kept | None = None
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
    """What attention knows of the rows of a prompt, beside queries, keys and values."""

    query_position_BT: jax.Array
    """Of all tokens, also where queries and keys are those of some."""
    key_position_BT: jax.Array
    latents: PromptLatents | None = None

    AXES = ((axes.ATTENTION_BATCH, ""), (axes.ATTENTION_BATCH, ""), axes.PROMPT_LATENTS)


@dataclass(frozen=True)
class PromptAttention:
    """Layers of a whole prompt attend to the prompt, and keep what they make of it."""

    attend: Attend
    """Over all tokens, wherever they are."""
    operations: Operations
    rows: PromptRows

    def __call__(self, window: Window, old: None, turn: jax.Array | None) -> AttendLayer:
        del old, turn
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
        ) -> tuple[jax.Array, PromptLayer]:
            rows, kept = self.rows._replace(latents=latents), type(_kept(new, latents))
            return self.operations.attend(attend_self, queries, new, rows, None, kept)

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
    rows: ChunkRows
    context: ChunkContext
    num_heads: int
    """Key/value heads that attention has."""
    num_unseen: int
    """Last entries that no token of the chunk sees, of layers that keep every position."""

    def __call__(self, window: Window, layer: OneLayer, turn: None) -> AttendLayer:
        del turn
        is_ring = self.context.seen.is_ring(window)

        def attend_chunk(
            queries: Queries, new: PromptKeysValues | None, context: ChunkContext, old: OneLayer
        ) -> tuple[jax.Array, PromptLayer]:
            q_BTKGH, sink_KG = queries
            kept = _kept(new, context.latents)
            key_position_BS = (*context.seen.of(window), context.kept_position_BT)
            out_BTKGH = attend_cached(
                self.attend, q_BTKGH, with_chunk(old, kept), context.position_BT, key_position_BS,
                window, sink_KG, self.operations,
            )  # fmt: skip
            return out_BTKGH, kept

        def attend(
            queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
        ) -> tuple[jax.Array, OneLayer]:
            rows = self.rows.after(queries.q_BTKGH, self.operations)
            num_left = 0 if is_ring else self.num_unseen
            old = layer_of_slots(layer, rows.slot_B, num_left, self.num_heads, self.stored)
            context, kept = self.context._replace(latents=latents), type(_kept(new, latents))
            out_BTKGH, made = self.operations.attend(attend_chunk, queries, new, context, old, kept)
            # what a ring writes is made of what it had, a block waits for those that read
            written = rows if is_ring else rows.after(out_BTKGH, self.operations)
            return out_BTKGH, keep_chunk(layer, made, written, is_ring, self.stored)

        return AttendLayer(attend, reads_cache=True)


class CachedRows(NamedTuple):
    """What attention knows of rows of one token, beside queries, keys and values."""

    position_B: jax.Array
    positions: Positions
    """Of the cache's entries."""
    turn: jax.Array | None = None
    """Of the layer, where others are kept with it."""
    latents: PromptLatents | None = None

    AXES = ((axes.ATTENTION_BATCH,), axes.CACHE_POSITIONS, (), axes.PROMPT_LATENTS)


@dataclass(frozen=True)
class TokenAttention:
    """Layers of one token a row keep it in the cache, and attend to the cache."""

    attend: Attend
    operations: Operations
    rows: CachedRows

    def __call__(self, window: Window, old: KeptLayer, turn: jax.Array | None) -> AttendLayer:
        operations = self.operations
        # a ring is as long as its window: it fills up, and then all of it is seen
        sees_beginning = operations.cache_stripes == IN_ORDER

        def attend_cache(
            queries: Queries, new: PromptKeysValues | None, rows: CachedRows, old: KeptLayer
        ) -> tuple[jax.Array, KeptLayer]:
            q_BTKGH, sink_KG = queries
            position_B, positions, turn, latents = rows
            entry_B = operations.stripe.place(positions.entry(position_B, window))
            kept = append(old, _kept(new, latents), entry_B, turn)
            out_BTKGH = attend_cached(
                self.attend, q_BTKGH, one_layer(kept, turn), position_B[:, None],
                positions.of(window), window, sink_KG, operations, sees_beginning,
            )  # fmt: skip
            return out_BTKGH, kept

        def attend(
            queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
        ) -> tuple[jax.Array, KeptLayer]:
            rows = self.rows._replace(turn=turn, latents=latents)
            return operations.attend(attend_cache, queries, new, rows, old, type(old))

        return AttendLayer(attend, reads_cache=True)


def _kept(new: PromptKeysValues | None, latents: PromptLatents | None) -> PromptLayer:
    """What is kept of new tokens."""
    kept = new if latents is None else latents
    assert kept is not None
    return kept
