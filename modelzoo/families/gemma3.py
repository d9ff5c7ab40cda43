"""Gemma 3, text alone: Gemma 2 without caps on scores, with normed queries and keys.

Five layers of six slide a window, and they rotate by another base. Source: "Gemma 3" (2503.19786),
section 2. A file that holds a vision tower too has another architecture and is refused. GGUF files
give neither the pattern of layers nor the second base, unless they differ from the usual ones.
"""

from dataclasses import replace

from ..config import RopeConfig
from .config_reader import ConfigReader
from .family import Family, Options
from .gemma2 import (
    DEFAULT_WINDOW,
    HF_DEFAULTS,
    HF_NAMES,
    read_cap,
    shared_gguf_options,
    shared_hf_options,
)
from .hugging_face import MAX_LAYERS, all_but_each
from .rope_options import MAX_POSITION, read_ropes_by_kind

_PERIOD = 6
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_LAYERS_OF_27B = 62


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    period = config.integer("sliding_window_pattern", maximum=MAX_LAYERS, default=_PERIOD)
    if config.has("layer_types"):
        # beside them, how they came about
        config.ignore(("_sliding_window_pattern",))
    windows = all_but_each(period, config, num_layers, DEFAULT_WINDOW)
    # the reference takes no notice of it
    config.expect("attn_logit_softcapping", None)
    max_position = config.integer("max_position_embeddings", maximum=MAX_POSITION)
    rope, local_rope = read_ropes_by_kind(config, max_position, _THETA, _LOCAL_THETA)
    return replace(
        shared_hf_options(config, windows),
        qk_norm=True,
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
        qk_norm=True,
        local_rope=RopeConfig(theta),
        logit_cap=read_cap(config, "final_logit_softcapping", None),
    )


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _hf_options,
    _gguf_options,
    HF_DEFAULTS,
    HF_NAMES,
    gguf_architecture="gemma3",
)
