"""Attention against plain numpy: visibility, results, and the merge of partial results."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import attend_masked, merge, visible, with_sinks
from noria.modelzoo.cache.stripes import EMPTY_POSITION
from noria.modelzoo.layer_config import BothSides, Chunk, Scores

B, T, K, G, S, H = 2, 4, 2, 3, 7, 8


def random_inputs(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = ((B, T, K, G, H), (B, K, H, S), (B, K, S, H))
    q, k, v = (jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes)
    return q, k, v


def reference(q_BTKGH, k_BKHS, v_BKSH, mask_BTS, scale=H**-0.5, cap=None):
    """Compute attention one query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTKGH, k_BKHS, v_BKSH))
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(q.shape[:-1], -np.inf)
    for b, t, n, g in np.ndindex(*q.shape[:-1]):
        seen = np.flatnonzero(mask_BTS[b, t])
        if len(seen):
            scores = q[b, t, n, g] @ k[b, n][:, seen] * scale
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            lse[b, t, n, g] = np.log(np.sum(np.exp(scores)))
            out[b, t, n, g] = np.exp(scores - lse[b, t, n, g]) @ v[b, n, seen]
    return out, lse


def matrix(text: str) -> np.ndarray:
    return np.array([[int(x) for x in line.split()] for line in text.strip().splitlines()], bool)


@pytest.mark.parametrize(
    ("query", "key", "window", "expected"),
    [
        ([0, 1, 2], [0, 1, 2], None, "1 0 0 \n 1 1 0 \n 1 1 1"),
        ([0, 1, 2], [0, 1, 2], 2, "1 0 0 \n 1 1 0 \n 0 1 1"),
        ([0, 1, 2], [0, 1, 2], 1, "1 0 0 \n 0 1 0 \n 0 0 1"),
        ([0, 1, 2], [0, 1, EMPTY_POSITION], None, "1 0 0 \n 1 1 0 \n 1 1 0"),
        ([5], [0, 1, 2, 3, 4, 5, 6], 3, "0 0 0 1 1 1 0"),
        ([5], [4, EMPTY_POSITION, 6, 2, 5], None, "1 0 0 1 1"),
        ([0], [EMPTY_POSITION] * 3, None, "0 0 0"),
        ([0], [EMPTY_POSITION] * 3, 5, "0 0 0"),
        ([2], [EMPTY_POSITION, 0, 1], 9, "0 1 1"),
        (
            [1, 2, 3, 4],
            [0, 1, 2, 3, 4],
            Chunk(2),
            "1 1 0 0 0 \n 0 0 1 0 0 \n 0 0 1 1 0 \n 0 0 0 0 1",
        ),
        ([5, 6], [6, 4, 5, 3], Chunk(3), "0 1 1 1 \n 1 0 0 0"),
        ([2], [0, EMPTY_POSITION, 2], Chunk(9), "1 0 1"),
    ],
)
def test_a_token_sees_its_window_of_earlier_tokens_and_no_empty_entry(query, key, window, expected):
    mask_BTS = visible(jnp.array([query]), jnp.array([key]), window)
    np.testing.assert_array_equal(np.asarray(mask_BTS[0]), matrix(expected))


def random_mask() -> np.ndarray:
    mask_BTS = np.random.default_rng(3).random((B, T, S)) < 0.6
    mask_BTS[0, 1] = False  # a query that sees nothing
    mask_BTS[1, 2] = np.arange(S) == 4  # and one that sees a single key
    return mask_BTS


def test_dense_attention_equals_plain_numpy():
    q_BTKGH, k_BKHS, v_BKSH = random_inputs()
    mask_BTS = random_mask()
    out, lse = attend_masked(q_BTKGH, k_BKHS, v_BKSH, jnp.asarray(mask_BTS))
    expected_out, expected_lse = reference(q_BTKGH, k_BKHS, v_BKSH, mask_BTS)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=FLOAT32_ELEMENTWISE)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.mark.parametrize("value_dim", [1, 5, 11])
def test_heads_of_values_may_have_another_size_than_those_of_keys(value_dim):
    q_BTKGH, k_BKHS, _ = random_inputs()
    rng = np.random.default_rng(5)
    v_BKSH = jnp.asarray(rng.normal(size=(B, K, S, value_dim)).astype(np.float32))
    mask_BTS = random_mask()
    parts = [
        attend_masked(q_BTKGH, k_BKHS[..., i:j], v_BKSH[:, :, i:j], jnp.asarray(mask_BTS[..., i:j]))
        for i, j in ((0, 3), (3, S))
    ]
    out, _ = merge(parts)
    expected_out, _ = reference(q_BTKGH, k_BKHS, v_BKSH, mask_BTS)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.mark.parametrize("cap", [None, 0.7])
def test_scores_are_scaled_and_then_capped(cap):
    q_BTKGH, k_BKHS, v_BKSH = random_inputs()
    mask_BTS = random_mask()
    scores = Scores(scale=0.9, cap=cap)
    out, lse = attend_masked(q_BTKGH, k_BKHS, v_BKSH, jnp.asarray(mask_BTS), scores)
    expected_out, expected_lse = reference(q_BTKGH, k_BKHS, v_BKSH, mask_BTS, 0.9, cap)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=FLOAT32_ELEMENTWISE)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=FLOAT32_ELEMENTWISE)
    assert np.all(np.isneginf(lse[0, 1]))


