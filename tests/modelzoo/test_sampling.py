"""Sampling against a plain numpy reference that sorts, counts and loops, one row at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.operations import Operations
from noria.modelzoo.sampling import (
    History,
    SamplingState,
    keep_mask,
    process_logits,
    sample,
    score_tokens,
)

V, X, Y, S = 37, 3, 4, 12


def make_state(batch: int, **rows) -> SamplingState:
    """Return greedy rows without options, with the given fields replaced."""

    def full(value, dtype=np.float32):
        return np.full(batch, value, dtype)

    fields = {
        "temperature_B": full(0.0),
        "top_k_B": full(0, np.int32),
        "top_p_B": full(1.0),
        "min_p_B": full(0.0),
        "presence_B": full(0.0),
        "frequency_B": full(0.0),
        "repetition_B": full(1.0),
        "key_B2": np.stack([np.arange(batch), np.full(batch, 7)], axis=1).astype(np.uint32),
        "sample_B": full(0, np.int32),
        "min_length_B": full(0, np.int32),
        "stop_ids_BX": np.full((batch, X), V, np.int32),
        "bias_ids_BY": np.full((batch, Y), V, np.int32),
        "bias_BY": np.zeros((batch, Y), np.float32),
        "num_logprobs_B": full(-1, np.int32),
    }
    for name, value in rows.items():
        fields[name] = np.broadcast_to(
            np.asarray(value, fields[name].dtype), fields[name].shape
        ).copy()
    return SamplingState(**{name: jnp.asarray(value) for name, value in fields.items()})


def make_history(batch: int, prompt_length: int = 4, length: int = 9, seed: int = 0) -> History:
    """Ids past `length` come from the slot's earlier row."""
    tokens_BS = np.random.default_rng(seed).integers(0, 12, (batch, S)).astype(np.int32)
    return History(jnp.asarray(tokens_BS), jnp.full(batch, prompt_length), jnp.full(batch, length))


def random_logits(batch: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=(batch, V)), jnp.float32)


def live(batch: int) -> jax.Array:
    return jnp.ones(batch, bool)


def take(rows: SamplingState | History, index):
    return jax.tree.map(lambda x: x[index], rows)


def reference_process(logits_V, state: SamplingState, history: History) -> np.ndarray:
    logits = np.array(logits_V, np.float64)
    for token, bias in zip(state.bias_ids_BY, state.bias_BY, strict=True):
        if token < V:
            logits[token] += bias
    if history.length_B < state.min_length_B:
        for token in state.stop_ids_BX:
            if token < V:
                logits[token] = -np.inf
    known = history.tokens_BS[: int(history.length_B)].tolist()
    output = known[int(history.prompt_length_B) :]
    for token in set(known):
        factor = float(state.repetition_B)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= float(state.frequency_B) * output.count(token) + float(state.presence_B)
    return logits


