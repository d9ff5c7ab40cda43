"""Graph bodies: prefill, score, insert, decode. What is compiled is exactly these functions.

Shapes are a function of the bucket alone; what changes from call to call is an array. `true_length`
is the only thing that knows of padding. Knows nothing of requests, text, queues or clocks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ..modelzoo import axes
from ..modelzoo.kept_layers import PromptLayer, PromptLayers
from ..modelzoo.kv_cache import KVCache, insert
from ..modelzoo.moe.use import ExpertReport
from ..modelzoo.operations import Axes, Operations
from ..modelzoo.sampling import History, SamplingState, TokenScores, sample, score_tokens

if TYPE_CHECKING:
    from ..modelzoo.decoder import Decoder

NUM_ALTERNATIVES = 20
NO_TOKEN = -1
_SCORE_ROWS = 256


class DecodeState(NamedTuple):
    """All that lives on the device between calls: B slots."""

    cache: KVCache
    logits_BV: jax.Array
    """Float32 logits of each slot's next token."""
    tokens_BS: jax.Array
    """Prompt and output ids so far."""
    prompt_length_B: jax.Array
    length_B: jax.Array
    """Known tokens; the position of the next one."""
    limit_B: jax.Array
    """Length at which the row ends."""
    is_active_B: jax.Array
    sampling: SamplingState

    def map(self, visit: "Visit") -> "DecodeState":
        """`visit` of every array and its logical axes."""

        def by_slot(leaf: Any) -> Any:
            return visit(leaf, axes.LOGITS[:1])

        layers = tuple(map_fields(layer, visit) for layer in self.cache.layers)
        return jax.tree.map(by_slot, self._replace(cache=(), logits_BV=()))._replace(
            cache=KVCache(layers, map_fields(self.cache.positions, visit)),
            logits_BV=visit(self.logits_BV, axes.LOGITS),
        )


Visit = Callable[[Any, Axes], Any]
"""An array, or what stands for one, and its logical axes."""


def map_fields(kept: Any, visit: Visit) -> Any:
    """`visit` of a named tuple of arrays, each field with the axes that it declares."""
    fields = (
        jax.tree.map(lambda leaf, a=logical_axes: visit(leaf, a), field)
        for field, logical_axes in zip(kept, kept.AXES, strict=True)
    )
    return type(kept)(*fields)


class Prompts(NamedTuple):
    """What a prefill leaves on the device for its rows to be inserted."""

    layers: tuple[PromptLayer | PromptLayers, ...]
    logits_BV: jax.Array
    tokens_BT: jax.Array
    true_length_B: jax.Array
    experts: ExpertReport | None = None


class DecodeOutput(NamedTuple):
    """What crosses to the host after a decode call of Q steps."""

    tokens_BQ: jax.Array
    """Chosen ids; `NO_TOKEN` where a row emitted nothing."""
    is_active_B: jax.Array
    is_finite_B: jax.Array
    """False when a row met NaN or infinite logits; it then stopped without a token."""
    scores: TokenScores
    """Of every step, along a second axis Q."""
    experts: ExpertReport | None = None
    """Of all steps together."""


def prefill_step(decoder: "Decoder", tokens_BT: jax.Array, true_length_B: jax.Array) -> Prompts:
    """Run right-padded prompts. Static: B, T. Logits only for each row's last token."""
    x_BTD, layers, experts = decoder.prefill(tokens_BT, true_length_B)
    return _prompts(decoder, x_BTD, layers, tokens_BT, true_length_B, experts)


def score_step(
    decoder: "Decoder", tokens_BT: jax.Array, true_length_B: jax.Array, num_logprobs_B: jax.Array
) -> tuple[Prompts, TokenScores]:
    """As `prefill_step`, and each prompt token's log-probability given those before it.

    Entry t of the scores is of token t + 1; entries from `true_length - 1` on mean nothing.
    """
    x_BTD, layers, experts = decoder.prefill(tokens_BT, true_length_B)
    next_BT = jnp.roll(tokens_BT, -1, axis=1)
    scores = score_positions(decoder, x_BTD, next_BT, num_logprobs_B)
    prompts = _prompts(decoder, x_BTD, layers, tokens_BT, true_length_B, experts)
    return prompts, scores


