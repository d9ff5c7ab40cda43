"""Qwen1.5-MoE and Qwen2-MoE: the attention of Qwen2, and a gated shared expert.

Source: "Qwen2 Technical Report" (2407.10671), section 2.2.2. Options and defaults are those of
`qwen2_moe` in transformers: if windows are used, every second layer below `max_window_layers` has
one.
"""

from dataclasses import replace

from ..moe_config import MoeConfig
from .config_reader import ConfigReader
from .expert_options import read_experts, read_gguf_experts, sparse_layers
from .family import Family, Options
from .hugging_face import MAX_MLP
from .windows import windows_if_used


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    key = "moe_intermediate_size"
    moe = read_experts(config, num_experts=60, num_chosen=4, width_key=key, has_option=True)
    shared = config.integer("shared_expert_intermediate_size", maximum=MAX_MLP)
    return Options(
        windows=windows_if_used(config, num_layers, lambda i, first: i % 2 == 0 and i < first),
        qkv_bias=config.flag("qkv_bias", default=True),
        moe=_mixture(moe, shared),
        sparse=sparse_layers(config, num_layers),
    )


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    moe = read_gguf_experts(config, is_normalized=False, is_width_shared=True)
    dense = config.integer("feed_forward_length", maximum=MAX_MLP)
    key = "expert_shared_feed_forward_length"
    shared = config.integer(key, maximum=MAX_MLP, default=dense)
    return Options(moe=_mixture(moe, shared))


def _mixture(moe: MoeConfig, shared: int) -> MoeConfig:
    return replace(moe, shared_mlp=shared, has_shared_gate=True)


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _hf_options,
    _gguf_options,
    gguf_architecture="qwen2moe",
)
