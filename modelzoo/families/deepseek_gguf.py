"""DeepSeek V2, V3 and R1 as GGUF metadata: the architecture deepseek2 of llama.cpp.

In newer files, keys that end in `_mla` have the sizes of published heads, and the usual keys have
those of absorbed attention: one head, with the whole cache entry as key. Older files have published
sizes under the usual keys. A file has one number for both scales of YaRN. Their ratio is 1, so
cosines and sines are not scaled.
"""

from dataclasses import replace

from ..latent_config import LatentAttention
from ..layer_config import Scores
from ..moe_config import ExpertGroups, MoeConfig
from ..rope_config import RopeConfig, YarnScaling
from .config_reader import ConfigReader
from .expert_options import read_gguf_experts, sparse_after_dense
from .family import Options
from .gguf import EPSILONS, read_rope
from .hugging_face import MAX_EMBED, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS
from .rope_options import MAX_POSITION, yarn_mscale

_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def gguf_options(config: ConfigReader, num_layers: int) -> Options:
    """Read the options of a model with latent attention and experts from its metadata."""
    latent = _read_latent(config)
    rope = read_rope(config, config.integer("context_length", maximum=MAX_POSITION))
    scale = latent.head_dim**-0.5
    if isinstance(rope.scaling, YarnScaling):
        scale *= _sharpness(config, rope.scaling)
        rope = RopeConfig(rope.theta, replace(rope.scaling, attention_factor=1.0))
    return Options(
        latent=latent,
        rope=rope,
        scores=Scores(scale),
        moe=_read_experts(config),
        sparse=sparse_after_dense(config, "leading_dense_block_count", num_layers),
    )


def _read_latent(config: ConfigReader) -> LatentAttention:
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


def _sharpness(config: ConfigReader, scaling: YarnScaling) -> float:
    """The YaRN factor on scores; the file has a tenth of the published `mscale_all_dim`."""
    weight = 10 * config.number(_LOG_MULTIPLIER, above=0.0)
    return yarn_mscale(scaling.factor, weight) ** 2


def _read_experts(config: ConfigReader) -> MoeConfig:
    num_shared = config.integer("expert_shared_count", maximum=MAX_EXPERTS)
    moe = read_gguf_experts(config, is_normalized=False)
    groups, is_v3 = None, moe.routing.scoring == "sigmoid"
    if not is_v3:
        # llama.cpp ranks groups differently from DeepSeek-V2
        config.expect("expert_group_count", 1)
        config.expect("expert_group_used_count", 1)
    elif config.has("expert_group_count"):
        groups = _read_groups(config, moe.routing.num_experts)
    return replace(
        moe,
        routing=replace(moe.routing, groups=groups, has_choice_bias=is_v3),
        shared_mlp=num_shared * moe.mlp,
    )


def _read_groups(config: ConfigReader, num_experts: int) -> ExpertGroups | None:
    count = config.integer("expert_group_count", maximum=num_experts)
    if num_experts % count:
        raise config.error("expert_group_count", f"a divisor of expert_count ({num_experts})")
    chosen = config.integer("expert_group_used_count", maximum=count)
    return ExpertGroups(count, chosen, best=2) if count > 1 else None
