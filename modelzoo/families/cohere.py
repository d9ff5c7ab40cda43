"""Command-R: attention and MLP in parallel after one layer norm, scaled logits, optional QK norm.

Rotated pairs are adjacent rows in both published formats. Options and names are those of
transformers and, for GGUF, of llama.cpp.
"""

from ..config import Multipliers
from .config_reader import ConfigReader
from .family import Family, Options

_LOGIT_SCALE = 0.0625
_LAYERS_OF_PLUS = 64


def _options(logit_scale: float, *, qk_norm: bool) -> Options:
    return Options(
        norm="layer",
        is_parallel=True,
        qk_norm="heads" if qk_norm else None,
        multipliers=Multipliers(logits=logit_scale),
    )


def hf_options(config: ConfigReader, num_layers: int) -> Options:
    """Read the options of config.json that both generations have in common."""
    if config.is_null("logit_scale"):
        raise config.error("logit_scale", "a number")
    scale = config.number("logit_scale", above=0.0, default=_LOGIT_SCALE)
    del num_layers
    options = _options(scale, qk_norm=config.flag("use_qk_norm", default=False))
    return options.with_biases(config)


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    scale = config.number("logit_scale", above=0.0)
    # GGUF has no key for the norms: llama.cpp looks for them in models of this depth
    return _options(scale, qk_norm=num_layers >= _LAYERS_OF_PLUS)


FAMILY = Family(
    "cohere",
    "CohereForCausalLM",
    hf_options,
    _gguf_options,
    {"tie_word_embeddings": True},
    hf_names={"is_interleaved": True},
    hf_theta=500_000.0,
    gguf_architecture="command-r",
    gguf_interleaved=True,
)
