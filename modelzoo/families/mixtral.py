"""Mixtral: Mistral blocks with a mixture of experts in place of every MLP (2401.04088).

Options and defaults are those of `mixtral` in transformers. GGUF files of Mixtral models have the
architecture `llama`.
"""

from dataclasses import replace

from .config_reader import ConfigReader
from .expert_options import read_experts
from .family import Family, Options
from .hugging_face import FUSED_EXPERTS, SPLIT_EXPERTS
from .windows import read_window

_BLOCK = "model.layers.{i}.block_sparse_moe"
PUBLISHED = replace(
    SPLIT_EXPERTS,
    router=f"{_BLOCK}.gate.weight",
    gate=f"{_BLOCK}.experts.{{e}}.w1.weight",
    up=f"{_BLOCK}.experts.{{e}}.w3.weight",
    down=f"{_BLOCK}.experts.{{e}}.w2.weight",
)


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    config.ignore(("router_jitter_noise",))  # about training
    moe = read_experts(config, num_experts=8, num_chosen=2)
    return Options(windows=(read_window(config),) * num_layers, moe=moe)


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    _hf_options,
    hf_theta=1e6,
    hf_experts=(PUBLISHED, FUSED_EXPERTS),
    gguf_architecture="llama",
)
