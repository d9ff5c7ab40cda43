"""DeepSeek V2, V3 and R1: latent attention, routed and shared experts, long contexts by YaRN.

Sources: DeepSeek-V2 (2405.04434), DeepSeek-V3 (2412.19437), and transformers for the meaning of
config.json. As there, norms of latents have a fixed epsilon, independent of the published one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..latent_config import LatentAttention
from ..layer_config import Scores
from ..moe_config import ExpertGroups, MoeConfig, Routing
from ..rope_config import RopeConfig, YarnScaling
from .config_reader import ConfigReader
from .expert_options import read_gguf_experts, sparse_after_dense
from .family import Family, Options
from .gguf import EPSILONS, read_rope
from .hugging_face import (
    MAX_EMBED,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_MLP,
    SHARED_EXPERTS,
)
from .latent_sources import LatentNames
from .rope_options import MAX_POSITION, read_kind, rope_table, yarn_mscale

_ATTENTION = "model.layers.{i}.self_attn"
_HF_LATENT_NAMES = LatentNames(
    query=f"{_ATTENTION}.q_proj",
    query_down=f"{_ATTENTION}.q_a_proj",
    query_norm=f"{_ATTENTION}.q_a_layernorm",
    query_up=f"{_ATTENTION}.q_b_proj",
    latent_down=f"{_ATTENTION}.kv_a_proj_with_mqa",
    latent_norm=f"{_ATTENTION}.kv_a_layernorm",
    key_up=f"{_ATTENTION}.kv_b_proj",
    value_up=f"{_ATTENTION}.kv_b_proj",
    output=f"{_ATTENTION}.o_proj",
)

_HF_NAMES = {"latent": _HF_LATENT_NAMES, **SHARED_EXPERTS}
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
TRAINING_KEYS = ("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits")


ReadRouting = Callable[[ConfigReader], Routing]


def _hf_options(config: ConfigReader, num_layers: int, read_routing: ReadRouting) -> Options:
    num_heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    config.expect("num_key_value_heads", num_heads)
    config.expect("attention_bias", False)
    config.expect("moe_layer_freq", 1)
    config.ignore(TRAINING_KEYS)
    latent = _read_latent(config)
    return Options(
        latent=latent,
        scores=Scores(latent.head_dim**-0.5 * _sharpness(rope_table(config))),
        moe=read_mixture(config, read_routing(config)),
        sparse=sparse_after_dense(config, "first_k_dense_replace", num_layers),
    )


def read_mixture(config: ConfigReader, routing: Routing) -> MoeConfig:
    """Read the sizes of routed and shared experts."""
    width = config.integer("moe_intermediate_size", maximum=MAX_MLP)
    shared = config.integer("n_shared_experts", minimum=0, maximum=MAX_EXPERTS, default=0)
    return MoeConfig(routing, width, shared * width)


def _read_v2_routing(config: ConfigReader) -> Routing:
    """Read the routing of V2: softmax weights, and groups ranked by their best score."""
    config.expect("scoring_func", "softmax")
    # transformers never normalizes, and the published code does not scale normalized weights
    config.expect("norm_topk_prob", False)
    method = config.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", "greedy or group_limited_greedy")
    if method == "greedy":
        config.ignore(("n_group", "topk_group"))
    groups = None if method == "greedy" else _read_groups(config, best=1)
    return replace(read_choices(config, groups), is_normalized=False)


def read_v3_routing(config: ConfigReader, *, has_groups: bool = True) -> Routing:
    """Read the routing of V3: sigmoid scores and a choice bias.

    A group is ranked by the sum of its two best scores.
    """
    groups = _read_groups(config, best=2) if has_groups else None
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    return replace(
        read_choices(config, groups),
        scoring="sigmoid",
        is_normalized=config.flag("norm_topk_prob"),
        has_choice_bias=True,
    )


def read_choices(config: ConfigReader, groups: ExpertGroups | None) -> Routing:
    num_experts = config.integer("n_routed_experts", maximum=MAX_EXPERTS)
    for second_name in ("num_experts", "num_local_experts"):
        config.expect_equal(second_name, "n_routed_experts")
    max_chosen = num_experts if groups is None else num_experts // groups.count * groups.chosen
    return Routing(
        num_experts,
        config.integer("num_experts_per_tok", maximum=max_chosen),
        scale=config.number("routed_scaling_factor", above=0.0),
        groups=groups,
    )


def _read_groups(config: ConfigReader, best: int) -> ExpertGroups | None:
    count = config.integer("n_group", maximum=MAX_EXPERTS)
    num_experts = config.integer("n_routed_experts", maximum=MAX_EXPERTS)
    if num_experts % count or (count > 1 and num_experts // count < best):
        raise config.error("n_group", f"a divisor of n_routed_experts with {best} experts a group")
    chosen = config.integer("topk_group", maximum=count)
    return ExpertGroups(count, chosen, best) if count > 1 else None


def unused_tensors(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Prefixes of the layers for multi-token prediction, after the last one (DeepSeek-V3, 2.2)."""
    key = "num_nextn_predict_layers"
    count = config.integer(key, minimum=0, maximum=MAX_LAYERS, default=0)
    config.expect_equal("num_mtp_layers", key)
    return tuple(f"model.layers.{num_layers + i}." for i in range(count))


