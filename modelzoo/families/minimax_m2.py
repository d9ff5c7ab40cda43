"""MiniMax-M2: half of each head rotates, joint norms of heads, experts as in DeepSeek V3.

Options and names are those of `minimax_m2` in transformers.
"""

from dataclasses import replace

from .config_reader import ConfigReader
from .expert_options import read_experts
from .family import Family, Options
from .hugging_face import FUSED_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS
from .mixtral import PUBLISHED
from .partial_rope import read_partial_rope

_THETA = 5_000_000.0
_EXPERTS = replace(
    PUBLISHED, choice_bias="model.layers.{i}.block_sparse_moe.e_score_correction_bias"
)
_FUSED = replace(FUSED_EXPERTS, choice_bias="model.layers.{i}.mlp.e_score_correction_bias")
_ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    for key, value in _ONLY.items():
        config.expect(key, value)
    config.expect("attn_type_list", [1] * num_layers)
    config.ignore(("router_jitter_noise",))  # about training
    head_dim = config.integer("head_dim", maximum=MAX_HEAD_DIM)
    rotated = config.integer("rotary_dim", maximum=head_dim, default=head_dim)
    rope = read_partial_rope(config, rotated / head_dim, _THETA)
    moe = read_experts(config, num_experts=256, num_chosen=8, scoring="sigmoid")
    moe = replace(moe, routing=replace(moe.routing, has_choice_bias=True))
    return Options(rope=rope, qk_norm="projection", moe=moe)


def _unused_tensors(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    count = config.integer("num_mtp_modules", minimum=0, maximum=MAX_LAYERS, default=0)
    config.ignore(("mtp_transformer_layers", "use_mtp"))
    return tuple(f"model.layers.{num_layers + i}." for i in range(count))


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _hf_options,
    hf_defaults={"head_dim": 128},
    hf_experts=(_EXPERTS, _FUSED),
    hf_unused_tensors=_unused_tensors,
)
