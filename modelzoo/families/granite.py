"""Granite 3, dense: Llama blocks with constant factors on embeddings, scores, residuals and logits.

Source: maximal update parametrisation as in "Power Scheduler" (2408.13359). Names and meanings are
those of transformers and, for GGUF, of llama.cpp.
"""

from dataclasses import replace

from ..config import Multipliers
from ..layer_config import Scores
from .config_reader import ConfigReader
from .family import Family, Options


def factor_options(config: ConfigReader, num_layers: int) -> Options:
    """Read the factors of config.json, for dense and sparse models."""
    del num_layers
    multipliers = Multipliers(
        embedding=_factor(config, "embedding_multiplier"),
        residual=_factor(config, "residual_multiplier"),
        logits=1.0 / _factor(config, "logits_scaling"),
    )
    scores = Scores(scale=_factor(config, "attention_multiplier"))
    return Options(scores=scores, multipliers=multipliers).with_biases(config)


def gguf_factor_options(config: ConfigReader, num_layers: int) -> Options:
    """Read the factors of GGUF metadata, for dense and sparse models."""
    del num_layers
    multipliers = Multipliers(
        embedding=_factor(config, "embedding_scale"),
        residual=_factor(config, "residual_scale"),
        # the key is named a scale, but logits are divided by it
        logits=1.0 / _factor(config, "logit_scale"),
    )
    has_scale = config.has("attention.scale")
    scores = Scores(scale=_factor(config, "attention.scale")) if has_scale else Scores()
    return Options(scores=scores, multipliers=multipliers)


def _factor(config: ConfigReader, key: str) -> float:
    return config.number(key, above=0.0, default=1.0)


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    mlp_bias = config.flag("mlp_bias", default=False)
    return replace(factor_options(config, num_layers), mlp_bias=mlp_bias)


FAMILY = Family(
    "granite", "GraniteForCausalLM", _hf_options, gguf_factor_options, gguf_interleaved=True
)
