"""Graph bodies of prefill: write pieces of prompts into their slots, and copy slots.

A slot has the state of its prompt from the first piece on: every piece writes the parameters of the
request, and sets the length that the row has then. The last piece makes the row active; decode
skips the row before that. A whole prompt is one piece. `cache_operations` are the operations of
decode, which define how slots are sharded. Knows nothing of requests' owners, text, queues or
clocks.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from ...modelzoo import axes
from ...modelzoo.attention.prompt_pieces import PromptPieces
from ...modelzoo.cache.layer_state import Cache, LayerState
from ...modelzoo.cache.pages import NO_PAGE
from ...modelzoo.cache.stripes import pad_end
from ...modelzoo.cpu.moves import put_lines
from ...modelzoo.moe.call import ExpertReport
from ...modelzoo.operations import Operations
from ...modelzoo.sampling import SamplingState, TokenScores
from ...modelzoo.weights.weight_products import Axes
from .steps import DecodeState, score_positions

if TYPE_CHECKING:
    from ...modelzoo.decoder import Decoder

_BY_SLOT = axes.LOGITS[:1]


class SlotRequests(NamedTuple):
    """The lengths and sampling parameters that each row writes to its slot."""

    prompt_length_B: jax.Array
    limit_B: jax.Array
    """Total length at which the row ends."""
    sampling: SamplingState


class PrefillOutput(NamedTuple):
    """The arrays that go to the host after a prefill call."""

    is_clean_B: jax.Array
    """False where the values that the row left in its slot may not be finite."""
    experts: ExpertReport | None
    scores: TokenScores | None = None
    """Log-probability of the prompt's next token after each token of the piece, in scoring graphs.
    """


class _Slots(NamedTuple):
    """The slots that rows are written to."""

    slot_B: jax.Array


def prefill_step(
    decoder: "Decoder",
    state: DecodeState,
    rows: PromptPieces,
    requests: SlotRequests,
    tokens_BT: jax.Array,
    *,
    cache_operations: Operations,
) -> tuple[DecodeState, PrefillOutput]:
    """Write the next pieces of some prompts into their slots. Static: B, T. Donated: state.

    Logits are computed only for the last token of each row.

    Args:
      decoder: The decoder, bound to its parameters.
      state: The state.
      rows: Slot, first position and number of tokens of each row.
      requests: Lengths and sampling parameters of each row.
      tokens_BT: Token ids, padded on the right.
      cache_operations: The operations of decode, which define how slots are sharded.
    """
    _, state, output = _prefill(decoder, state, rows, requests, tokens_BT, cache_operations)
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
    cache_operations: Operations,
) -> tuple[DecodeState, PrefillOutput]:
    """Prefill as `prefill_step` does, and score. Static: B, T. Donated: state.

    Score t of a row is the log-probability of `next_BT[:, t]`, the token after token t.
    """
    x_BTD, state, output = _prefill(decoder, state, rows, requests, tokens_BT, cache_operations)
    scores = score_positions(decoder, x_BTD, next_BT, num_logprobs_B)
    return state, output._replace(scores=scores)


def fork_step(
    state: DecodeState,
    source: jax.Array,
    slot: jax.Array,
    sampling: SamplingState,
    source_page_N: jax.Array,
    page_N: jax.Array,
    *,
    cache_operations: Operations,
) -> tuple[DecodeState, None]:
    """Copy slot `source` to `slot`, with other sampling parameters. Donated: state.

    The pages `source_page_N` are copied to `page_N`, and the other pages of a slot are shared. The
    first page past all pages ends the list. Pages that slots have of their own are copied in order.
    A source past all slots clears the slot, and one past all pages clears the page.
    """

    def copy(
        x: jax.Array, logical_axes: Axes, from_row: jax.Array = source, to_row: jax.Array = slot
    ) -> jax.Array:
        new = cache_operations.take_row(x, from_row, logical_axes)
        return _put_row(x, new, to_row, logical_axes, cache_operations)

    def copy_page(layer: LayerState, from_page: jax.Array, to_page: jax.Array) -> LayerState:
        return layer.map(lambda x, array: copy(x, array.axes, from_page, to_page))

    def copy_pages(index: jax.Array, cache: Cache) -> Cache:
        def copy_one(layer: LayerState) -> LayerState:
            if count := layer.spec.slot_pages:
                to_page = jnp.where(index < count, slot * count + index, NO_PAGE)
                return copy_page(layer, source * count + index, to_page)
            pages = (
                x.at[index].get(mode="fill", fill_value=NO_PAGE) for x in (source_page_N, page_N)
            )
            return copy_page(layer, *pages)

        return tuple(layer and copy_one(layer) for layer in cache)

    num_copies = _num_copies(state.cache, slot < len(state.length_B), page_N)
    cache = jax.lax.fori_loop(0, num_copies, copy_pages, state.cache)
    put = partial(_put_row, row=slot, logical_axes=_BY_SLOT, operations=cache_operations)
    sampling = jax.tree.map(put, state.sampling, sampling)
    copied = state._replace(cache=()).map(copy)
    return copied._replace(sampling=sampling, cache=cache), None


def _num_copies(cache: Cache, has_slot: jax.Array, page_N: jax.Array) -> jax.Array:
    """The number of pages that a fork copies in the layers that need most of them."""
    num_copies = jnp.int32(0)
    for layer in filter(None, cache):
        of_layer = jnp.sum(page_N < layer.num_pages)
        if count := layer.spec.slot_pages:
            of_layer = jnp.where(has_slot, count, 0)
        num_copies = jnp.maximum(num_copies, of_layer)
    return num_copies


def _put_row(
    old: jax.Array, new: jax.Array, row: jax.Array, logical_axes: Axes, operations: Operations
) -> jax.Array:
    """Replace one row of an array, if it has the row."""
    axis = axes.row_axis(logical_axes)

    def body(x: jax.Array, new: jax.Array, slots: _Slots) -> jax.Array:
        row = slots.slot_B[0]
        index = jnp.clip(row, 0, x.shape[axis] - 1)
        new = new.astype(x.dtype)

        def put() -> jax.Array:
            old = jax.lax.dynamic_slice_in_dim(x, index, 1, axis=axis)
            kept = jnp.where(index == row, new, old)
            return jax.lax.dynamic_update_slice_in_dim(x, kept, index, axis=axis)

        num_rows = math.prod(x.shape[:axis])
        place_M = jnp.arange(num_rows) * x.shape[axis] + row
        # past the end for an array that does not have the row, and therefore dropped
        place_M = jnp.where(index == row, place_M, num_rows * x.shape[axis])
        return put_lines(x, new.reshape(num_rows, -1), place_M, put)

    return operations.write_rows(body, old, new, _Slots(row[None]), logical_axes)


def _prefill(
    decoder: "Decoder",
    state: DecodeState,
    rows: PromptPieces,
    requests: SlotRequests,
    tokens_BT: jax.Array,
    cache_operations: Operations,
) -> tuple[jax.Array, DecodeState, PrefillOutput]:
    x_BTD, cache, experts = decoder.prefill(
        tokens_BT,
        rows,
        state.cache,
        cache_operations,
        requests.sampling.adapter_B,
    )
    length_B = rows.first_B + rows.count_B
    generates_B = length_B < requests.limit_B
    last = _last_of_slots(rows, len(state.length_B))

    def put(old: jax.Array, new: jax.Array, logical_axes: Axes = _BY_SLOT) -> jax.Array:
        return cache_operations.write_rows(_put_rows, old, new, last, logical_axes)

    logits_BV = decoder.logits(last_hidden(decoder, x_BTD, rows.count_B))
    state = state._replace(
        cache=cache,
        logits_BV=put(state.logits_BV, logits_BV, axes.LOGITS),
        tokens_BS=cache_operations.write_rows(
            _put_tokens, state.tokens_BS, tokens_BT, rows, _BY_SLOT
        ),
        prompt_length_B=put(state.prompt_length_B, requests.prompt_length_B),
        length_B=put(state.length_B, length_B),
        limit_B=put(state.limit_B, requests.limit_B),
        is_active_B=put(state.is_active_B, (length_B == requests.prompt_length_B) & generates_B),
        sampling=jax.tree.map(put, state.sampling, requests.sampling),
    )
    # values that a layer writes for a token reach the token's own hidden state as well
    is_clean_B = jnp.isfinite(x_BTD).all(axis=(1, 2))
    return x_BTD, state, PrefillOutput(is_clean_B, experts)


def _last_of_slots(rows: PromptPieces, num_slots: int) -> PromptPieces:
    """The same rows, of which only the last of each slot has a slot: it decides the state."""
    slot_B = rows.slot_B
    is_later_BB = jnp.arange(len(slot_B))[None] > jnp.arange(len(slot_B))[:, None]
    is_last_B = ~jnp.any(is_later_BB & (slot_B[None] == slot_B[:, None]), axis=1)
    return rows._replace(slot_B=jnp.where(is_last_B, slot_B, num_slots))


def last_hidden(decoder: "Decoder", x_BTD: jax.Array, count_B: jax.Array) -> jax.Array:
    """Hidden state `x_BD` of each row's last token."""
    # a sum with one non-zero term, because a gather along tokens would gather all of them
    position_1T = decoder.operations.positions(x_BTD.shape[1])
    is_last_BT = position_1T == (count_B - 1)[:, None]
    return jnp.where(is_last_BT[..., None], x_BTD, 0).sum(axis=1)


def _put_rows(x: jax.Array, new: jax.Array, rows: PromptPieces) -> jax.Array:
    return x.at[rows.slot_B].set(new, mode="drop")


def _put_tokens(tokens_BS: jax.Array, new_BT: jax.Array, rows: PromptPieces) -> jax.Array:
    """Write the tokens of each row to its slot; what follows a whole prompt there is zero.

    NOTE: XLA for TPU compiles a scatter of many blocks at any place to a loop over rows, but not
    one of the rows of an array.
    """
    if rows.start_B is None:
        return _put_rows(tokens_BS, pad_end(new_BT, 1, tokens_BS.shape[1]), rows)
    (B, S), T = tokens_BS.shape, new_BT.shape[1]
    blocks_BJT = pad_end(tokens_BS, 1, S + -S % T).reshape(B, -1, T)
    at = blocks_BJT.at[rows.slot_B, rows.first_B // T]
    return at.set(new_BT, mode="drop", unique_indices=True).reshape(B, -1)[:, :S]
