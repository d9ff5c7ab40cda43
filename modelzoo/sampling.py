"""Sampling with parameters in per-slot arrays, so that one graph serves every mix of parameters.

Knows nothing of models, caches or requests. Guarantees: the token of a row depends only on its own
logits, parameters, key and step. Costly parts (penalties, biases, thresholds, noise, alternatives)
are inside `lax.cond` and run only if a live row needs them; the other rows get the same bits in
both cases.

Order of operations as in vLLM (v1/sample/sampler.py): allowed tokens, logit bias, minimum length,
penalties, temperature, min-p, top-k, top-p. Thresholds also keep all tokens that tie with
the least likely token that is kept.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .operations import Operations


class SamplingState(NamedTuple):
    """Sampling parameters per slot, set at prefill.

    All but `structure_B` are constant until the slot has a new owner.
    """

    temperature_B: jax.Array
    """Temperature; 0 means greedy decoding."""
    top_k_B: jax.Array
    """Number of likeliest tokens to draw from; 0 means no limit."""
    top_p_B: jax.Array
    min_p_B: jax.Array
    presence_B: jax.Array
    frequency_B: jax.Array
    repetition_B: jax.Array
    key_B2: jax.Array
    """The two words of the threefry key of the row."""
    sample_B: jax.Array
    """The index of this continuation among the `n` of its request."""
    min_length_B: jax.Array
    """The minimum number of tokens, prompt included, before a stop token is allowed."""
    stop_ids_BX: jax.Array
    """Ids that end the row, padded with the vocabulary size."""
    bias_ids_BY: jax.Array
    """Ids with a bias, padded with the vocabulary size."""
    bias_BY: jax.Array
    num_logprobs_B: jax.Array
    """The number of alternatives to report; -1 means that nothing is reported."""
    structure_B: jax.Array | None = None
    """The state of the automaton that says what tokens may come, which changes with every token; 0
    for rows without one. None if no row of the plan has one."""
    adapter_B: jax.Array | None = None
    """The number of the row's adapter, 0 for none; None in a plan without adapters."""


class History(NamedTuple):
    """The token ids of each row so far, from which penalties and step numbers are computed."""

    tokens_BS: jax.Array
    prompt_length_B: jax.Array
    length_B: jax.Array
    """The number of prompt and output tokens, which is the position of the next token."""


class TokenScores(NamedTuple):
    """Log-probabilities from the raw logits: of the chosen token and of the R likeliest tokens."""

    logprob_B: jax.Array
    top_ids_BR: jax.Array
    top_logprobs_BR: jax.Array


def sample(
    logits_BV: jax.Array,
    state: SamplingState,
    history: History,
    is_live_B: jax.Array,
    allowed_BV: jax.Array | None = None,
) -> jax.Array:
    """Choose one token per row. Rows that are not live get an undefined token at no extra cost.

    Args:
      logits_BV: Raw logits.
      state: The sampling parameters of each row.
      history: The tokens of each row.
      is_live_B: The rows that run.
      allowed_BV: The tokens that may come; None for all.
    """
    if allowed_BV is not None:
        logits_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
    processed_BV = process_logits(logits_BV, state, history, is_live_B)
    greedy_B = _argmax(processed_BV)
    is_random_B = state.temperature_B > 0

    def draw(processed_BV: jax.Array) -> jax.Array:
        temperature_B = jnp.where(is_random_B, state.temperature_B, 1.0)
        scaled_BV = processed_BV / temperature_B[:, None]
        kept_BV = jnp.where(keep_mask(scaled_BV, state, is_live_B), scaled_BV, -jnp.inf)
        noise_BV = _gumbel_noise(state, history, kept_BV.shape[-1])
        drawn_B = _argmax(kept_BV + noise_BV)
        return jnp.where(is_random_B, drawn_B, greedy_B)

    return jax.lax.cond(jnp.any(is_random_B & is_live_B), draw, lambda _: greedy_B, processed_BV)


