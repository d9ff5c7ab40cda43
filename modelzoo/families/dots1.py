"""Other attention with the experts of DeepSeek: dots.llm1, GLM-4.5, Solar Open, DeepSeekMoE.

Options and names are those of `dots1`, `glm4_moe` and `solar_open` in transformers, and of the
published code of DeepSeekMoE (2401.06066).
"""

from dataclasses import replace

from .config_reader import ConfigReader
from .deepseek import (
    TRAINING_KEYS,
    read_choices,
    read_mixture,
    read_v3_routing,
    unused_tensors,
)
from .expert_options import sparse_after_dense
from .family import Family, Options
from .hugging_face import MAX_LAYERS, MAX_MLP, SHARED_EXPERTS
from .partial_rope import read_partial_rope
from .windows import read_window, windows_by_kind


def _dots1_options(config: ConfigReader, num_layers: int) -> Options:
    window = read_window(config)
    first = config.integer("max_window_layers", minimum=0, maximum=MAX_LAYERS, default=62)
    windows = tuple(window if i >= first else None for i in range(num_layers))
    if config.has("layer_types"):
        windows = windows_by_kind(config, num_layers, window)
    has_groups = not config.is_null("n_group")
    if not has_groups:
        config.ignore(("topk_group",))
    return Options(
        windows=windows,
        qk_norm="head",
        moe=read_mixture(config, read_v3_routing(config, has_groups=has_groups)),
        sparse=sparse_after_dense(config, "first_k_dense_replace", num_layers),
    ).with_biases(config)


def _glm4_moe_options(config: ConfigReader, num_layers: int) -> Options:
    return Options(
        rope=read_partial_rope(config, 0.5),
        qkv_bias=config.flag("attention_bias", default=False),
        qk_norm="head" if config.flag("use_qk_norm", default=False) else None,
        moe=read_mixture(config, read_v3_routing(config)),
        sparse=sparse_after_dense(config, "first_k_dense_replace", num_layers),
    )


def _solar_options(config: ConfigReader, num_layers: int) -> Options:
    del num_layers
    moe = read_mixture(config, read_v3_routing(config))
    # all layers are sparse, so files need no size of dense ones
    mlp = config.integer("intermediate_size", maximum=MAX_MLP, default=moe.mlp)
    return Options(moe=moe, mlp=mlp).with_biases(config)


def _deepseek_options(config: ConfigReader, num_layers: int) -> Options:
    config.ignore(TRAINING_KEYS)
    config.expect("scoring_func", "softmax")
    config.expect("moe_layer_freq", 1)
    is_normalized = config.flag("norm_topk_prob", default=False)
    routing = replace(read_choices(config, None), is_normalized=is_normalized)
    return Options(
        moe=read_mixture(config, routing),
        sparse=sparse_after_dense(config, "first_k_dense_replace", num_layers),
    ).with_biases(config)


_NO_GROUPS = {"n_group": 1, "topk_group": 1}
DOTS_1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    _dots1_options,
    hf_defaults=_NO_GROUPS | {"sliding_window": 4096},
    hf_names=SHARED_EXPERTS,
)
"""dots.llm1: the attention of Qwen3 with the experts of DeepSeek V3."""
GLM_4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _glm4_moe_options,
    hf_names=SHARED_EXPERTS,
    hf_unused_tensors=unused_tensors,
)
"""GLM-4.5, 4.6 and 4.7: half of each head rotates; the experts of DeepSeek V3."""
SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    _solar_options,
    hf_defaults=_NO_GROUPS | {"head_dim": 128},
    hf_names=SHARED_EXPERTS,
    hf_theta=1e6,
)
"""Solar Open: the attention of Llama with the experts of DeepSeek V3 in all layers."""
DEEPSEEK_MOE = Family(
    "deepseek",
    "DeepseekForCausalLM",
    _deepseek_options,
    hf_defaults={"routed_scaling_factor": 1.0},
    hf_names=SHARED_EXPERTS,
)
"""DeepSeekMoE: the attention of Llama with routed and shared experts."""
