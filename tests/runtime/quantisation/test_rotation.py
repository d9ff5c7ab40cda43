"""Rotated and smoothed models compute what the model computes, with fewer large features."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike, changed
from tiny import TWO_LAYERS, random_parameters
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.config import DecoderConfig, Multipliers
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.runtime.errors import InvalidConfig
from noria.runtime.quantisation.rotation import Rotation
from noria.runtime.quantisation.smoothing import smooth_layer

TOKENS_BT = jnp.asarray(np.random.default_rng(0).integers(0, TWO_LAYERS.vocab_size, (2, 12)))
MODELS = {
    "tied": replace(TWO_LAYERS, tie_embeddings=True, embed=36),
    "biases": changed(
        TWO_LAYERS,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        sinks=True,
        norm_offset=1.0,
        multipliers=Multipliers(embedding=3.0, residual=0.5, logits=0.25),
    ),
    "head norms": changed(TWO_LAYERS, qk_norm="head", logit_cap=30.0, activation="gelu_tanh"),
    "experts": changed(
        TWO_LAYERS,
        moe=MoeConfig(
            Routing(4, 2, has_bias=True),
            20,
            shared_mlp=28,
            has_shared_gate=True,
            has_bias=True,
        ),
        sparse=(False, True),
    ),
}


def logprobs(config: DecoderConfig, parameters: dict[str, jax.Array]) -> np.ndarray:
    """Return the log-probabilities of all tokens."""

    @jax.jit
    def forward(parameters):
        decoder = AbstractModel(config).bind(parameters)
        x_BTD, *_ = decoder.forward(TOKENS_BT, jnp.full(len(TOKENS_BT), TOKENS_BT.shape[1]))
        return jax.nn.log_softmax(decoder.logits(x_BTD.reshape(-1, config.embed)))

    return np.asarray(forward(parameters))


def rotated(config: DecoderConfig, parameters) -> tuple[DecoderConfig, dict[str, jax.Array]]:
    """Return the rotated model."""
    rotation = Rotation(config, lambda path: np.array(parameters[path]))
    paths = AbstractModel(rotation.config).weights
    return rotation.config, {path: jnp.asarray(rotation.read(path)) for path in paths}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_rotated_model_computes_the_same(config):
    parameters = random_parameters(AbstractModel(config))
    # the tiny weights are large: keep the log-probabilities of the same size as those of a model
    parameters = {path: x * 0.4 for path, x in parameters.items()}
    turned, weights = rotated(config, parameters)
    assert not turned.tie_embeddings
    got, wanted = logprobs(turned, weights), logprobs(config, parameters)
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, atol=FLOAT32_MODEL_LOGPROB, rtol=0)


def test_a_rotation_spreads_large_features_and_keeps_lengths():
    config = MODELS["tied"]
    parameters = random_parameters(AbstractModel(config))
    table_VD = parameters["embedding.table"].at[:, 5].mul(50)
    _, weights = rotated(config, {**parameters, "embedding.table": table_VD})
    got_VD, wanted_VD = np.asarray(weights["embedding.table"]), np.asarray(table_VD)
    np.testing.assert_allclose((got_VD**2).sum(1), (wanted_VD**2).sum(1), rtol=1e-5)
    assert np.abs(got_VD).max() < 0.6 * np.abs(wanted_VD).max()
    np.testing.assert_array_equal(weights["layers.1.mlp_norm.scale"], 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"norm": "layer"}, "layer norms"),
        ({"norm_placement": "both"}, "norms of the outputs of blocks"),
        ({"is_parallel": True}, "parallel blocks"),
        (
            {
                "latent": LatentAttention(8, 4, 4, 8),
                "num_kv_heads": alike(TWO_LAYERS).num_query_heads,
            },
            "latent attention",
        ),
    ],
)
def test_models_that_a_rotation_would_change_are_refused(change, reason):
    config = changed(TWO_LAYERS, **change)
    with pytest.raises(InvalidConfig, match=rf"--rotate: expected .*, got one with {reason}"):
        Rotation(config, lambda path: np.zeros(1))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_smoothed_model_computes_the_same(config):
    parameters = {
        path: np.array(x) * np.float32(0.4)
        for path, x in random_parameters(AbstractModel(config)).items()
    }
    rng, smoothed, read = np.random.default_rng(1), dict(parameters), []

    def mean_square(weights, path):
        read.append(path)
        size = {"attention.qkv": config.embed, "mlp.gate_up": config.embed}
        num_inputs = size.get(path, weights[path].size // config.embed)
        return rng.lognormal(size=num_inputs) ** 2

    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        own = {p.removeprefix(prefix): x for p, x in parameters.items() if p.startswith(prefix)}
        changed = smooth_layer(own, partial(mean_square, own), config.norm_offset)
        smoothed |= {prefix + path: x for path, x in changed.items()}
    last = "mlp.down" if config.moe is None else "mlp.shared.down"
    dense = ["attention.qkv", "mlp.gate_up", "attention.output", "mlp.down"]
    assert read == dense + (dense if config.moe is None else [*dense[::2], last])
    got, wanted = (
        logprobs(config, {path: jnp.asarray(x) for path, x in arrays.items()})
        for arrays in (smoothed, parameters)
    )
    np.testing.assert_allclose(got, wanted, atol=FLOAT32_MODEL_LOGPROB, rtol=0)


def test_smoothing_makes_features_as_large_as_the_weights_that_read_them():
    rng = np.random.default_rng(1)
    weights = {
        "mlp.gate_up": rng.normal(size=(2, 24, 40)).astype(np.float32),
        "mlp.down": rng.normal(size=(40, 24)).astype(np.float32),
    }
    mean_square_F = rng.lognormal(size=40) ** 2
    mean_square_F[3] = 0
    changed = smooth_layer(weights, lambda path: mean_square_F)
    factor_F = (changed["mlp.down"] / weights["mlp.down"]).mean(axis=1)
    np.testing.assert_allclose(np.log(factor_F).mean(), 0, atol=1e-5)
    of_down_F = np.square(changed["mlp.down"]).mean(axis=1)
    balanced_F = (mean_square_F / factor_F**2 / of_down_F)[mean_square_F > 0]
    np.testing.assert_allclose(balanced_F, balanced_F[0], rtol=1e-4)
    up_DF = changed["mlp.gate_up"][1] * factor_F
    np.testing.assert_allclose(up_DF, weights["mlp.gate_up"][1], rtol=1e-5)
