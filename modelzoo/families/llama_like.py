"""Llama blocks under other names, from Seed-OSS to MiniCPM.

Options and names are those of transformers, or of the code that was published with the weights.
"""

import math

from ..config import Multipliers
from .config_reader import ConfigReader
from .family import Family, Options
from .hugging_face import MAX_EMBED, read_epsilon
from .partial_rope import read_partial_rope
from .rope_options import require_rope_table
from .windows import windows_except_every, windows_if_used

_LAYER = "model.layers.{i}"
_CWM_PERIOD, _CWM_WINDOW = 4, 8192


def _seed_oss_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    config.ignore(("residual_dropout",))  # about training
    return Options(
        qkv_bias=config.flag("attention_bias", default=True),
        output_bias=config.flag("attention_out_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def _helium_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    return Options(
        qkv_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def _cwm_options(config: ConfigReader, num_layers: int) -> Options:
    require_rope_table(config)
    windows = windows_except_every(_CWM_PERIOD, config, num_layers, _CWM_WINDOW, is_first=True)
    return Options(windows=windows)


def _stablelm_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    for key in ("qk_layernorm", "use_parallel_residual"):
        config.expect(key, False)
    config.ignore(("hidden_dropout",))  # about training
    return Options(
        rope=read_partial_rope(config, 0.25),
        qkv_bias=config.flag("use_qkv_bias", default=False),
        norm="layer",
        norm_bias=True,
    )


def _orion_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    epsilon = read_epsilon(config, "rms_norm_eps")
    options = Options(norm="layer", norm_bias=True, norm_epsilon=epsilon)
    return options.with_biases(config)


def _internlm2_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    has_bias = config.flag("bias", default=True)
    return Options(qkv_bias=has_bias, output_bias=has_bias)


def _mimo_options(config: ConfigReader, num_layers: int) -> Options:
    config.ignore(("num_nextn_predict_layers",))  # their tensors are not read
    has_bias = config.flag("attention_bias", default=True)
    return Options(windows=windows_if_used(config, num_layers), qkv_bias=has_bias)


def _minicpm_options(config: ConfigReader, num_layers: int) -> Options:
    for key, value in {"num_experts": 0, "sparse_config": None}.items():
        config.expect(key, value)
    embed = config.integer("hidden_size", maximum=MAX_EMBED)
    base = config.number("dim_model_base", above=0.0, default=1.0)
    multipliers = Multipliers(
        embedding=config.number("scale_emb", above=0.0, default=1.0),
        residual=config.number("scale_depth", above=0.0, default=1.0) / math.sqrt(num_layers),
        logits=base / embed,
    )
    return Options(multipliers=multipliers).with_biases(config)


SEED_OSS = Family(
    "seed_oss", "SeedOssForCausalLM", _seed_oss_options, hf_defaults={"head_dim": 128}
)
"""Seed-OSS: Llama with biases on queries, keys and values."""
HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    _helium_options,
    hf_defaults={"head_dim": 128},
    hf_names={"is_interleaved": True},
    hf_theta=100_000.0,
)
"""Helium: Llama with adjacent rotated pairs."""
CWM = Family(
    "cwm",
    "CwmForCausalLM",
    _cwm_options,
    hf_defaults={"head_dim": 128},
    hf_theta=1e6,
)
"""CWM: Llama with windows, except in the first of four layers."""
STABLE_LM = Family("stablelm", "StableLmForCausalLM", _stablelm_options)
"""StableLM: Llama with layer norms and their biases, where a part of each head rotates."""
ORION = Family("orion", "OrionForCausalLM", _orion_options)
"""Orion: Llama with layer norms and their biases."""
INTERNLM_2 = Family(
    "internlm2",
    "InternLM2ForCausalLM",
    _internlm2_options,
    hf_names={
        "embedding": "model.tok_embeddings",
        "head": "output",
        "attention_norm": f"{_LAYER}.attention_norm",
        **dict.fromkeys(("query", "key", "value"), f"{_LAYER}.attention.wqkv"),
        "output": f"{_LAYER}.attention.wo",
        "mlp_norm": f"{_LAYER}.ffn_norm",
        "gate": f"{_LAYER}.feed_forward.w1",
        "up": f"{_LAYER}.feed_forward.w3",
        "down": f"{_LAYER}.feed_forward.w2",
        "is_grouped": True,
    },
)
"""InternLM 2 and 2.5: Llama with queries, keys and values in one tensor, by key/value head."""
MIMO = Family(
    "mimo",
    "MiMoForCausalLM",
    _mimo_options,
    hf_unused_tensors=lambda config, num_layers: ("model.mtp_layers.",),
)
"""MiMo, dense: the blocks of Qwen2."""
MINI_CPM = Family(
    "minicpm", "MiniCPMForCausalLM", _minicpm_options, hf_defaults={"tie_word_embeddings": True}
)
"""MiniCPM 1 and 2, dense: Llama with the factors of Granite."""