def random_sinks() -> jax.Array:
    """Return random sinks: far below the other scores, among them, and far above."""
    return jnp.asarray(np.random.default_rng(4).normal(scale=4.0, size=(K, G)), jnp.float32)


@pytest.mark.parametrize("parts", [[slice(S)], [slice(3), slice(3, S)]], ids=["whole", "parts"])
def test_sinks_are_one_more_key_whose_value_is_zero(parts):
    """The reference is an explicit softmax, with the sink's score among the others."""
    q_BTKGH, k_BKHS, v_BKSH = random_inputs()
    mask_BTS, sink_KG = random_mask(), random_sinks()
    attended = [
        attend_masked(q_BTKGH, k_BKHS[..., s], v_BKSH[:, :, s], jnp.asarray(mask_BTS[..., s]))
        for s in parts
    ]
    out = with_sinks(*merge(attended), sink_KG)

    scores = np.einsum("btkgh,bkhs->btkgs", q_BTKGH, k_BKHS) * H**-0.5
    exponentials = np.where(mask_BTS[:, :, None, None], np.exp(scores), 0.0)
    total = exponentials.sum(axis=-1) + np.exp(sink_KG)
    expected = np.einsum("btkgs,bksh->btkgh", exponentials / total[..., None], v_BKSH)
    np.testing.assert_allclose(out, expected, rtol=0, atol=FLOAT32_ELEMENTWISE)
    assert np.all(np.asarray(out[0, 1]) == 0.0)


def test_a_sink_that_weighs_nothing_changes_no_bit():
    out, lse = attend_masked(*random_inputs(), jnp.asarray(random_mask()))
    assert np.array_equal(with_sinks(out, lse, jnp.full((K, G), -1e30)), out)
    assert np.array_equal(with_sinks(out, lse, None), out)


def test_a_query_that_sees_nothing_gets_exactly_zero():
    out, lse = attend_masked(*random_inputs(), jnp.asarray(random_mask()))
    assert np.all(np.asarray(out[0, 1]) == 0.0)
    assert np.all(np.isneginf(lse[0, 1]))


def test_masked_keys_and_values_never_matter():
    q_BTKGH, k_BKHS, v_BKSH = random_inputs()
    mask_BTS = jnp.broadcast_to(jnp.arange(S) < 5, (B, T, S))
    before = attend_masked(q_BTKGH, k_BKHS, v_BKSH, mask_BTS)
    after = attend_masked(
        q_BTKGH, k_BKHS.at[..., 5:].set(1e4), v_BKSH.at[:, :, 5:].set(-1e4), mask_BTS
    )
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old, new)


def test_huge_scores_do_not_overflow():
    q_BTKGH, k_BKHS, v_BKSH = random_inputs()
    out, lse = attend_masked(q_BTKGH * 1e4, k_BKHS, v_BKSH, jnp.ones((B, T, S), bool))
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(lse))


def parts_of(mask_BTS: np.ndarray, cuts: list[int]) -> list[tuple[jax.Array, jax.Array]]:
    q_BTKGH, k_BKHS, v_BKSH = random_inputs()
    return [
        attend_masked(
            q_BTKGH,
            k_BKHS[..., start:end],
            v_BKSH[:, :, start:end],
            jnp.asarray(mask_BTS[:, :, start:end]),
        )
        for start, end in zip([0, *cuts], [*cuts, S], strict=True)
    ]


@pytest.mark.parametrize("cuts", [[3], [1, 6], [2, 4, 5]], ids=str)
def test_merged_parts_equal_the_whole(cuts):
    mask_BTS = random_mask()
    whole = attend_masked(*random_inputs(), jnp.asarray(mask_BTS))
    merged = merge(parts_of(mask_BTS, cuts))
    for ours, expected in zip(merged, whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=FLOAT32_ELEMENTWISE)


def test_merging_with_parts_in_which_nothing_is_seen_changes_no_bit():
    """All queries see only keys of the first part; the other parts are empty for every query."""
    mask_BTS = np.zeros((B, T, S), bool)
    mask_BTS[:, :, :4] = True
    first, *empty = parts_of(mask_BTS, [4, 5, 6])
    merged_out, _ = jax.jit(merge)([first, *empty])
    assert np.array_equal(merged_out, first[0])
    more_out, more_lse = jax.jit(merge)([first, *empty, *empty])
    few_out, few_lse = jax.jit(merge)([first, empty[0]])
    assert np.array_equal(more_out, few_out) and np.array_equal(more_lse, few_lse)


def test_merging_parts_that_see_nothing_at_all_gives_zero_and_no_nan():
    out, lse = merge(parts_of(np.zeros((B, T, S), bool), [3, 5]))
    assert np.all(np.asarray(out) == 0.0) and np.all(np.isneginf(lse))


@pytest.mark.parametrize("reach", [None, 1, 3])
def test_attention_in_both_directions_sees_later_tokens_and_no_padding(reach):
    positions_BT = np.array([[0, 1, 2, 3, 4, -1, -1]])
    mask_BTS = visible(jnp.arange(7)[None], jnp.asarray(positions_BT), BothSides(reach))
    for query, key in itertools.product(range(5), range(7)):
        is_near = reach is None or abs(query - key) <= reach
        assert mask_BTS[0, query, key] == (key < 5 and is_near)
