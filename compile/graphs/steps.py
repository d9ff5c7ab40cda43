"""The state of the slots between calls, and the graph bodies of decoding and scoring.

Shapes are a function of the bucket alone; values that change from call to call are arrays. Knows
nothing of requests, text, queues or clocks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ...modelzoo import axes
from ...modelzoo.attention.shared_pages import SlotPages
from ...modelzoo.cache.layer_state import Cache
from ...modelzoo.moe.call import ExpertReport
from ...modelzoo.operations import Operations
from ...modelzoo.sampling import History, SamplingState, TokenScores, sample, score_tokens
from ...modelzoo.structure import StructureTables, allowed_tokens, next_states
from ...modelzoo.weights.weight_products import Axes

if TYPE_CHECKING:
    from ...modelzoo.decoder import Decoder

NUM_ALTERNATIVES = 20
NO_TOKEN = -1
_SCORE_ROWS = 256


class DecodeState(NamedTuple):
    """Everything that stays on the device between calls, for B slots."""

    cache: Cache
    logits_BV: jax.Array
    """Float32 logits of each slot's next token."""
    tokens_BS: jax.Array
    """Prompt and output ids so far."""
    prompt_length_B: jax.Array
    length_B: jax.Array
    """Number of known tokens, which is the position of the next token."""
    limit_B: jax.Array
    """Total length at which the row ends."""
    is_active_B: jax.Array
    sampling: SamplingState

    def map(self, visit: Callable[[Any, Axes], Any]) -> "DecodeState":
        """Apply `visit` to every array and its logical axes."""
        others = self._replace(cache=(), logits_BV=())
        return jax.tree.map(lambda leaf: visit(leaf, axes.LOGITS[:1]), others)._replace(
            cache=tuple(
                layer and layer.map(lambda leaf, array: visit(leaf, array.axes))
                for layer in self.cache
            ),
            logits_BV=visit(self.logits_BV, axes.LOGITS),
        )


class DecodeOutput(NamedTuple):
    """The arrays that go to the host after a decode call of Q steps."""

    tokens_BQ: jax.Array
    """Chosen ids; `NO_TOKEN` where a row emitted nothing."""
    is_active_B: jax.Array
    is_finite_B: jax.Array
    """False if a row met NaN or infinite logits; it then stopped without a token."""
    is_clean_B: jax.Array
    """False where the values that the row left in its slot may not be finite."""
    scores: TokenScores
    """Scores of every step, along a second axis Q."""
    experts: ExpertReport | None = None
    """Sum of the reports of all steps."""


def score_positions(
    decoder: "Decoder", x_BTD: jax.Array, target_BT: jax.Array, num_logprobs_B: jax.Array
) -> TokenScores:
    """Log-probabilities of `target_BT`, each after the hidden state of the same index.

    Logits are computed for a few positions at a time, so no `[B, T, V]` array exists.
    """
    B, T, D = x_BTD.shape
    piece = _piece(B, T)
    stripes = decoder.operations.prompt_stripes
    target_BT = stripes.permute(target_BT, axis=1)

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


