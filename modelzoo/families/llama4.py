"""Llama 4, text: most layers have rotation and chunked attention, the others have neither.

In the other layers, queries are scaled by a factor that grows with the position. Heads are normed
after the rotation, so only in layers with rotation. A token takes the experts with the best scores;
the sigmoid of a score multiplies the input of its expert. A shared expert takes all tokens. Rotated
pairs are adjacent rows of published tensors. Options, defaults and names are those of `llama4_text`
in transformers. Published models also have a vision tower.
"""

from dataclasses import replace
from typing import Any

from ..layer_config import Chunk
from ..rope_config import NoRope, RopeConfig
from .config_reader import ConfigReader
from .expert_options import read_experts
from .expert_sources import fused_experts
from .family import Family, Options
from .hugging_face import MAX_LAYERS, MAX_MLP
from .rope_options import MAX_POSITION, read_rope

_THETA = 500_000.0
_PERIOD = 4
_CHUNK = _INTERVAL = 8192
_GROWTH = 0.1

_BLOCK = "model.layers.{i}.feed_forward"
_EXPERTS = replace(fused_experts(_BLOCK), gate_up_axes="e d (p f)", down_axes="e f d")
_HF_NAMES = {
    "gate": f"{_BLOCK}.gate_proj",
    "up": f"{_BLOCK}.up_proj",
    "down": f"{_BLOCK}.down_proj",
    "shared_gate": f"{_BLOCK}.shared_expert.gate_proj",
    "shared_up": f"{_BLOCK}.shared_expert.up_proj",
    "shared_down": f"{_BLOCK}.shared_expert.down_proj",
    "is_interleaved": True,
}


def _hf_options(config: ConfigReader, num_layers: int) -> Options:
    # about training and quantisation
    config.ignore(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"))
    config.ignore(("for_llm_compressor",))
    return Options(
        windows=_windows(config, num_layers),
        rope=_no_rope(config),
        local_rope=_rope(config),
        mlp=config.integer("intermediate_size_mlp", maximum=MAX_MLP),
        **_experts(config, num_layers),
    ).with_biases(config)


def _windows(config: ConfigReader, num_layers: int) -> tuple[Chunk | None, ...]:
    """Read the windows: a chunk in each layer with rotation."""
    period = config.integer("no_rope_layer_interval", maximum=MAX_LAYERS, default=_PERIOD)
    rotates = tuple(int((i + 1) % period > 0) for i in range(num_layers))
    # despite the name of the key, 1 means a layer with rotation, as in the reference
    if config.has("no_rope_layers"):
        rotates = config.integers("no_rope_layers", minimum=0, maximum=1) or rotates
    if len(rotates) != num_layers:
        raise config.error("no_rope_layers", f"{num_layers} entries of 0 and 1, or none")
    kinds = tuple("chunked_attention" if rotate else "full_attention" for rotate in rotates)
    if config.has("layer_types") and config.texts("layer_types") != kinds:
        raise config.error("layer_types", f"chunks in the layers with rotation: {list(kinds)}")
    if config.is_null("attention_chunk_size"):
        raise config.error("attention_chunk_size", "a size, as some layers have chunked attention")
    size = config.integer("attention_chunk_size", maximum=MAX_POSITION, default=_CHUNK)
    return tuple(Chunk(size) if rotate else None for rotate in rotates)


def _rope(config: ConfigReader) -> RopeConfig:
    rope = read_rope(config, _THETA)
    if not config.flag("use_qk_norm", default=True):
        return rope
    return replace(rope, norm_epsilon=config.number("rms_norm_eps", above=0.0, maximum=1.0))


def _no_rope(config: ConfigReader) -> NoRope:
    growth = config.number("attn_scale", above=0.0, default=_GROWTH)
    interval = config.integer("floor_scale", maximum=MAX_POSITION, default=_INTERVAL)
    is_tuned = config.flag("attn_temperature_tuning", default=True)
    return NoRope(growth, interval) if is_tuned else NoRope()


def _experts(config: ConfigReader, num_layers: int) -> dict[str, Any]:
    """The options `moe` and `sparse`."""
    step = config.integer("interleave_moe_layer_step", maximum=MAX_LAYERS, default=1)
    sparse = tuple(range(step - 1, num_layers, step))
    if config.has("moe_layers"):
        sparse = config.integers("moe_layers", minimum=0, maximum=num_layers - 1)
    moe = read_experts(config, num_experts=16, num_chosen=1, scoring="sigmoid", is_normalized=False)
    moe = replace(moe, routing=replace(moe.routing, weighs_input=True), shared_mlp=moe.mlp)
    return {"moe": moe, "sparse": tuple(i in sparse for i in range(num_layers))}


FAMILY = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    _hf_options,
    hf_defaults={"head_dim": 128},
    hf_names=_HF_NAMES,
    hf_experts=(_EXPERTS,),
)
