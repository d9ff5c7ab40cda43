"""OLMoE: a mixture of many small experts; joint norms of all query or key heads.

Source: "OLMoE: Open Mixture-of-Experts Language Models" (2409.02060), section 4.1. Options and
defaults are those of `olmoe` in transformers.
"""

from ..moe_config import MoeConfig
from .config_reader import ConfigReader
from .expert_options import read_experts, read_gguf_experts
from .family import Family, Options


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.expect("clip_qkv", None)
    moe = read_experts(config, num_experts=64, num_chosen=8, has_option=True)
    return _options(moe).with_biases(config)


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    return _options(read_gguf_experts(config, is_normalized=False))


def _options(moe: MoeConfig) -> Options:
    return Options(qk_norm="projection", moe=moe)


FAMILY = Family("olmoe", "OlmoeForCausalLM", _hf_options, _gguf_options)
