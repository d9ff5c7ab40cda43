"""DeepSeek V2, V3 and R1: latent attention, long contexts by YaRN.

Sources: DeepSeek-V2 (2405.04434), DeepSeek-V3 (2412.19437), and transformers for what config.json
means: there norms of latents have an epsilon of their own, whatever is published for the others.
"""

from ..config import LatentAttention, Scores
from .config_reader import ConfigReader
from .family import Family, Options
from .hugging_face import MAX_EMBED, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from .latent_sources import LatentNames
from .rope_options import read_kind, rope_table, yarn_mscale

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

_OF_EXPERTS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    "moe_layer_freq", "n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob",
    "routed_scaling_factor", "output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size",
    "num_nextn_predict_layers",
)  # fmt: skip


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    num_heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    config.expect("num_key_value_heads", num_heads)
    config.expect("attention_bias", False)
    latent = _read_latent(config)
    _expect_dense(config, num_layers)
    return Options(
        windows=(None,) * num_layers,
        latent=latent,
        scores=Scores(latent.head_dim**-0.5 * _sharpness(rope_table(config))),
    )


def _expect_dense(config: ConfigReader, num_layers: int) -> None:
    """Options of experts mean nothing to a model without any."""
    dense = config.integer("first_k_dense_replace", minimum=0, maximum=MAX_LAYERS)
    if dense < num_layers:
        raise config.error(
            "first_k_dense_replace", f"all {num_layers} layers, as experts are not implemented"
        )
    config.ignore(_OF_EXPERTS)


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
        raise config.error("qk_rope_head_dim", "an even number, as rotary embedding turns pairs")
    config.ignore(("q_lora_rank",))
    # what transformers writes beside them
    config.expect("qk_head_dim", latent.head_dim)
    config.expect("head_dim", latent.rope_dim)
    return latent


def _sharpness(rope: ConfigReader) -> float:
    """Factor on scores, by which YaRN sharpens plain entries of a head as it does rotated ones.

    Source: transformers, `yarn_apply_mscale` of `modeling_deepseek_v3.py`.
    """
    if read_kind(rope) != "yarn" or not rope.has("mscale_all_dim"):
        return 1.0
    factor = rope.number("factor", above=0.0)
    return yarn_mscale(factor, rope.number("mscale_all_dim", above=0.0)) ** 2


V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _hf_options,
    hf_names={"latent": _HF_LATENT_NAMES, "is_interleaved": True},
)
V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _hf_options,
    hf_names={"latent": _HF_LATENT_NAMES},
    hf_interleaved_key="rope_interleave",
)
