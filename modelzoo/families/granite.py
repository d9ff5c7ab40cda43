"""Granite 3, dense: Llama's blocks with constant factors on embeddings, scores, residuals, logits.

Source: maximal update parametrisation as "Power Scheduler" (2408.13359) uses it; names and
meanings as in transformers and, for GGUF, llama.cpp.
"""

from dataclasses import replace

from ..config import Multipliers, Scores
from .config_reader import ConfigReader
from .family import Family, Options


def factor_options(config: ConfigReader, num_layers: int) -> Options:
    """Of config.json, as dense and sparse models have them."""

    def factor(key: str) -> float:
        return config.number(key, above=0.0, default=1.0)

    has_bias = config.flag("attention_bias", default=False)
    return Options(
        windows=(None,) * num_layers,
        qkv_bias=has_bias,
        output_bias=has_bias,
        scores=Scores(scale=factor("attention_multiplier")),
        multipliers=Multipliers(
            embedding=factor("embedding_multiplier"),
            residual=factor("residual_multiplier"),
            logits=1.0 / factor("logits_scaling"),
        ),
    )


def gguf_factor_options(config: ConfigReader, num_layers: int) -> Options:
    """Of GGUF metadata, as dense and sparse models have them."""

    def factor(key: str) -> float:
        return config.number(key, above=0.0, default=1.0)

    has_scale = config.has("attention.scale")
    return Options(
        windows=(None,) * num_layers,
        scores=Scores(scale=factor("attention.scale")) if has_scale else Scores(),
        multipliers=Multipliers(
            embedding=factor("embedding_scale"),
            residual=factor("residual_scale"),
            # called a scale, and divided by
            logits=1.0 / factor("logit_scale"),
        ),
    )


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    mlp_bias = config.flag("mlp_bias", default=False)
    return replace(factor_options(config, num_layers), mlp_bias=mlp_bias)


FAMILY = Family(
    "granite", "GraniteForCausalLM", _hf_options, gguf_factor_options, gguf_interleaved=True
)
