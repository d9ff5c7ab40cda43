"""Rotary frequencies against transformers' own, and the rotation against plain complex numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.rope import encode, frequencies, position_code, rotate, rotation
from noria.modelzoo.rope_config import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    NoRope,
    RopeConfig,
    YarnScaling,
)

SCALINGS = {
    "linear": (LinearScaling(2.5), {"rope_type": "linear", "factor": 2.5}),
    "llama3": (
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama3-step": (
        Llama3Scaling(16.0, 1.0, 1.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        YarnScaling(4.0, 4096),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    ),
    "yarn-short-context": (
        YarnScaling(16.0, 20),
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 20},
    ),
    "yarn-all": (
        YarnScaling(40.0, 4096, 24.0, 2.0, 0.7, False),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "attention_factor": 0.7,
            "truncate": False,
        },
    ),
    "yarn-factor-one": (
        YarnScaling(1.0, 4096),
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
    ),
}


@pytest.mark.reference
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("scaling", "published"), SCALINGS.values(), ids=SCALINGS.keys())
def test_frequencies_equal_those_of_transformers(scaling, published, head_dim, theta):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters={**published, "rope_theta": theta},
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[published["rope_type"]](config)
    ours, factor = frequencies(RopeConfig(theta, scaling), head_dim)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=FLOAT32_ELEMENTWISE, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_unscaled_frequencies_are_powers_of_theta():
    ours, factor = frequencies(RopeConfig(10_000.0), 8)
    np.testing.assert_allclose(ours, [1.0, 0.1, 0.01, 0.001], rtol=1e-7)
    assert factor == 1.0


def test_factors_of_llama_3_1_say_what_its_scaling_says():
    """GGUF stores the quotient of plain and scaled frequencies; dividing by it scales again."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain, _ = frequencies(RopeConfig(5e5), 64)
    scaled, _ = frequencies(RopeConfig(5e5, scaling), 64)
    stored = FactorScaling(tuple((plain / scaled).tolist()))
    ours, factor = frequencies(RopeConfig(5e5, stored), 64)
    np.testing.assert_allclose(ours, scaled, rtol=FLOAT32_ELEMENTWISE)
    assert factor == 1.0


def test_rotation_turns_each_pair_of_halves_by_position_times_frequency():
    rng = np.random.default_rng(0)
    x_BTNH = rng.normal(size=(2, 3, 2, 8)).astype(np.float32)
    position_BT = np.array([[0, 1, 2], [5, 30, 400]], np.int32)
    rope = RopeConfig(100.0, YarnScaling(4.0, 64))
    frequency, factor = frequencies(rope, 8)
    turn = factor * np.exp(1j * position_BT[..., None, None] * frequency.astype(np.float64))
    turned = (x_BTNH[..., :4] + 1j * x_BTNH[..., 4:]) * turn
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    ours = rotate(jnp.asarray(x_BTNH), rotation(jnp.asarray(position_BT), rope, 8))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=4 * FLOAT32_ELEMENTWISE)
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q_11NH, k_11NH = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    rope = RopeConfig(1e4)

    def score(query_position: int, key_position: int) -> float:
        query = rotate(jnp.asarray(q_11NH), rotation(jnp.full((1, 1), query_position), rope, 16))
        key = rotate(jnp.asarray(k_11NH), rotation(jnp.full((1, 1), key_position), rope, 16))
        return float(jnp.sum(query * key))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_entries_beyond_the_rotated_ones_stay_as_they_are():
    rope = RopeConfig(100.0, FactorScaling((1.0, 2.0, 4.0), attention_factor=1.25), rotated=6)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 10)), jnp.float32)
    positions = jnp.arange(10).reshape(2, 5)
    turned = rotate(x, rotation(positions, rope, 10))
    alone = rotate(x[..., :6], rotation(positions, RopeConfig(rope.theta, rope.scaling), 6))
    np.testing.assert_array_equal(turned[..., :6], alone)
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])
    # at position zero only the factor remains
    np.testing.assert_allclose(
        turned[0, 0, :, :6], 1.25 * x[0, 0, :, :6], rtol=0, atol=FLOAT32_ELEMENTWISE
    )


def test_heads_that_are_normed_have_a_mean_square_of_one_and_keep_their_direction():
    plain, normed = RopeConfig(100.0), RopeConfig(100.0, norm_epsilon=0.25)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 8)), jnp.float32)
    positions = jnp.arange(10).reshape(2, 5)
    turned = np.asarray(rotate(x, rotation(positions, plain, 8)))
    mean_square = np.mean(np.asarray(x) ** 2, axis=-1, keepdims=True)
    expected = turned / np.sqrt(mean_square + 0.25)
    ours = rotate(x, rotation(positions, normed, 8))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["constant", "data"])
def test_where_nothing_rotates_queries_grow_at_each_interval_and_keys_stay(array):
    """Each interval has 4 positions: the first one ends with position 3."""
    position_BT = array([[0, 2, 3], [6, 7, 40]], dtype=np.int32)
    q, k = (jnp.ones((2, 3, heads, 4)) for heads in (3, 1))
    q, unchanged = encode(q, k, position_code(position_BT, NoRope(0.5, interval=4), 4))
    whole_intervals = np.array([[0, 0, 1], [1, 2, 10]])
    expected = 1 + 0.5 * np.log(1 + whole_intervals)
    np.testing.assert_allclose(q[..., 0, 0], expected, rtol=0, atol=FLOAT32_ELEMENTWISE)
    assert np.all(np.asarray(q) == q[:, :, :1, :1]) and unchanged is k


def test_without_growth_nothing_happens_where_nothing_rotates():
    q, k = jnp.ones((1, 2, 3, 4)), jnp.ones((1, 2, 1, 4))
    encoded = encode(q, k, position_code(jnp.array([[5, 90]]), NoRope(), 4))
    assert encoded[0] is q and encoded[1] is k
