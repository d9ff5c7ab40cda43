"""Mixtral: Mistral's blocks with a mixture of experts in place of every MLP (2401.04088)."""

from dataclasses import replace

from ..moe.config import MoeConfig, Routing
from .config_reader import ConfigReader
from .family import Family, Options
from .hugging_face import FUSED_EXPERTS, MAX_EXPERTS, MAX_MLP, SPLIT_EXPERTS
from .rope_options import MAX_POSITION

_BLOCK = "model.layers.{i}.block_sparse_moe"
PUBLISHED = replace(
    SPLIT_EXPERTS,
    router=f"{_BLOCK}.gate.weight",
    gate=f"{_BLOCK}.experts.{{e}}.w1.weight",
    up=f"{_BLOCK}.experts.{{e}}.w3.weight",
    down=f"{_BLOCK}.experts.{{e}}.w2.weight",
)


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    window = None
    if config.has("sliding_window"):
        window = config.integer("sliding_window", maximum=MAX_POSITION)
    # of training
    config.ignore(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"))
    routing = Routing(
        config.integer("num_local_experts", maximum=MAX_EXPERTS, default=8),
        config.integer("num_experts_per_tok", maximum=MAX_EXPERTS, default=2),
    )
    width = config.integer("intermediate_size", maximum=MAX_MLP)
    moe = MoeConfig(routing, width, layers=(True,) * num_layers)
    return Options(windows=(window,) * num_layers, moe=moe)


FAMILY = Family("mixtral", "MixtralForCausalLM", _hf_options, hf_experts=(PUBLISHED, FUSED_EXPERTS))
