"""Decoders whose layers are alike: their options, and the same decoders with other options."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.layer_config import BothSides, Experts, Mlp

SAME = (
    "num_query_heads",
    "num_kv_heads",
    "head_dim",
    "latent",
    "qkv_bias",
    "output_bias",
    "qk_norm",
    "scores",
)
WHOLE = {None, BothSides()}


def alike(config: DecoderConfig) -> SimpleNamespace:
    """Return the arguments of `DecoderConfig.alike` that give this decoder."""
    first, attention = config.layers[0], config.attentions[0]
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    del options["layers"], options["has_final_norm"]
    options |= {name: getattr(attention, name) for name in SAME}
    local = [x.rope for x in config.attentions if x.window not in WHOLE]
    rope = [x.rope for x in config.attentions if x.window in WHOLE]
    parts = [layer.feed_forward for layer in config.layers]
    dense = next((part for part in parts if isinstance(part, Mlp)), None)
    sparse = next((part for part in parts if isinstance(part, Experts)), None)
    return SimpleNamespace(
        **options,
        windows=tuple(each.window for each in config.attentions),
        rope=(rope or local)[0],
        local_rope=local[0] if local and rope and local[0] != rope[0] else None,
        sinks=attention.has_sinks,
        mlp=1 if dense is None else dense.size,
        activation=(dense or sparse).activation,
        mlp_bias=(dense or sparse).has_bias,
        is_gated=dense is None or dense.is_gated,
        moe=config.moe,
        sparse=None if dense is None or sparse is None else tuple(part == sparse for part in parts),
        norm_placement=first.norm_placement,
        is_parallel=first.is_parallel,
        has_first_norm=first.has_attention_norm,
    )


def changed(config: DecoderConfig, **options: Any) -> DecoderConfig:
    """Return the decoder with other values of some arguments of `DecoderConfig.alike`."""
    return DecoderConfig.alike(**(vars(alike(config)) | options))
