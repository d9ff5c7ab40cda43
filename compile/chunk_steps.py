"""Graph bodies of chunked prefill: open a slot, pour chunks into slots, copy a slot.

A prompt takes its slot before its first chunk, and what is known of it lies there from then on: a
chunk is a few tokens more at the slot's length, and the last one makes the row active. Until then
decode passes it by. `stored` are the operations of decode, by which slots lie. Knows nothing of
requests, text, queues or clocks.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..modelzoo import axes
from ..modelzoo.attention import EMPTY_POSITION
from ..modelzoo.chunk_cache import ChunkRows, put_blocks
from ..modelzoo.moe.use import ExpertReport
from ..modelzoo.operations import Axes, Operations
from ..modelzoo.sampling import SamplingState, TokenScores
from .steps import DecodeState, last_hidden, score_positions

if TYPE_CHECKING:
    from ..modelzoo.decoder import Decoder

_BY_SLOT = axes.LOGITS[:1]


def open_step(
    state: DecodeState,
    slot: jax.Array,
    prompt_length_1: jax.Array,
    limit_1: jax.Array,
    sampling: SamplingState,
    *,
    stored: Operations,
) -> DecodeState:
    """Give `slot` to a prompt that is to be poured in. Donated: state.

    Rewrites the slot whole, so nothing of its former owner, NaN included, can reach the next one.
    """

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return stored.put_row(old, new, slot, _BY_SLOT)

    def clear(x: jax.Array, logical_axes: Axes) -> jax.Array:
        return stored.put_row(x, jnp.zeros_like(x, shape=(1, *x.shape[1:])), slot, logical_axes)

    def empty(position_BS: jax.Array) -> jax.Array:
        empty_1S = jnp.full((1, position_BS.shape[1]), EMPTY_POSITION, jnp.int32)
        return stored.put_row(position_BS, empty_1S, slot, axes.CACHE_POSITIONS)

    positions = jax.tree.map(empty, state.cache.positions)
    state = state.map(clear)
    return state._replace(
        cache=state.cache._replace(positions=positions),
        prompt_length_B=put(state.prompt_length_B, prompt_length_1),
        limit_B=put(state.limit_B, limit_1),
        sampling=jax.tree.map(put, state.sampling, sampling),
    )


def chunk_step(
    decoder: "Decoder",
    state: DecodeState,
    rows: ChunkRows,
    tokens_BT: jax.Array,
    *,
    stored: Operations,
) -> tuple[DecodeState, ExpertReport | None]:
    """Pour the next chunk of some prompts into their slots. Static: B, T. Donated: state.

    `state.cache` holds the segments below the graph's span, in which every chunk ends.
    """
    _, state, experts = _pour(decoder, state, rows, tokens_BT, stored)
    return state, experts


def chunk_score_step(
    decoder: "Decoder",
    state: DecodeState,
    rows: ChunkRows,
    tokens_BT: jax.Array,
    next_BT: jax.Array,
    num_logprobs_B: jax.Array,
    *,
    stored: Operations,
) -> tuple[DecodeState, tuple[ExpertReport | None, TokenScores]]:
    """As `chunk_step`, and the log-probability of the prompt's token after each of the chunk."""
    x_BTD, state, experts = _pour(decoder, state, rows, tokens_BT, stored)
    return state, (experts, score_positions(decoder, x_BTD, next_BT, num_logprobs_B))


def fork_step(
    state: DecodeState,
    source: jax.Array,
    slot: jax.Array,
    sampling: SamplingState,
    *,
    stored: Operations,
) -> DecodeState:
    """Make `slot` the same as `source`, with sampling parameters of its own. Donated: state."""

    def copy(x: jax.Array, logical_axes: Axes) -> jax.Array:
        row = stored.take_row(x, source, logical_axes)
        return stored.put_row(x, row, slot, logical_axes)

    def copy_positions(position_BS: jax.Array) -> jax.Array:
        row_1S = stored.take_row(position_BS, source, axes.CACHE_POSITIONS)
        # what a shorter slot has no room for holds no token
        row_1S = jnp.where(source < position_BS.shape[0], row_1S, EMPTY_POSITION)
        return stored.put_row(position_BS, row_1S, slot, axes.CACHE_POSITIONS)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return stored.put_row(old, new, slot, _BY_SLOT)

    positions = jax.tree.map(copy_positions, state.cache.positions)
    state = state.map(copy)
    return state._replace(
        cache=state.cache._replace(positions=positions),
        sampling=jax.tree.map(put, state.sampling, sampling),
    )


def _pour(
    decoder: "Decoder",
    state: DecodeState,
    rows: ChunkRows,
    tokens_BT: jax.Array,
    stored: Operations,
) -> tuple[jax.Array, DecodeState, ExpertReport | None]:
    x_BTD, cache, experts = decoder.prefill_chunk(tokens_BT, rows, state.cache, stored)
    prompt_length_B = stored.take_rows(state.prompt_length_B, rows.slot_B, _BY_SLOT)
    limit_B = stored.take_rows(state.limit_B, rows.slot_B, _BY_SLOT)
    length_B = rows.start_B + rows.count_B

    def put(old: jax.Array, new: jax.Array, logical_axes: Axes = _BY_SLOT) -> jax.Array:
        return stored.write_rows(_put_rows, old, new, rows, logical_axes)

    logits_BV = decoder.logits(last_hidden(decoder, x_BTD, rows.count_B))
    state = state._replace(
        cache=cache,
        logits_BV=put(state.logits_BV, logits_BV, axes.LOGITS),
        tokens_BS=stored.write_rows(_put_tokens, state.tokens_BS, tokens_BT, rows, _BY_SLOT),
        length_B=put(state.length_B, length_B),
        is_active_B=put(state.is_active_B, (length_B == prompt_length_B) & (length_B < limit_B)),
    )
    return x_BTD, state, experts


def _put_rows(x: jax.Array, new: jax.Array, rows: ChunkRows) -> jax.Array:
    return x.at[rows.slot_B].set(new, mode="drop")


def _put_tokens(tokens_BS: jax.Array, new_BT: jax.Array, rows: ChunkRows) -> jax.Array:
    return put_blocks(tokens_BS, new_BT, rows.slot_B, rows.start_B, axis=1)
