"""Graph bodies of prefill: pieces of prompts are written into their slots, and slots are copied.

What is known of a prompt lies in its slot from its first piece on: every piece writes what the
request asks for, and leaves the row at the length that it has then. The last one makes the row
active; until then decode passes it by. A whole prompt is one piece. `stored` are the operations of
decode, by which slots lie. Knows nothing of requests' owners, text, queues or clocks.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from ..modelzoo import axes
from ..modelzoo.attention import EMPTY_POSITION
from ..modelzoo.moe.use import ExpertReport
from ..modelzoo.operations import Axes, Operations
from ..modelzoo.prompt_pieces import PromptPieces, put_blocks
from ..modelzoo.sampling import SamplingState, TokenScores
from .steps import DecodeState, score_positions

if TYPE_CHECKING:
    from ..modelzoo.decoder import Decoder

_BY_SLOT = axes.LOGITS[:1]


class SlotRequests(NamedTuple):
    """What the request of each row asks of its slot."""

    prompt_length_B: jax.Array
    limit_B: jax.Array
    """Length at which the row ends."""
    sampling: SamplingState


class PrefillOutput(NamedTuple):
    """What crosses to the host after a prefill call."""

    is_clean_B: jax.Array
    """False where what the row left in its slot may not be finite."""
    experts: ExpertReport | None
    scores: TokenScores | None = None
    """Log-probability of the prompt's token after each of the piece, where they are asked for."""


def prefill_step(
    decoder: "Decoder",
    state: DecodeState,
    rows: PromptPieces,
    requests: SlotRequests,
    tokens_BT: jax.Array,
    *,
    stored: Operations,
) -> tuple[DecodeState, PrefillOutput]:
    """Write the next pieces of some prompts into their slots. Static: B, T. Donated: state.

    `state.cache` holds the segments below the graph's span, in which every piece ends. Logits are
    made for each row's last token only.
    """
    _, state, output = _prefill(decoder, state, rows, requests, tokens_BT, stored)
    return state, output


def score_step(
    decoder: "Decoder",
    state: DecodeState,
    rows: PromptPieces,
    requests: SlotRequests,
    tokens_BT: jax.Array,
    next_BT: jax.Array,
    num_logprobs_B: jax.Array,
    *,
    stored: Operations,
) -> tuple[DecodeState, PrefillOutput]:
    """As `prefill_step`, with scores: entry t is of `next_BT[:, t]`, the token after t."""
    x_BTD, state, output = _prefill(decoder, state, rows, requests, tokens_BT, stored)
    scores = score_positions(decoder, x_BTD, next_BT, num_logprobs_B)
    return state, output._replace(scores=scores)


def fork_step(
    state: DecodeState,
    source: jax.Array,
    slot: jax.Array,
    sampling: SamplingState,
    *,
    stored: Operations,
) -> DecodeState:
    """Make `slot` the same as `source`, with sampling parameters of its own. Donated: state.

    A source past the slots clears the slot: it then holds zeros and empty positions.
    """
    num_slots = state.length_B.shape[0]

    def copy(x: jax.Array, logical_axes: Axes) -> jax.Array:
        row = stored.take_row(x, source, logical_axes, num_slots)
        return stored.put_row(x, row, slot, logical_axes, num_slots)

    def copy_positions(position_BS: jax.Array) -> jax.Array:
        # what a row has no entries for holds no token; zeros come from a row that is not there
        row_1S = stored.take_row(
            position_BS - EMPTY_POSITION, source, axes.CACHE_POSITIONS, num_slots
        )
        row_1S = row_1S + EMPTY_POSITION
        return stored.put_row(position_BS, row_1S, slot, axes.CACHE_POSITIONS, num_slots)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return stored.put_row(old, new, slot, _BY_SLOT, num_slots)

    positions = jax.tree.map(copy_positions, state.cache.positions)
    state = state.map(copy)
    return state._replace(
        cache=state.cache._replace(positions=positions),
        sampling=jax.tree.map(put, state.sampling, sampling),
    )


def _prefill(
    decoder: "Decoder",
    state: DecodeState,
    rows: PromptPieces,
    requests: SlotRequests,
    tokens_BT: jax.Array,
    stored: Operations,
) -> tuple[jax.Array, DecodeState, PrefillOutput]:
    x_BTD, cache, experts = decoder.prefill(tokens_BT, rows, state.cache, stored)
    length_B = rows.first_B + rows.count_B
    generates_B = length_B < requests.limit_B

    def put(old: jax.Array, new: jax.Array, logical_axes: Axes = _BY_SLOT) -> jax.Array:
        return stored.write_rows(_put_rows, old, new, rows, logical_axes)

    logits_BV = decoder.logits(last_hidden(decoder, x_BTD, rows.count_B))
    state = state._replace(
        cache=cache,
        logits_BV=put(state.logits_BV, logits_BV, axes.LOGITS),
        tokens_BS=stored.write_rows(_put_tokens, state.tokens_BS, tokens_BT, rows, _BY_SLOT),
        prompt_length_B=put(state.prompt_length_B, requests.prompt_length_B),
        length_B=put(state.length_B, length_B),
        limit_B=put(state.limit_B, requests.limit_B),
        is_active_B=put(state.is_active_B, (length_B == requests.prompt_length_B) & generates_B),
        sampling=jax.tree.map(put, state.sampling, requests.sampling),
    )
    # what a layer keeps of a token goes into the token's own state as well
    is_clean_B = jnp.isfinite(x_BTD).all(axis=(1, 2))
    return x_BTD, state, PrefillOutput(is_clean_B, experts)


def last_hidden(decoder: "Decoder", x_BTD: jax.Array, count_B: jax.Array) -> jax.Array:
    """`x_BD` of the last of each row's tokens."""
    # a sum with one term that is not zero: a gather along tokens would bring them all together
    position_1T = decoder.operations.positions(x_BTD.shape[1])
    is_last_BT = position_1T == (count_B - 1)[:, None]
    return jnp.where(is_last_BT[..., None], x_BTD, 0).sum(axis=1)


def _put_rows(x: jax.Array, new: jax.Array, rows: PromptPieces) -> jax.Array:
    return x.at[rows.slot_B].set(new, mode="drop")


def _put_tokens(tokens_BS: jax.Array, new_BT: jax.Array, rows: PromptPieces) -> jax.Array:
    return put_blocks(tokens_BS, new_BT, rows.slot_B, rows.first_B, axis=1)