def _read_latent(config: ConfigReader) -> LatentAttention:
    query_rank = None
    if not config.is_null("q_lora_rank"):
        query_rank = config.integer("q_lora_rank", maximum=MAX_EMBED)
    latent = LatentAttention(
        rank=config.integer("kv_lora_rank", maximum=MAX_EMBED),
        plain_dim=config.integer("qk_nope_head_dim", maximum=MAX_HEAD_DIM),
        rope_dim=config.integer("qk_rope_head_dim", maximum=MAX_HEAD_DIM),
        value_dim=config.integer("v_head_dim", maximum=MAX_HEAD_DIM),
        query_rank=query_rank,
    )
    if latent.rope_dim % 2:
        raise config.error("qk_rope_head_dim", "an even number, as rotary embedding rotates pairs")
    config.ignore(("q_lora_rank",))
    # derived keys that transformers writes
    config.expect("qk_head_dim", latent.head_dim)
    config.expect("head_dim", latent.rope_dim)
    return latent


def _sharpness(rope: ConfigReader) -> float:
    """The YaRN factor on scores, which scales plain features of a head like the rotated ones.

    Source: transformers, `yarn_apply_mscale` of `modeling_deepseek_v3.py`.
    """
    if read_kind(rope) != "yarn" or not rope.has("mscale_all_dim"):
        return 1.0
    factor = rope.number("factor", above=0.0)
    return yarn_mscale(factor, rope.number("mscale_all_dim", above=0.0)) ** 2


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    """Read the options from GGUF metadata: the architecture deepseek2 of llama.cpp.

    In newer files, keys that end in `_mla` have the sizes of published heads, and the usual keys
    have those of absorbed attention: one head, with the whole cache entry as key. Older files have
    published sizes under the usual keys. A file has one number for both scales of YaRN. Their ratio
    is 1, so cosines and sines are not scaled.
    """
    latent = _read_gguf_latent(config)
    rope = read_rope(config, config.integer("context_length", maximum=MAX_POSITION))
    scale = latent.head_dim**-0.5
    if isinstance(rope.scaling, YarnScaling):
        # the file has a tenth of the published `mscale_all_dim`
        weight = 10 * config.number(_LOG_MULTIPLIER, above=0.0)
        scale *= yarn_mscale(rope.scaling.factor, weight) ** 2
        rope = RopeConfig(rope.theta, replace(rope.scaling, attention_factor=1.0))
    return Options(
        latent=latent,
        rope=rope,
        scores=Scores(scale),
        moe=_read_gguf_moe(config),
        sparse=sparse_after_dense(config, "leading_dense_block_count", num_layers),
    )


def _read_gguf_latent(config: ConfigReader) -> LatentAttention:
    rank = config.integer("attention.kv_lora_rank", maximum=MAX_EMBED)
    rope_dim = config.integer("rope.dimension_count", maximum=MAX_HEAD_DIM)
    num_heads = config.integer("attention.head_count", maximum=MAX_HEADS)
    published = ""
    if config.has("attention.key_length_mla"):
        published = "_mla"
        config.expect("attention.key_length", rank + rope_dim)
        config.expect("attention.value_length", rank)
        config.expect("attention.head_count_kv", 1)
    else:
        config.expect("attention.head_count_kv", num_heads)
    key = f"attention.key_length{published}"
    head_dim = config.integer(key, maximum=MAX_HEAD_DIM)
    if head_dim <= rope_dim or rope_dim % 2:
        raise config.error(key, f"more than rope.dimension_count ({rope_dim}), which is even")
    query_rank = None
    if config.has("attention.q_lora_rank"):
        query_rank = config.integer("attention.q_lora_rank", maximum=MAX_EMBED)
    return LatentAttention(
        rank,
        head_dim - rope_dim,
        rope_dim,
        config.integer(f"attention.value_length{published}", maximum=MAX_HEAD_DIM),
        query_rank,
        # llama.cpp has one epsilon for all norms
        norm_epsilon=config.number(EPSILONS["rms"], above=0.0, maximum=1.0),
    )


def _read_gguf_moe(config: ConfigReader) -> MoeConfig:
    num_shared = config.integer("expert_shared_count", maximum=MAX_EXPERTS)
    moe = read_gguf_experts(config, is_normalized=False)
    groups, is_v3 = None, moe.routing.scoring == "sigmoid"
    if not is_v3:
        # llama.cpp ranks groups differently from DeepSeek-V2
        config.expect("expert_group_count", 1)
        config.expect("expert_group_used_count", 1)
    elif config.has("expert_group_count"):
        groups = _read_gguf_groups(config, moe.routing.num_experts)
    return replace(
        moe,
        routing=replace(moe.routing, groups=groups, has_choice_bias=is_v3),
        shared_mlp=num_shared * moe.mlp,
    )


def _read_gguf_groups(config: ConfigReader, num_experts: int) -> ExpertGroups | None:
    count = config.integer("expert_group_count", maximum=num_experts)
    if num_experts % count:
        raise config.error("expert_group_count", f"a divisor of expert_count ({num_experts})")
    chosen = config.integer("expert_group_used_count", maximum=count)
    return ExpertGroups(count, chosen, best=2) if count > 1 else None


V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    partial(_hf_options, read_routing=_read_v2_routing),
    _gguf_options,
    hf_names=_HF_NAMES | {"is_interleaved": True},
    gguf_architecture="deepseek2",
    gguf_interleaved=True,
)
"""DeepSeek V2: latent attention, routed and shared experts, long contexts by YaRN."""
V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    partial(_hf_options, read_routing=read_v3_routing),
    gguf_architecture="deepseek2",
    hf_names=_HF_NAMES,
    hf_interleaved_key="rope_interleave",
    hf_unused_tensors=unused_tensors,
)
"""DeepSeek V3 and R1: V2 with experts chosen by a sigmoid and a bias."""
KIMI_K2 = replace(V3, name="kimi_k2", gguf_architecture=None)
"""Kimi K2: DeepSeek V3 under another name."""