def process_logits(
    logits_BV: jax.Array, state: SamplingState, history: History, is_live_B: jax.Array
) -> jax.Array:
    """Apply biases, minimum length and penalties; rows without any of them keep their bits."""
    V = logits_BV.shape[-1]
    is_short_B = history.length_B < state.min_length_B

    def add_bias(logits_BV: jax.Array) -> jax.Array:
        return _add(logits_BV, state.bias_ids_BY, state.bias_BY)

    def forbid_stops(logits_BV: jax.Array) -> jax.Array:
        ids_BX = jnp.where(is_short_B[:, None], state.stop_ids_BX, V)
        return _set(logits_BV, ids_BX, -jnp.inf)

    has_bias_B = jnp.any(state.bias_ids_BY < V, axis=-1)
    has_penalty_B = (
        (state.repetition_B != 1.0) | (state.presence_B != 0.0) | (state.frequency_B != 0.0)
    )
    logits_BV = _when(jnp.any(has_bias_B & is_live_B), add_bias, logits_BV)
    logits_BV = _when(jnp.any(is_short_B & is_live_B), forbid_stops, logits_BV)
    penalise = partial(_penalise, state=state, history=history)
    return _when(jnp.any(has_penalty_B & is_live_B), penalise, logits_BV)


def keep_mask(scaled_BV: jax.Array, state: SamplingState, is_live_B: jax.Array) -> jax.Array:
    """The mask of the tokens that remain after min-p, top-k and top-p."""
    max_B1 = scaled_BV.max(axis=-1, keepdims=True)
    # min_p = 0 gives log(0) = -inf: everything is kept
    floor_B1 = max_B1 + jnp.log(state.min_p_B)[:, None]
    has_threshold_B = (state.top_k_B > 0) | (state.top_p_B < 1.0)

    def thresholds(scaled_BV: jax.Array) -> jax.Array:
        scaled_BV = jnp.where(scaled_BV >= floor_B1, scaled_BV, -jnp.inf)
        order_BV = _ordered_bits(scaled_BV)
        kth_B1 = _top_k_threshold(order_BV, state.top_k_B)
        weight_BV = jnp.where(order_BV >= kth_B1, jnp.exp(scaled_BV - max_B1), 0.0)
        return jnp.maximum(kth_B1, _top_p_threshold(order_BV, weight_BV, state.top_p_B))

    lowest_B1 = jnp.full_like(max_B1, jnp.iinfo(jnp.int32).min, dtype=jnp.int32)
    threshold_B1 = jax.lax.cond(
        jnp.any(has_threshold_B & (state.temperature_B > 0) & is_live_B),
        thresholds,
        lambda _: lowest_B1,
        scaled_BV,
    )
    return (_ordered_bits(scaled_BV) >= threshold_B1) & (scaled_BV >= floor_B1)


