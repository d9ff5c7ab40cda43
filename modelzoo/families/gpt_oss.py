"""GPT-OSS: a window in every second layer, sinks, experts with a clamped unit, biases everywhere.

Sources: the model card (2508.10925), section 2, and `gpt_oss` in transformers. Gate and up are the
even and the odd entries of one tensor; in GGUF they are two tensors, named as in llama.cpp.

The ends of the YaRN ramp are not rounded. GGUF has no key for it, so GGUF models are read like the
published ones (llama.cpp rounds).
"""

from dataclasses import replace

from ..moe_config import ClampedUnit, MoeConfig, Scoring
from ..rope_config import RopeConfig, YarnScaling
from . import gguf
from .config_reader import ConfigReader
from .expert_options import read_experts, read_gguf_experts
from .expert_sources import fused_experts
from .family import Family, Options
from .rope_options import MAX_POSITION, read_rope, require_rope_table
from .windows import windows_except_every

_THETA = 150_000.0
_WINDOW = 128
_SCORING: Scoring = "softmax_of_chosen"
_UNIT = ClampedUnit(alpha=1.702, limit=7.0)
_MLP = "model.layers.{i}.mlp"
HF_EXPERTS = replace(
    fused_experts(_MLP),
    gate_up_axes="e d (f p)",
    down_axes="e f d",
    router_bias=f"{_MLP}.router.bias",
    gate_bias=f"{_MLP}.experts.gate_up_proj_bias",
    up_bias=f"{_MLP}.experts.gate_up_proj_bias",
    down_bias=f"{_MLP}.experts.down_proj_bias",
)


def _options(
    windows: tuple[int | None, ...],
    rope: RopeConfig,
    moe: MoeConfig,
    *,
    unit: ClampedUnit = _UNIT,
    has_bias: bool = True,
) -> Options:
    routing = replace(moe.routing, has_bias=True)
    moe = replace(moe, routing=routing, has_bias=True, clamped=unit)
    return Options(
        windows=windows, rope=rope, qkv_bias=has_bias, output_bias=has_bias, sinks=True, moe=moe
    )


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    require_rope_table(config)
    # second names of options; the reference does not read them
    config.ignore(("experts_per_token", "initial_context_length"))
    moe = read_experts(config, num_experts=128, num_chosen=4, scoring=_SCORING)
    return _options(
        windows_except_every(2, config, num_layers, _WINDOW),
        read_rope(config, _THETA),
        moe,
        unit=ClampedUnit(
            config.number("swiglu_alpha", above=0.0, default=_UNIT.alpha),
            config.number("swiglu_limit", above=0.0, default=_UNIT.limit),
        ),
        has_bias=config.flag("attention_bias", default=True),
    )


def _gguf_options(config: ConfigReader, num_layers: int) -> Options:
    window = config.integer("attention.sliding_window", maximum=MAX_POSITION)
    rope = gguf.read_rope(config, config.integer("context_length", maximum=MAX_POSITION))
    if isinstance(rope.scaling, YarnScaling):
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    moe = read_gguf_experts(config, scoring=_SCORING)
    return _options(tuple(None if i % 2 else window for i in range(num_layers)), rope, moe)


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _hf_options,
    _gguf_options,
    {"head_dim": 64},
    hf_experts=(HF_EXPERTS,),
    gguf_architecture="gpt-oss",
    gguf_names={"mlp_norm": "blk.{i}.post_attention_norm"},
)