def score_positions(
    decoder: "Decoder", x_BTD: jax.Array, target_BT: jax.Array, num_logprobs_B: jax.Array
) -> TokenScores:
    """The log-probability of `target`, in order, after each position's hidden state.

    Logits are made for a few positions at a time, so no `[B, T, V]` array exists.
    """
    B, T, D = x_BTD.shape
    piece = _piece(B, T)
    stripes = decoder.operations.prompt_stripes
    target_BT = stripes.lay(target_BT, axis=1)

    def score_piece(inputs: tuple[jax.Array, jax.Array]) -> TokenScores:
        x_BTD, target_BT = inputs
        logits_MV = decoder.logits(x_BTD.reshape(B * piece, D))
        wanted_M = jnp.repeat(num_logprobs_B, piece)
        return score_tokens(
            logits_MV, target_BT.reshape(-1), wanted_M, NUM_ALTERNATIVES, decoder.operations
        )

    def pieces(x: jax.Array) -> jax.Array:
        return x.reshape(B, T // piece, piece, *x.shape[2:]).swapaxes(0, 1)

    scores = jax.lax.map(score_piece, (pieces(x_BTD), pieces(target_BT)))

    def whole(x: jax.Array) -> jax.Array:
        x = x.reshape(T // piece, B, piece, *x.shape[2:]).swapaxes(0, 1)
        return stripes.restore(x.reshape(B, T, *x.shape[3:]), axis=1)

    return jax.tree.map(whole, scores)


def insert_step(
    state: DecodeState,
    prompts: Prompts,
    row: jax.Array,
    slot: jax.Array,
    limit_1: jax.Array,
    sampling: SamplingState,
    *,
    source: Operations,
    target: Operations,
) -> DecodeState:
    """Give `slot` to row `row` of a prefill. Donated: state. Dummy rows are never inserted.

    `source` are the operations of prefill, `target` those of decode: where the two phases are laid
    out differently, the row moves from one layout to the other here.
    """

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return target.put_row(old, new, slot, axes.LOGITS[:1])

    true_length_1 = jax.lax.dynamic_slice_in_dim(prompts.true_length_B, row, 1, axis=0)
    tokens_1T = jax.lax.dynamic_slice_in_dim(prompts.tokens_BT, row, 1, axis=0)
    missing = state.tokens_BS.shape[1] - tokens_1T.shape[1]
    logits_1V = source.take_row(prompts.logits_BV, row, axes.LOGITS)
    cache = insert(state.cache, prompts.layers, prompts.true_length_B, row, slot, source, target)
    return DecodeState(
        cache=cache,
        logits_BV=target.put_row(state.logits_BV, logits_1V, slot, axes.LOGITS),
        tokens_BS=put(state.tokens_BS, jnp.pad(tokens_1T, ((0, 0), (0, missing)))),
        prompt_length_B=put(state.prompt_length_B, true_length_1),
        length_B=put(state.length_B, true_length_1),
        limit_B=put(state.limit_B, limit_1),
        is_active_B=put(state.is_active_B, true_length_1 < limit_1),
        sampling=jax.tree.map(put, state.sampling, sampling),
    )


def decode_step(
    decoder: "Decoder", state: DecodeState, is_live_B: jax.Array, *, span: int, num_steps: int
) -> tuple[DecodeState, DecodeOutput]:
    """Up to `num_steps` tokens for every live row. Static: span, num_steps. Donated: state.

    `state.cache` holds the segments below `span`; a row whose next position lies beyond waits. The
    loop ends early when no row has anything left to do. `is_live_B` is the host's word on which
    rows may run.
    """
    B = state.length_B.shape[0]
    output = _empty_output(B, num_steps)._replace(experts=_no_report(decoder, state))

    def runs(state: DecodeState) -> jax.Array:
        return state.is_active_B & is_live_B & (state.length_B < span)

    def more(carry: tuple[jax.Array, DecodeState, DecodeOutput]) -> jax.Array:
        step, state, _ = carry
        return (step < num_steps) & jnp.any(runs(state))

    def one_token(carry: tuple[jax.Array, DecodeState, DecodeOutput]):
        step, state, output = carry
        state = _constrain_slots(state, decoder.operations)
        runs_B = runs(state)
        history = History(state.tokens_BS, state.prompt_length_B, state.length_B)
        token_B = sample(state.logits_BV, state.sampling, history, runs_B)
        token_B = decoder.operations.constrain(token_B, axes.LOGITS[:1])
        # max passes NaN on; a row of -inf alone has nothing to choose from
        is_finite_B = jnp.isfinite(state.logits_BV.max(axis=-1)) | ~runs_B
        emits_B = runs_B & is_finite_B
        num_logprobs_B = jnp.where(emits_B, state.sampling.num_logprobs_B, -1)
        scores = score_tokens(
            state.logits_BV, token_B, num_logprobs_B, NUM_ALTERNATIVES, decoder.operations
        )
        output = _record(output, step, jnp.where(emits_B, token_B, NO_TOKEN), is_finite_B, scores)

        logits_BV, cache, experts = decoder.decode(token_B, state.length_B, state.cache, emits_B)
        output = output._replace(experts=jax.tree.map(jnp.add, output.experts, experts))
        is_stop_B = jnp.any(token_B[:, None] == state.sampling.stop_ids_BX, axis=-1)
        length_B = state.length_B + emits_B
        ends_B = is_stop_B | (length_B >= state.limit_B) | ~is_finite_B
        state = state._replace(
            cache=cache,
            logits_BV=jnp.where(emits_B[:, None], logits_BV, state.logits_BV),
            tokens_BS=_put_tokens(state.tokens_BS, token_B, state.length_B, emits_B),
            length_B=length_B,
            is_active_B=state.is_active_B & ~(runs_B & ends_B),
        )
        return step + 1, state, output

    _, state, output = jax.lax.while_loop(more, one_token, (jnp.int32(0), state, output))
    return state, output._replace(is_active_B=state.is_active_B)


def _constrain_slots(state: DecodeState, operations: Operations) -> DecodeState:
    """Keep what is kept per slot where its signature says, whatever attention does with it."""

    def constrain(x: jax.Array) -> jax.Array:
        return operations.constrain(x, axes.LOGITS[:1])

    return jax.tree.map(constrain, state._replace(cache=(), logits_BV=()))._replace(
        cache=state.cache, logits_BV=operations.constrain(state.logits_BV, axes.LOGITS)
    )


def _prompts(
    decoder: "Decoder",
    x_BTD: jax.Array,
    layers: tuple[PromptLayer | PromptLayers, ...],
    tokens_BT: jax.Array,
    true_length_B: jax.Array,
    experts: ExpertReport | None,
) -> Prompts:
    logits_BV = decoder.logits(last_hidden(decoder, x_BTD, true_length_B))
    return Prompts(layers, logits_BV, tokens_BT, true_length_B, experts)


def last_hidden(decoder: "Decoder", x_BTD: jax.Array, count_B: jax.Array) -> jax.Array:
    """`x_BD` of the last of each row's tokens."""
    # a sum with one term that is not zero: a gather along tokens would bring them all together
    position_1T = decoder.operations.positions(x_BTD.shape[1])
    is_last_BT = position_1T == (count_B - 1)[:, None]
    return jnp.where(is_last_BT[..., None], x_BTD, 0).sum(axis=1)


def _piece(B: int, T: int) -> int:
    """The largest divisor of T that keeps a piece's rows at `_SCORE_ROWS` or below."""
    return max(d for d in range(1, T + 1) if T % d == 0 and (d == 1 or B * d <= _SCORE_ROWS))


def _empty_output(B: int, num_steps: int) -> DecodeOutput:
    shape = (B, num_steps)
    scores = TokenScores(
        jnp.zeros(shape),
        jnp.zeros((*shape, NUM_ALTERNATIVES), jnp.int32),
        jnp.zeros((*shape, NUM_ALTERNATIVES)),
    )
    tokens_BQ = jnp.full(shape, NO_TOKEN, jnp.int32)
    return DecodeOutput(tokens_BQ, jnp.zeros(B, bool), jnp.ones(B, bool), scores)


def _no_report(decoder: "Decoder", state: DecodeState) -> ExpertReport | None:
    """What sparse layers report before the first step: zeros."""
    _, _, report = jax.eval_shape(
        lambda: decoder.decode(state.length_B, state.length_B, state.cache, state.is_active_B)
    )
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), report)


def _record(
    output: DecodeOutput,
    step: jax.Array,
    token_B: jax.Array,
    is_finite_B: jax.Array,
    scores: TokenScores,
) -> DecodeOutput:
    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new[:, None], step, axis=1)

    return output._replace(
        tokens_BQ=put(output.tokens_BQ, token_B),
        is_finite_B=output.is_finite_B & is_finite_B,
        scores=jax.tree.map(put, output.scores, scores),
    )


def _put_tokens(
    tokens_BS: jax.Array, token_B: jax.Array, index_B: jax.Array, emits_B: jax.Array
) -> jax.Array:
    is_here_BS = (jnp.arange(tokens_BS.shape[1])[None] == index_B[:, None]) & emits_B[:, None]
    return jnp.where(is_here_BS, token_B[:, None], tokens_BS)
