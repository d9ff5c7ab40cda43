"""Qwen3-MoE: the attention of Qwen3, with a mixture of experts in place of most MLPs.

Source: "Qwen3 Technical Report" (2505.09388), section 2. Options and defaults are those of
`qwen3_moe` in transformers, where either all layers have a window or none.
"""

from .config_reader import ConfigReader
from .expert_options import read_experts, read_gguf_experts, sparse_layers
from .family import Family, Options
from .windows import windows_if_used


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.expect("use_qk_norm", True)
    key = "moe_intermediate_size"
    moe = read_experts(config, num_experts=128, num_chosen=8, width_key=key, has_option=True)
    layers = sparse_layers(config, num_layers)
    windows = windows_if_used(config, num_layers, lambda i, first: True)
    return Options(windows=windows, qk_norm="head", moe=moe, sparse=layers).with_biases(config)


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    moe = read_gguf_experts(config, is_width_shared=True)
    return Options(qk_norm="head", moe=moe)


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _hf_options,
    _gguf_options,
    gguf_architecture="qwen3moe",
)
