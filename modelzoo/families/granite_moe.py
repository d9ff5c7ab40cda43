"""Granite 3, sparse: the factors of Granite, and experts weighted by a softmax of the chosen ones.

Names and meanings are those of `granitemoe` in transformers and, for GGUF, of llama.cpp.
"""

from dataclasses import replace

from .config_reader import ConfigReader
from .expert_options import read_experts, read_gguf_experts
from .expert_sources import ExpertNames, fused_experts
from .family import Family, Options
from .granite import factor_options, gguf_factor_options

_BLOCK = "model.layers.{i}.block_sparse_moe"
_PUBLISHED = ExpertNames(
    router=f"{_BLOCK}.router.layer.weight",
    gate=f"{_BLOCK}.input_linear.weight",
    up=f"{_BLOCK}.input_linear.weight",
    down=f"{_BLOCK}.output_linear.weight",
)


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    moe = read_experts(config, num_experts=8, num_chosen=2, scoring="softmax_of_chosen")
    return replace(factor_options(config, num_layers), moe=moe)


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    moe = read_gguf_experts(config, scoring="softmax_of_chosen")
    return replace(gguf_factor_options(config, num_layers), moe=moe)


FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _hf_options,
    _gguf_options,
    hf_experts=(_PUBLISHED, fused_experts(_BLOCK)),
    gguf_interleaved=True,
)
