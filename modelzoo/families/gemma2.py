"""Gemma 2: capped scores and logits, a window in every second layer, norms before and after.

Source: "Gemma 2" (2408.00118), section 2. Published norm scales are offsets from 1; GGUF files have
the full scale. GGUF has no key for the factor on scores. As in llama.cpp, a model with 46 layers is
assumed to be the 27B model, whose factor is not derived from the head size.
"""

import math
from dataclasses import replace

from ..config import Multipliers
from ..layer_config import Scores
from .config_reader import ConfigReader
from .family import Family, Options
from .hugging_face import MAX_EMBED, MAX_HEADS
from .rope_options import MAX_POSITION
from .windows import windows_except_every

HF_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
HF_NAMES = {"mlp_norm": "model.layers.{i}.pre_feedforward_layernorm"}
DEFAULT_WINDOW = 4096
_LAYERS_OF_27B = 46


def shared_hf_options(config: ConfigReader, windows: tuple[int | None, ...]) -> Options:
    """Read the options of config.json that all Gemma models have in common."""
    if not config.has("num_key_value_heads"):
        # the reference would assume one of its own
        raise config.error("num_key_value_heads", "a number of heads")
    if config.has("use_bidirectional_attention"):
        config.expect("use_bidirectional_attention", False)
    embed = config.integer("hidden_size", maximum=MAX_EMBED)
    return Options(
        windows=windows,
        norm_placement="both",
        norm_offset=1.0,
        activation="gelu_tanh",
        multipliers=Multipliers(embedding=math.sqrt(embed)),
    ).with_biases(config)


def read_scale(config: ConfigReader) -> Scores:
    """The factor on scores of Gemma 2 and later."""
    return Scores(config.number("query_pre_attn_scalar", above=0.0, default=256) ** -0.5)


def shared_gguf_options(
    config: ConfigReader, windows: tuple[int | None, ...], layers_of_27b: int
) -> Options:
    """Read the options of GGUF metadata that Gemma 2 and 3 have in common."""
    embed = config.integer("embedding_length", maximum=MAX_EMBED)
    scale = None
    if len(windows) == layers_of_27b:
        scale = (embed / config.integer("attention.head_count", maximum=MAX_HEADS)) ** -0.5
    return Options(
        windows=windows,
        norm_placement="both",
        activation="gelu_tanh",
        scores=Scores(scale),
        multipliers=Multipliers(embedding=math.sqrt(embed)),
    )


def read_cap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """Read a soft cap; null means no cap."""
    if config.is_null(key) or (default is None and not config.has(key)):
        config.ignore((key,))
        return None
    return config.number(key, above=0.0, default=default)


def _with_caps(options: Options, config: ConfigReader) -> Options:
    return replace(
        options,
        scores=replace(options.scores, cap=read_cap(config, "attn_logit_softcapping", 50.0)),
        logit_cap=read_cap(config, "final_logit_softcapping", 30.0),
    )


def hf_options(config: ConfigReader, num_layers: int) -> Options:
    """Read the options of config.json."""
    windows = windows_except_every(2, config, num_layers, DEFAULT_WINDOW)
    options = replace(shared_hf_options(config, windows), scores=read_scale(config))
    return _with_caps(options, config)


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    window = config.integer(
        "attention.sliding_window", maximum=MAX_POSITION, default=DEFAULT_WINDOW
    )
    windows = tuple(window if i % 2 == 0 else None for i in range(num_layers))
    return _with_caps(shared_gguf_options(config, windows, _LAYERS_OF_27B), config)


FAMILY = Family("gemma2", "Gemma2ForCausalLM", hf_options, _gguf_options, HF_DEFAULTS, HF_NAMES)