def score_tokens(
    logits_BV: jax.Array,
    token_B: jax.Array,
    num_logprobs_B: jax.Array,
    num_alternatives: int,
    operations: Operations,
) -> TokenScores:
    """Log-probabilities of given tokens and of the likeliest tokens.

    Args:
      logits_BV: Raw logits.
      token_B: The chosen tokens.
      num_logprobs_B: The alternatives that each row reports; all results are zeros if every row has
        -1.
      num_alternatives: Static: the number R of likeliest tokens.
      operations: Operations of the layout, for `top_k`.
    """
    B = logits_BV.shape[0]

    def score(logits_BV: jax.Array) -> TokenScores:
        lse_B = jax.nn.logsumexp(logits_BV, axis=-1)
        # subtracted from zero: the negative of an entropy of zero would be -0.0
        chosen_B = 0.0 - optax.softmax_cross_entropy_with_integer_labels(logits_BV, token_B)
        top_BR, ids_BR = operations.top_k(logits_BV, num_alternatives)
        return TokenScores(chosen_B, ids_BR, top_BR - lse_B[:, None])

    def nothing(_: jax.Array) -> TokenScores:
        shape = (B, num_alternatives)
        return TokenScores(jnp.zeros(B), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    return jax.lax.cond(jnp.any(num_logprobs_B >= 0), score, nothing, logits_BV)


def _argmax(x_BV: jax.Array) -> jax.Array:
    """The first index of the maximum of each row; V - 1 for a row with NaN.

    It uses two plain reductions: XLA for CPU does not vectorise the reduction of pairs in
    `jnp.argmax`.
    """
    V = x_BV.shape[-1]
    is_max_BV = x_BV == x_BV.max(axis=-1, keepdims=True)
    index_BV = jnp.where(is_max_BV, jnp.arange(V, dtype=jnp.int32)[None], V - 1)
    return index_BV.min(axis=-1)


def _when(condition: jax.Array, change, logits_BV: jax.Array) -> jax.Array:
    return jax.lax.cond(condition, change, lambda x: x, logits_BV)


def _add(x_BV: jax.Array, ids_BY: jax.Array, values_BY: jax.Array) -> jax.Array:
    """Add values to each row at its ids; an id past the end adds nothing."""

    # a scatter per row: for one scatter over all rows, XLA gathers ids and values of all devices
    def add_row(x_V: jax.Array, ids_Y: jax.Array, values_Y: jax.Array) -> jax.Array:
        return x_V.at[ids_Y].add(values_Y, mode="drop")

    return jax.vmap(add_row)(x_BV, ids_BY, values_BY)


def _set(x_BV: jax.Array, ids_BY: jax.Array, value: float) -> jax.Array:
    """Set each row to a value at its ids; an id past the end changes nothing."""
    return jax.vmap(lambda x_V, ids_Y: x_V.at[ids_Y].set(value, mode="drop"))(x_BV, ids_BY)


def _penalise(logits_BV: jax.Array, state: SamplingState, history: History) -> jax.Array:
    """Apply penalties: repetition to prompt and output, presence and frequency to the output.

    vLLM counts in the same way. Sources of the formulas: repetition, CTRL (Keskar et al. 2019,
    1909.05858, section 4.1); presence and frequency, OpenAI API reference.
    """
    B, V = logits_BV.shape
    index_S = jnp.arange(history.tokens_BS.shape[1])[None]
    is_known_BS = index_S < history.length_B[:, None]
    is_output_BS = is_known_BS & (index_S >= history.prompt_length_B[:, None])
    ids_BS = jnp.where(is_known_BS, history.tokens_BS, V)
    count_BV = _add(jnp.zeros((B, V), jnp.float32), ids_BS, is_output_BS.astype(jnp.float32))
    is_seen_BV = _set(jnp.zeros((B, V), bool), ids_BS, True)

    factor_B1 = state.repetition_B[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
    logits_BV = jnp.where(is_seen_BV, repeated_BV, logits_BV)
    logits_BV = logits_BV - state.frequency_B[:, None] * count_BV
    return logits_BV - state.presence_B[:, None] * (count_BV > 0)


def _gumbel_noise(state: SamplingState, history: History, V: int) -> jax.Array:
    """Gumbel noise from counter-based keys: a function of the seed, sample and step of a row."""
    step_B = history.length_B - history.prompt_length_B

    def noise_row(key_2: jax.Array, sample: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), step)
        return jax.random.gumbel(key, (V,), jnp.float32)

    return jax.vmap(noise_row)(state.key_B2, state.sample_B, step_B)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Map float32 to int32 in the same order, so that thresholds can be found by bisection."""
    # 0.0 and -0.0 are equal, but their bits differ
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _top_k_threshold(order_BV: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """The k-th largest value of each row; the smallest value of a row without a limit."""
    k_B = jnp.where(top_k_B > 0, top_k_B, order_BV.shape[-1])
    return _bisect(lambda t_B1: jnp.sum(order_BV >= t_B1, axis=-1) >= k_B, order_BV.shape[0])


def _top_p_threshold(order_BV: jax.Array, weight_BV: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """The largest threshold that keeps at least `top_p` of the weight (Holtzman et al. 2020)."""
    needed_B = jnp.where(top_p_B < 1.0, top_p_B * weight_BV.sum(axis=-1), -1.0)

    def keeps_enough(t_B1: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(order_BV >= t_B1, weight_BV, 0.0), axis=-1) >= needed_B

    lowest_B1 = jnp.iinfo(jnp.int32).min
    return jnp.where(top_p_B[:, None] < 1.0, _bisect(keeps_enough, order_BV.shape[0]), lowest_B1)


def _bisect(holds, num_rows: int) -> jax.Array:
    """The largest int32 per row for which `holds` is true, in 32 halvings.

    `holds` must be true up to some threshold and false above it. The result is exact. It costs far
    less than a sort of the vocabulary, as each halving is one fused reduction.
    """
    low_B1 = jnp.full((num_rows, 1), jnp.iinfo(jnp.int32).min, jnp.int32)
    high_B1 = jnp.full((num_rows, 1), jnp.iinfo(jnp.int32).max, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B1, high_B1 = bounds
        # the mean of two int32 without overflow
        middle_B1 = (low_B1 & high_B1) + ((low_B1 ^ high_B1) >> 1)
        is_true_B1 = holds(middle_B1)[:, None]
        return jnp.where(is_true_B1, middle_B1, low_B1), jnp.where(is_true_B1, high_B1, middle_B1)

    low_B1, _ = jax.lax.fori_loop(0, 32, halve, (low_B1, high_B1))
    return low_B1
