"""Compare the next-token distributions of two models on the device, and choose their next token.

Only a few numbers for each row leave the device. Knows nothing of requests or statistics.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .steps import NO_TOKEN, DecodeState


class TokenFigures(NamedTuple):
    """The figures of one token for each row, in float32."""

    divergence_B: jax.Array
    """The Kullback-Leibler divergence of the compared distribution from the reference, in nats."""
    agrees_B: jax.Array
    """1 where both models have the same likeliest token, else 0."""
    reference_logprob_B: jax.Array
    """The log-probability of the token that both read next."""
    compared_logprob_B: jax.Array
    gap_B: jax.Array
    """The reference's log-probability of its likeliest token, less that of the compared model's
    likeliest one."""


class ChosenToken(NamedTuple):
    """The token that both models read next, its figures, and logits that choose it."""

    token_B: jax.Array
    figures: TokenFigures
    reference_forced_BV: jax.Array
    """Logits of the reference's shape that make greedy sampling choose the token."""
    compared_forced_BV: jax.Array


def compare_step(
    reference_BV: jax.Array, compared_BV: jax.Array, token_B: jax.Array, *, vocab_size: int
) -> ChosenToken:
    """Compare the logits of two models for the next token of each row. Static: vocab_size.

    Args:
      reference_BV: Float32 logits of the reference.
      compared_BV: Float32 logits of the compared model; both may have padding after the vocabulary.
      token_B: The token that is read next; `NO_TOKEN` for the reference's likeliest one.
      vocab_size: The number of tokens.
    """
    p_BV, q_BV = (
        jax.nn.log_softmax(logits_BV[:, :vocab_size]) for logits_BV in (reference_BV, compared_BV)
    )
    best_B, other_B = (jnp.argmax(x_BV, axis=-1).astype(jnp.int32) for x_BV in (p_BV, q_BV))
    token_B = jnp.where(token_B == NO_TOKEN, best_B, token_B)

    def of_token(logprobs_BV: jax.Array, token_B: jax.Array = token_B) -> jax.Array:
        return jnp.take_along_axis(logprobs_BV, token_B[:, None], axis=-1)[:, 0]

    figures = TokenFigures(
        # 0 where p = 0: there, p * log(p / q) would be NaN
        jnp.where(p_BV > -jnp.inf, jnp.exp(p_BV) * (p_BV - q_BV), 0).sum(axis=-1),
        (best_B == other_B).astype(jnp.float32),
        of_token(p_BV),
        of_token(q_BV),
        of_token(p_BV, best_B) - of_token(p_BV, other_B),
    )
    forced = (_choosing(token_B, logits_BV) for logits_BV in (reference_BV, compared_BV))
    return ChosenToken(token_B, figures, *forced)


def _choosing(token_B: jax.Array, logits_BV: jax.Array) -> jax.Array:
    """Logits that leave one token for each row."""
    id_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    return jnp.where(id_BV == token_B[:, None], 0.0, -jnp.inf)


def comparison_graph(
    reference: DecodeState,
    compared: DecodeState,
    vocab_size: int,
    replicated: jax.sharding.Sharding,
) -> jax.stages.Compiled:
    """Compile `compare_step` for the states of two models.

    Logits keep their shardings; tokens and figures have the sharding `replicated`, as they come
    from the host and go there.
    """
    B = reference.logits_BV.shape[0]

    def graph(reference_BV: jax.Array, compared_BV: jax.Array, token_B: jax.Array) -> ChosenToken:
        return compare_step(reference_BV, compared_BV, token_B, vocab_size=vocab_size)

    logits: list[Any] = [state.logits_BV for state in (reference, compared)]
    results = ChosenToken._make((replicated, replicated, *(x.format for x in logits)))
    token_B = jax.ShapeDtypeStruct((B,), jnp.int32, sharding=replicated)
    compiled = jax.jit(graph, out_shardings=results)
    return compiled.lower(reference.logits_BV, compared.logits_BV, token_B).compile()
