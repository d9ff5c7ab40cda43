"""Gemma 2: capped scores and logits, each second layer with a window, norms before and after.

Source: "Gemma 2" (2408.00118), section 2. Published norm scales are offsets from one; GGUF files
hold the whole scale. GGUF has no key for the factor on scores: as llama.cpp does, the model of 46
layers is taken to be the one whose factor does not follow from the head size.
"""

import math

from ..config import Multipliers, Scores
from .config_reader import ConfigReader
from .family import Family, HFDefaults, Options
from .hugging_face import MAX_EMBED, MAX_HEADS, all_but_each
from .rope_options import MAX_POSITION

HF_DEFAULTS = HFDefaults(head_dim=256, tie_embeddings=True)
HF_NAMES = {"mlp_norm": "model.layers.{i}.pre_feedforward_layernorm"}
_DEFAULT_WINDOW = 4096
_LAYERS_OF_27B = 46


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    def cap(key: str, default: float) -> float | None:
        is_off = config.is_null(key)
        value = config.number(key, above=0.0, default=default)
        return None if is_off else value

    embed = config.integer("hidden_size", maximum=MAX_EMBED)
    if not config.has("num_key_value_heads"):
        # the reference would assume 4
        raise config.error("num_key_value_heads", "a number of heads")
    if config.has("use_bidirectional_attention"):
        config.expect("use_bidirectional_attention", False)
    has_bias = config.flag("attention_bias", default=False)
    scale = config.number("query_pre_attn_scalar", above=0.0, default=256) ** -0.5
    return Options(
        windows=all_but_each(2, config, num_layers, _DEFAULT_WINDOW),
        qkv_bias=has_bias,
        output_bias=has_bias,
        norm_placement="both",
        norm_offset=1.0,
        activation="gelu_tanh",
        scores=Scores(scale, cap("attn_logit_softcapping", 50.0)),
        multipliers=Multipliers(embedding=math.sqrt(embed)),
        logit_cap=cap("final_logit_softcapping", 30.0),
    )


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    window = config.integer(
        "attention.sliding_window", maximum=MAX_POSITION, default=_DEFAULT_WINDOW
    )
    embed = config.integer("embedding_length", maximum=MAX_EMBED)
    scale = None
    if num_layers == _LAYERS_OF_27B:
        scale = (embed / config.integer("attention.head_count", maximum=MAX_HEADS)) ** -0.5
    cap = config.number("attn_logit_softcapping", above=0.0, default=50.0)
    return Options(
        windows=tuple(window if i % 2 == 0 else None for i in range(num_layers)),
        norm_placement="both",
        activation="gelu_tanh",
        scores=Scores(scale, cap),
        multipliers=Multipliers(embedding=math.sqrt(embed)),
        logit_cap=config.number("final_logit_softcapping", above=0.0, default=30.0),
    )


FAMILY = Family("gemma2", "Gemma2ForCausalLM", _hf_options, _gguf_options, HF_DEFAULTS, HF_NAMES)
