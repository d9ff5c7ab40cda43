"""OLMoE: a mixture of many small experts; all query heads are normed as one, keys too.

Source: "OLMoE: Open Mixture-of-Experts Language Models" (2409.02060), section 4.1; options and
defaults as in transformers' `olmoe`.
"""

from ..moe.config import MoeConfig
from .config_reader import ConfigReader
from .expert_options import read_gguf_experts, read_routing
from .family import Family, Options
from .hugging_face import MAX_MLP


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.expect("clip_qkv", None)
    routing = read_routing(
        config,
        num_experts=64,
        num_chosen=8,
        is_normalized=config.flag("norm_topk_prob", default=False),
    )
    width = config.integer("intermediate_size", maximum=MAX_MLP)
    has_bias = config.flag("attention_bias", default=False)
    return _options(MoeConfig(routing, width, layers=(True,) * num_layers), has_bias)


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    return _options(read_gguf_experts(config, num_layers, is_normalized=False), has_bias=False)


def _options(moe: MoeConfig, has_bias: bool) -> Options:
    return Options(
        windows=(None,) * len(moe.layers),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        qk_norm_kind="projection",
        moe=moe,
    )


FAMILY = Family("olmoe", "OlmoeForCausalLM", _hf_options, _gguf_options)
