"""Automata over tokens as tables, which say what tokens a row may have next.

The automata of all schemas stand in one set of tables, and a row has the number of its state. State
0 belongs to rows without a schema: it allows every token and never changes. Knows nothing of
schemas, texts or requests.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BITS = 32
"""The tokens that one word of a mask covers."""


class StructureTables(NamedTuple):
    """S states, K schemas, M masks, and L levels of a state.

    A level of a state has a mask for rows with at least a given number of tokens left. The moves of
    a state are I blocks of A classes, and a mask is J blocks of U words. Most blocks are equal, so
    the P different blocks of moves and the Q different blocks of masks are stored once.
    """

    move_block_SI: jax.Array
    """The blocks of each state's moves."""
    moves_PA: jax.Array
    """The next state for each class of tokens, counted from the first state of the schema."""
    schema_S: jax.Array
    """The schema of each state; 0 for rows without one."""
    first_K: jax.Array
    """The first state of each schema."""
    class_KV: jax.Array
    """The class of each token in each schema."""
    needs_SL: jax.Array
    """The number of tokens that must be left for each level of a state, in growing order."""
    mask_SL: jax.Array
    """The mask of each level: it allows tokens after which the text can still be completed."""
    mask_block_MJ: jax.Array
    """The blocks of each mask."""
    words_QU: jax.Array
    """Whether a mask allows each token, one bit a token, the lowest first."""


def allowed_tokens(
    tables: StructureTables, state_B: jax.Array, left_B: jax.Array, num_tokens: int
) -> jax.Array:
    """The tokens `[B, V]` that each row may have next, if it has `left_B` tokens left."""
    level_B = jnp.sum(tables.needs_SL[state_B] <= left_B[:, None], axis=1) - 1
    mask_B = tables.mask_SL[state_B, jnp.maximum(level_B, 0)]
    words_BW = tables.words_QU[tables.mask_block_MJ[mask_B]].reshape(len(mask_B), -1)
    bits = words_BW[:, :, None] >> jnp.arange(BITS, dtype=jnp.uint32)[None, None]
    return (bits & 1).reshape(len(state_B), -1)[:, :num_tokens] != 0


def next_states(tables: StructureTables, state_B: jax.Array, token_B: jax.Array) -> jax.Array:
    """The state of each row after a token that it may have."""
    schema_B = tables.schema_S[state_B]
    class_B = tables.class_KV[schema_B, token_B].astype(jnp.int32)
    place_B, within_B = jnp.divmod(class_B, tables.moves_PA.shape[1])
    block_B = tables.move_block_SI[state_B, place_B]
    return tables.first_K[schema_B] + tables.moves_PA[block_B, within_B]
