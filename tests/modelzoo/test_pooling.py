"""Pooling equals numpy, and padding never changes a bit of a vector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.pooling import Pooler
from noria.modelzoo.pooling_config import Pooling, Projection

COUNTS = (5, 1, 3)
LENGTH, EMBED = 6, 4


def states(padding: float) -> np.ndarray:
    x_BTD = np.random.default_rng(0).normal(size=(len(COUNTS), LENGTH, EMBED)).astype(np.float32)
    for row, count in enumerate(COUNTS):
        x_BTD[row, count:] = padding
    return x_BTD


def pooler_of(pooling: Pooling) -> Pooler:
    pooler = Pooler(nnx.Rngs(0), EMBED, pooling)
    rng = np.random.default_rng(1)
    for _, parameter in nnx.to_flat_state(nnx.state(pooler)):
        parameter.set_value(jnp.asarray(rng.normal(size=parameter.shape).astype(np.float32)))
    return pooler


def run(pooling: Pooling, padding: float = 9.0) -> tuple[np.ndarray, Pooler]:
    pooler = pooler_of(pooling)
    found = jax.jit(lambda x, n: pooler(x, np.arange(LENGTH)[None], n))(
        states(padding), np.array(COUNTS)
    )
    return np.asarray(found), pooler


def pooled(kind: str, x_TD: np.ndarray) -> np.ndarray:
    if kind in ("first", "last"):
        return x_TD[0 if kind == "first" else -1]
    return x_TD.max(axis=0) if kind == "max" else x_TD.mean(axis=0)


@pytest.mark.parametrize("kind", ["first", "last", "mean", "max"])
@pytest.mark.parametrize("normalises", [False, True])
def test_a_vector_is_that_of_numpy_whatever_the_padding_holds(kind, normalises):
    pooling = Pooling(kind, normalises=normalises)
    found, _ = run(pooling)
    for row, count in enumerate(COUNTS):
        expected = pooled(kind, states(0.0)[row, :count])
        if normalises:
            expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=FLOAT32_ELEMENTWISE)
    np.testing.assert_array_equal(found, run(pooling, padding=np.nan)[0])


def test_dense_layers_follow_with_activation_and_norm():
    layers = (
        Projection(5, activation="tanh"),
        Projection(3, has_bias=False, activation="gelu", norm_epsilon=1e-5, has_norm_bias=True),
    )
    found, pooler = run(Pooling("mean", layers))
    first, second = pooler.dense
    from scipy.special import erf

    for row, count in enumerate(COUNTS):
        y = states(0.0)[row, :count].mean(axis=0)
        y = np.tanh(y @ np.asarray(first.weight[...]) + np.asarray(first.bias[...]))
        y = y @ np.asarray(second.weight[...])
        y = y * 0.5 * (1 + erf(y / np.sqrt(2)))
        y = (y - y.mean()) / np.sqrt(y.var() + 1e-5)
        y = y * np.asarray(second.norm_scale[...]) + np.asarray(second.norm_bias[...])
        np.testing.assert_allclose(found[row], y, rtol=0, atol=FLOAT32_ELEMENTWISE)


def test_a_row_without_a_text_is_finite_and_zero():
    pooler = pooler_of(Pooling("mean", normalises=True))
    found = pooler(jnp.full((1, LENGTH, EMBED), jnp.nan), np.arange(LENGTH)[None], jnp.array([0]))
    np.testing.assert_array_equal(found, np.zeros((1, EMBED)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "median"}, "expected one of .*got 'median'"),
        ({"scores": "loud"}, "got 'loud'"),
        ({"labels": ("a", "b"), "projections": (Projection(3),)}, "one for each output, got 2"),
    ],
)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Pooling(**wrong)


def test_a_wrong_projection_is_refused():
    with pytest.raises(ValueError, match="expected a positive size"):
        Projection(0)
    with pytest.raises(ValueError, match="got 'sin'"):
        Projection(2, activation="sin")  # pyright: ignore[reportArgumentType]