def reference_keep(scaled_V, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    scaled = np.asarray(scaled_V, np.float64)
    kept = np.exp(scaled - scaled.max()) >= min_p
    if top_k > 0:
        candidates = np.sort(np.where(kept, scaled, -np.inf))[::-1]
        kept &= scaled >= candidates[min(top_k, V) - 1]
    if top_p < 1.0:
        weights = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
        order = np.argsort(-np.where(kept, scaled, -np.inf))
        total = np.cumsum(weights[order])
        last = order[np.searchsorted(total, top_p * total[-1])]
        kept &= scaled >= scaled[last]
    return kept


PROCESSING = {
    "nothing": {},
    "bias": {"bias_ids_BY": [3, 36, V, V], "bias_BY": [2.5, -100.0, 9.0, 9.0]},
    "the same id twice": {"bias_ids_BY": [3, 3, V, V], "bias_BY": [1.0, 2.0, 0.0, 0.0]},
    "too short to stop": {"min_length_B": 10, "stop_ids_BX": [2, 30, V]},
    "just long enough to stop": {"min_length_B": 9, "stop_ids_BX": [2, 30, V]},
    "repetition": {"repetition_B": 1.7},
    "presence": {"presence_B": 0.9},
    "frequency": {"frequency_B": -0.6},
    "all": {
        "bias_ids_BY": [0, 5, 20, V],
        "bias_BY": [1.0, -3.0, 0.5, 0.0],
        "min_length_B": 12,
        "stop_ids_BX": [5, 1, V],
        "repetition_B": 0.8,
        "presence_B": 0.4,
        "frequency_B": 0.3,
    },
}


@pytest.mark.parametrize("changes", PROCESSING.values(), ids=PROCESSING.keys())
def test_processed_logits_equal_the_reference(changes):
    state, history, logits_BV = make_state(5, **changes), make_history(5), random_logits(5)
    ours = jax.jit(process_logits)(logits_BV, state, history, live(5))
    for row in range(5):
        expected = reference_process(logits_BV[row], take(state, row), take(history, row))
        np.testing.assert_allclose(ours[row], expected, rtol=0, atol=FLOAT32_ELEMENTWISE)


KEEPING = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (V, 1.0, 0.0),
    (10 * V, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.3, 0.0),
    (0, 1e-9, 0.0),
    (0, 0.999999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (6, 0.8, 0.0),
    (6, 0.8, 0.1),
    (3, 0.99, 0.001),
]


@pytest.mark.parametrize("ties", [False, True])
def test_kept_tokens_equal_the_reference(ties):
    """All settings are rows of one batch; with ties, logits are small whole numbers."""
    logits_BV = random_logits(len(KEEPING))
    if ties:
        logits_BV = jnp.round(logits_BV)
    top_k, top_p, min_p = (np.array(column) for column in zip(*KEEPING, strict=True))
    state = make_state(len(KEEPING), temperature_B=1.0, top_k_B=top_k, top_p_B=top_p, min_p_B=min_p)
    ours_BV = jax.jit(keep_mask)(logits_BV, state, live(len(KEEPING)))
    for row, setting in enumerate(KEEPING):
        expected = reference_keep(logits_BV[row], *setting)
        np.testing.assert_array_equal(ours_BV[row], expected, err_msg=str(setting))


def test_tokens_tied_with_the_last_one_kept_are_kept():
    logits_BV = jnp.full((2, V), -4.0).at[:, :5].set(1.0).at[:, 30].set(3.0)
    state = make_state(2, temperature_B=1.0, top_k_B=[3, 0], top_p_B=[1.0, 0.7])
    kept_BV = keep_mask(logits_BV, state, live(2))
    for row in kept_BV:
        assert np.flatnonzero(row).tolist() == [0, 1, 2, 3, 4, 30]


def test_both_zeros_are_tied():
    logits_BV = jnp.full((1, V), -4.0).at[0, 3].set(-0.0).at[0, 9].set(0.0)
    kept_BV = keep_mask(logits_BV, make_state(1, temperature_B=1.0, top_k_B=1), live(1))
    assert np.flatnonzero(kept_BV[0]).tolist() == [3, 9]


@pytest.mark.parametrize(
    "only_the_best", [{"top_k_B": 1}, {"top_p_B": 1e-9}, {"min_p_B": 1.0}, {"temperature_B": 1e-6}]
)
def test_keeping_the_best_token_alone_is_greedy(only_the_best):
    logits_BV = random_logits(16)
    state = make_state(16, **{"temperature_B": 1.0} | only_the_best)
    ours_B = jax.jit(sample)(logits_BV, state, make_history(16), live(16))
    np.testing.assert_array_equal(ours_B, jnp.argmax(logits_BV, axis=-1))


def test_greedy_takes_the_first_of_tied_tokens():
    logits_BV = jnp.zeros((1, V)).at[0, jnp.array([4, 11])].set(2.0)
    assert sample(logits_BV, make_state(1), make_history(1), live(1)).tolist() == [4]


def mixed_rows() -> tuple[jax.Array, SamplingState, History]:
    """Return eight rows: each has another option, and one has none."""
    batch = 8
    nothing = [V] * Y
    state = make_state(
        batch,
        temperature_B=[0, 1.0, 0.7, 1.3, 0, 1.0, 1.0, 2.0],
        top_k_B=[0, 0, 4, 0, 0, 0, 0, 9],
        top_p_B=[1, 1, 1, 0.8, 1, 1, 1, 0.9],
        min_p_B=[0, 0, 0, 0, 0, 0.1, 0, 0.02],
        repetition_B=[1, 1, 1, 1, 1.5, 1, 1, 1.1],
        frequency_B=[0, 0, 0, 0, 0, 0, 0.5, 0],
        bias_ids_BY=[nothing] * 4 + [[1, 2, V, V]] + [nothing] * 3,
        bias_BY=[[0] * Y] * 4 + [[4.0, -4.0, 0, 0]] + [[0] * Y] * 3,
        min_length_B=[0] * 6 + [12, 0],
        stop_ids_BX=[[2, V, V]] * batch,
    )
    history = make_history(batch)._replace(length_B=jnp.array([5, 6, 7, 8, 9, 10, 11, 12]))
    return random_logits(batch), state, history


def compiled_here(function):
    """Compile a function for one test, with the test's optimizations."""
    return jax.jit(lambda *arguments: function(*arguments))


@pytest.mark.usefixtures("optimized")
def test_rows_are_bit_equal_under_permutation():
    logits_BV, state, history = mixed_rows()
    order = jnp.array([5, 2, 7, 0, 3, 6, 1, 4])
    run = compiled_here(sample)
    tokens_B = run(logits_BV, state, history, live(8))
    permuted_B = run(logits_BV[order], take(state, order), take(history, order), live(8))
    np.testing.assert_array_equal(tokens_B[order], permuted_B)


@pytest.mark.usefixtures("optimized")
def test_a_row_gets_the_same_bits_whatever_its_neighbours_ask_for():
    """A row with an option among rows without runs only its branch; all rows together run all."""
    logits_BV, state, history = mixed_rows()
    process, draw, keep = map(compiled_here, (process_logits, sample, keep_mask))
    together = process(logits_BV, state, history, live(8))
    kept = keep(logits_BV, state, live(8))
    tokens_B = draw(logits_BV, state, history, live(8))
    for row in range(8):
        quiet = jax.tree.map(
            lambda mine, none, row=row: none.at[row].set(mine[row]), state, make_state(8)
        )
        alone = process(logits_BV, quiet, history, live(8))
        np.testing.assert_array_equal(alone[row], together[row])
        np.testing.assert_array_equal(keep(logits_BV, quiet, live(8))[row], kept[row])
        assert draw(logits_BV, quiet, history, live(8))[row] == tokens_B[row]


def test_rows_that_are_not_live_make_no_branch_run():
    logits_BV, state, history = mixed_rows()
    is_live_B = jnp.arange(8) == 0  # the row without options
    processed_BV = jax.jit(process_logits)(logits_BV, state, history, is_live_B)
    np.testing.assert_array_equal(processed_BV, logits_BV)
    tokens_B = jax.jit(sample)(logits_BV, state, history, is_live_B)
    np.testing.assert_array_equal(tokens_B, jnp.argmax(logits_BV, axis=-1))


@pytest.mark.usefixtures("optimized")
def test_a_nan_in_one_row_changes_no_other():
    logits_BV, state, history = mixed_rows()
    run = compiled_here(sample)
    expected_B = run(logits_BV, state, history, live(8))
    tokens_B = run(logits_BV.at[3].set(jnp.nan), state, history, live(8))
    others = np.delete(np.arange(8), 3)
    np.testing.assert_array_equal(tokens_B[others], expected_B[others])


DRAWS = 8192


@pytest.mark.parametrize("varied", ["key", "sample", "step"])
@pytest.mark.parametrize("changes", [{}, {"top_k_B": 3}, {"top_p_B": 0.8, "temperature_B": 1.5}])
def test_frequencies_of_draws_match_the_probabilities(varied, changes):
    """Each token is within 4.5 standard deviations, over fixed seeds and for every counter."""
    logits_V = jnp.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    state = make_state(DRAWS, **{"temperature_B": 1.0} | changes)
    history = make_history(DRAWS)._replace(tokens_BS=jnp.zeros((DRAWS, 1), jnp.int32))
    if varied != "key":
        state = state._replace(key_B2=jnp.full((DRAWS, 2), 11, jnp.uint32))
    if varied == "sample":
        state = state._replace(sample_B=jnp.arange(DRAWS))
    if varied == "step":
        history = history._replace(length_B=4 + jnp.arange(DRAWS))
    # the padding ids of stops and biases are also outside this vocabulary
    tokens_B = jax.jit(sample)(jnp.broadcast_to(logits_V, (DRAWS, 6)), state, history, live(DRAWS))
    scaled = np.asarray(logits_V, np.float64) / float(state.temperature_B[0])
    top_k, top_p = int(state.top_k_B[0]), float(state.top_p_B[0])
    padded = np.concatenate([scaled, np.full(V - 6, -np.inf)])
    kept = reference_keep(padded, top_k, top_p, 0.0)[:6]
    probability = np.where(kept, np.exp(scaled), 0.0)
    probability /= probability.sum()
    frequency = np.bincount(np.asarray(tokens_B), minlength=6) / DRAWS
    deviation = np.sqrt(probability * (1 - probability) / DRAWS)
    assert np.all(np.abs(frequency - probability) <= 4.5 * deviation)


def test_draws_are_a_function_of_key_sample_and_step_alone():
    logits_BV = jnp.broadcast_to(random_logits(1) / 5, (64, V))
    state = make_state(64, temperature_B=1.0)
    history = make_history(64)
    draw = partial(jax.jit(sample), logits_BV)
    tokens_B = draw(state, history, live(64))
    np.testing.assert_array_equal(tokens_B, draw(state, history, live(64)))
    # the same step behind a longer prompt of other ids
    later = History(history.tokens_BS + 1, history.prompt_length_B + 2, history.length_B + 2)
    np.testing.assert_array_equal(tokens_B, draw(state, later, live(64)))
    for changed in (
        (state._replace(key_B2=state.key_B2 + jnp.uint32(1)), history),
        (state._replace(sample_B=state.sample_B + 1), history),
        (state, history._replace(length_B=history.length_B + 1)),
    ):
        assert np.mean(np.asarray(draw(*changed, live(64))) != np.asarray(tokens_B)) > 0.5


def test_scores_are_log_probabilities_of_the_raw_logits():
    logits_BV = random_logits(4)
    token_B = jnp.array([0, 5, 36, 11])
    scores = jax.jit(score_tokens, static_argnums=(3, 4))(
        logits_BV, token_B, jnp.array([-1, 0, 3, -1]), 3, Operations()
    )
    logits = np.asarray(logits_BV, np.float64)
    expected_BV = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen_B = expected_BV[np.arange(4), np.asarray(token_B)]
    top_ids_BR = np.argsort(-expected_BV, axis=-1)[:, :3]
    np.testing.assert_allclose(scores.logprob_B, chosen_B, rtol=0, atol=FLOAT32_ELEMENTWISE)
    np.testing.assert_array_equal(scores.top_ids_BR, top_ids_BR)
    np.testing.assert_allclose(
        scores.top_logprobs_BR,
        np.take_along_axis(expected_BV, top_ids_BR, axis=-1),
        rtol=0,
        atol=FLOAT32_ELEMENTWISE,
    )


def test_the_score_of_a_certain_token_is_zero_without_a_sign():
    logits_BV = jnp.full((1, 8), -jnp.inf).at[0, 3].set(2.0)
    score = jax.jit(score_tokens, static_argnums=(3, 4))
    logprob_B = score(logits_BV, jnp.array([3]), jnp.array([0]), 1, Operations()).logprob_B
    assert logprob_B == 0 and not np.signbit(logprob_B)


def test_scores_are_zero_when_no_row_asks():
    scores = score_tokens(
        random_logits(4), jnp.zeros(4, jnp.int32), jnp.full(4, -1), 2, Operations()
    )
    assert all(np.all(np.asarray(part) == 0) for part in scores)
