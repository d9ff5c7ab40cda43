"""Gemma 3, text: Gemma 2 without caps on scores, with normed queries and keys.

Five of six layers have a sliding window and another rotary base. Source: "Gemma 3" (2503.19786),
section 2. Models from 4B on are published with a vision tower, and their files
leave out the defaults of `gemma3_text` in transformers. GGUF files have the pattern of layers and
the second rotary base only if they differ from the usual values.
"""

from dataclasses import replace

from ..rope_config import RopeConfig
from .config_reader import ConfigReader
from .family import Family, Options
from .gemma2 import (
    DEFAULT_WINDOW,
    HF_DEFAULTS,
    HF_NAMES,
    read_cap,
    read_scale,
    shared_gguf_options,
    shared_hf_options,
)
from .hugging_face import MAX_LAYERS
from .rope_options import MAX_POSITION, read_ropes_by_kind
from .windows import windows_by_pattern

_PERIOD = 6
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_LAYERS_OF_27B = 62
_HF_DEFAULTS = HF_DEFAULTS | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    windows = windows_by_pattern(config, num_layers, period=_PERIOD, default=DEFAULT_WINDOW)
    # the reference ignores it
    config.expect("attn_logit_softcapping", None)
    rope, local_rope = read_ropes_by_kind(config, _THETA, _LOCAL_THETA)
    return replace(
        shared_hf_options(config, windows),
        scores=read_scale(config),
        qk_norm="head",
        rope=rope,
        local_rope=local_rope,
        logit_cap=read_cap(config, "final_logit_softcapping", None),
    )


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    window = config.integer("attention.sliding_window", minimum=0, maximum=MAX_POSITION, default=0)
    key = "attention.sliding_window_pattern"
    period = config.integer(key, maximum=MAX_LAYERS, default=_PERIOD)
    windows = tuple((window or None) if (i + 1) % period else None for i in range(num_layers))
    theta = config.number("rope.freq_base_swa", above=1.0, default=_LOCAL_THETA)
    return replace(
        shared_gguf_options(config, windows, _LAYERS_OF_27B),
        qk_norm="head",
        local_rope=RopeConfig(theta),
        logit_cap=read_cap(config, "final_logit_softcapping", None),
    )


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _hf_options,
    _gguf_options,
    _HF_DEFAULTS,
    HF_NAMES,
    gguf_architecture="gemma3",
)