def decode_step(
    decoder: "Decoder",
    state: DecodeState,
    is_live_B: jax.Array,
    pages: SlotPages,
    structures: StructureTables | None = None,
    *,
    num_steps: int,
) -> tuple[DecodeState, DecodeOutput]:
    """Decode up to `num_steps` tokens of every live row. Static: num_steps. Donated: state.

    The loop ends early when no row has anything left to do.

    Args:
      decoder: The decoder, bound to its parameters.
      state: The state.
      is_live_B: The rows that the host allows to run.
      pages: The pages of each slot; a live row has pages for its steps.
      structures: The automata of rows whose answers have a given form; None if no row has one.
      num_steps: Maximum number of steps.
    """
    B = state.length_B.shape[0]
    output = _empty_output(B, num_steps)._replace(experts=_no_report(decoder, state, pages))

    def more(carry: tuple[jax.Array, DecodeState, DecodeOutput]) -> jax.Array:
        step, state, _ = carry
        return (step < num_steps) & jnp.any(state.is_active_B & is_live_B)

    def one_token(carry: tuple[jax.Array, DecodeState, DecodeOutput]):
        step, state, output = carry
        # the per-slot arrays stay on their signature's shardings, however attention is sharded
        slots = state._replace(cache=()).map(decoder.operations.constrain)
        state = slots._replace(cache=state.cache)
        runs_B = state.is_active_B & is_live_B
        token_B, is_finite_B = _next_token(state, runs_B, structures, decoder.operations)
        # attention may split slots otherwise, and tokens would follow them to other devices
        emits_B = decoder.operations.constrain(runs_B & is_finite_B, axes.LOGITS[:1])
        num_logprobs_B = jnp.where(emits_B, state.sampling.num_logprobs_B, -1)
        scores = score_tokens(
            state.logits_BV, token_B, num_logprobs_B, NUM_ALTERNATIVES, decoder.operations
        )
        output = _record(output, step, jnp.where(emits_B, token_B, NO_TOKEN), is_finite_B, scores)

        call = decoder.next_tokens(state.length_B, emits_B, pages)
        x_B1D = decoder.embed(token_B[:, None])
        x_B1D, cache, experts = decoder.run_layers(
            x_B1D, call, state.cache, state.sampling.adapter_B
        )
        logits_BV = decoder.logits(decoder.final_norm(x_B1D)[:, 0], emits_B)
        output = output._replace(
            experts=jax.tree.map(jnp.add, output.experts, experts),
            is_clean_B=output.is_clean_B & (jnp.isfinite(logits_BV.max(axis=-1)) | ~emits_B),
        )
        logits_BV = jnp.where(emits_B[:, None], logits_BV, state.logits_BV)
        state = _after_token(state, token_B, runs_B, emits_B, structures)
        return step + 1, state._replace(cache=cache, logits_BV=logits_BV), output

    carry = (jnp.int32(0), state, output)
    _, state, output = jax.lax.while_loop(more, one_token, carry)
    return state, output._replace(is_active_B=state.is_active_B)


def _next_token(
    state: DecodeState,
    runs_B: jax.Array,
    structures: StructureTables | None,
    operations: Operations,
) -> tuple[jax.Array, jax.Array]:
    """The next token of each row, and whether the row has finite logits to choose it from."""
    history = History(state.tokens_BS, state.prompt_length_B, state.length_B)
    allowed_BV, structure_B = None, state.sampling.structure_B
    if structures is not None and structure_B is not None:
        left_B, V = state.limit_B - state.length_B, state.logits_BV.shape[1]
        allowed_BV = allowed_tokens(structures, structure_B, left_B, V)
    token_B = sample(state.logits_BV, state.sampling, history, runs_B, allowed_BV)
    # max passes NaN on; a row with only -inf has nothing to choose from
    is_finite_B = jnp.isfinite(state.logits_BV.max(axis=-1)) | ~runs_B
    return operations.constrain(token_B, axes.LOGITS[:1]), is_finite_B


def _after_token(
    state: DecodeState,
    token_B: jax.Array,
    runs_B: jax.Array,
    emits_B: jax.Array,
    structures: StructureTables | None,
) -> DecodeState:
    """The state after the rows `emits_B` have got a token; the other rows that ran end."""
    is_stop_B = jnp.any(token_B[:, None] == state.sampling.stop_ids_BX, axis=-1)
    length_B = state.length_B + emits_B
    ends_B = is_stop_B | (length_B >= state.limit_B) | ~emits_B
    sampling, structure_B = state.sampling, state.sampling.structure_B
    if structures is not None and structure_B is not None:
        next_B = next_states(structures, structure_B, token_B)
        sampling = sampling._replace(structure_B=jnp.where(emits_B, next_B, structure_B))
    return state._replace(
        tokens_BS=_put_tokens(state.tokens_BS, token_B, state.length_B, emits_B),
        length_B=length_B,
        is_active_B=state.is_active_B & ~(runs_B & ends_B),
        sampling=sampling,
    )


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
    return DecodeOutput(tokens_BQ, jnp.zeros(B, bool), jnp.ones(B, bool), jnp.ones(B, bool), scores)


def _no_report(decoder: "Decoder", state: DecodeState, pages: SlotPages) -> ExpertReport | None:
    """Zeros in the shapes of the sparse layers' report; None for a dense model."""
    if decoder.config.moe is None:
        # the shapes of a report would need a trace of all layers
        return None

    def one_token() -> ExpertReport | None:
        call = decoder.next_tokens(state.length_B, state.is_active_B, pages)
        return decoder.run_layers(decoder.embed(state.length_B[:, None]), call, state.cache)[2]

    report = jax.eval_shape(one_token)
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
