"""GGUF models: the metadata keys and tensor names that families have in common.

Names and meanings are those of llama.cpp. Works on parsed metadata and tensor names, and knows
nothing of the file format. Guarantees: each key of the architecture is either read, or known not to
change the answer, or refused by name.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ..config import DecoderConfig
from ..layer_config import Attention
from ..rope_config import FactorScaling, LinearScaling, RopeConfig, YarnScaling
from .config_reader import ConfigReader, UnsupportedModel
from .expert_sources import ExpertNames, find_expert_names
from .family import Family, ModelSpec
from .hugging_face import (
    MAX_EMBED,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_MLP,
    MAX_VOCAB,
    read_head_dim,
    read_heads,
)
from .latent_sources import LatentNames
from .rope_options import DEFAULT_THETA, MAX_POSITION
from .sources import TensorNames, parameter_sources

ReadTensor = Callable[[str], Iterable[float]]
"""A function that reads a small tensor by name."""

STACKED_EXPERTS = ExpertNames(
    router="blk.{i}.ffn_gate_inp.weight",
    gate="blk.{i}.ffn_gate_exps.weight",
    up="blk.{i}.ffn_up_exps.weight",
    down="blk.{i}.ffn_down_exps.weight",
    router_bias="blk.{i}.ffn_gate_inp.bias",
    choice_bias="blk.{i}.exp_probs_b.bias",
    gate_bias="blk.{i}.ffn_gate_exps.bias",
    up_bias="blk.{i}.ffn_up_exps.bias",
    down_bias="blk.{i}.ffn_down_exps.bias",
    shared_router="blk.{i}.ffn_gate_inp_shexp.weight",
    shared_router_axes="d -> d",
)
SPLIT_EXPERTS = replace(
    STACKED_EXPERTS,
    gate="blk.{i}.ffn_gate.{e}.weight",
    up="blk.{i}.ffn_up.{e}.weight",
    down="blk.{i}.ffn_down.{e}.weight",
)
"""The names in the first Mixtral files."""

NAMES = TensorNames(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    attention_norm="blk.{i}.attn_norm",
    query="blk.{i}.attn_q",
    key="blk.{i}.attn_k",
    value="blk.{i}.attn_v",
    output="blk.{i}.attn_output",
    sinks="blk.{i}.attn_sinks.weight",
    query_norm="blk.{i}.attn_q_norm",
    key_norm="blk.{i}.attn_k_norm",
    attention_post_norm="blk.{i}.post_attention_norm",
    mlp_norm="blk.{i}.ffn_norm",
    gate="blk.{i}.ffn_gate",
    up="blk.{i}.ffn_up",
    down="blk.{i}.ffn_down",
    mlp_post_norm="blk.{i}.post_ffw_norm",
    experts=STACKED_EXPERTS,
    shared_gate="blk.{i}.ffn_gate_shexp",
    shared_up="blk.{i}.ffn_up_shexp",
    shared_down="blk.{i}.ffn_down_shexp",
)

_JOINED_LATENT = LatentNames(
    query="blk.{i}.attn_q",
    query_down="blk.{i}.attn_q_a",
    query_norm="blk.{i}.attn_q_a_norm",
    query_up="blk.{i}.attn_q_b",
    latent_down="blk.{i}.attn_kv_a_mqa",
    latent_norm="blk.{i}.attn_kv_a_norm",
    key_up="blk.{i}.attn_kv_b",
    value_up="blk.{i}.attn_kv_b",
    output="blk.{i}.attn_output",
)
_SPLIT_LATENT = replace(_JOINED_LATENT, key_up="blk.{i}.attn_k_b", value_up="blk.{i}.attn_v_b")

EPSILONS = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with divisors of rotary frequencies, for the scaling of Llama 3.1 and later."""


def model_spec(
    family: Family,
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    read_tensor: ReadTensor | None = None,
) -> ModelSpec:
    """Read metadata into the decoder and the sources of its parameters.

    Args:
      family: The family of the model.
      metadata: The metadata of the file.
      tensor_names: The tensors of the file.
      read_tensor: Reads a small tensor; needed for files that publish rotary scaling as a tensor.

    Raises:
      UnsupportedModel: The model or an option is not supported, or a value is malformed.
    """
    prefix = f"{family.gguf_name}."
    config = ConfigReader(
        {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, prefix
    )
    decoder = _decoder_config(config, family, metadata, frozenset(tensor_names))
    config.refuse_rest()
    ignored = (*(f"blk.{i}.attn_rot_embd.weight" for i in range(decoder.num_layers)),)
    if ROPE_FACTORS in tensor_names:
        decoder = decoder.map_attention(lambda x: replace(x, rope=_with_factors(x, read_tensor)))
        ignored = (ROPE_FACTORS, *ignored)
    forms = (STACKED_EXPERTS, SPLIT_EXPERTS)
    experts = find_expert_names(decoder, forms, frozenset(tensor_names))
    is_split = f"{_SPLIT_LATENT.key_up.format(i=0)}.weight" in tensor_names
    names = replace(
        NAMES,
        experts=experts,
        latent=_SPLIT_LATENT if is_split else _JOINED_LATENT,
        is_interleaved=family.gguf_interleaved,
        **family.gguf_names,
    )
    return ModelSpec(family.name, decoder, parameter_sources(decoder, names), ignored, names)


def _decoder_config(
    config: ConfigReader, family: Family, metadata: Mapping[str, object], tensors: frozenset[str]
) -> DecoderConfig:
    num_layers = config.integer("block_count", maximum=MAX_LAYERS)
    assert family.gguf_options is not None, family.name
    options = family.gguf_options(config, num_layers)
    # the biases that the family always has, and those that have tensors
    options = replace(
        options,
        qkv_bias=options.qkv_bias or NAMES.query.format(i=0) + ".bias" in tensors,
        output_bias=options.output_bias or NAMES.output.format(i=0) + ".bias" in tensors,
        mlp_bias=options.mlp_bias or NAMES.down.format(i=0) + ".bias" in tensors,
    )
    embed = config.integer("embedding_length", maximum=MAX_EMBED)
    if options.latent is not None:
        num_heads = num_kv_heads = config.integer("attention.head_count", maximum=MAX_HEADS)
        head_dim = options.latent.head_dim
    else:
        keys = "attention.head_count", "attention.head_count_kv"
        num_heads, num_kv_heads = read_heads(config, *keys)
        head_dim = read_head_dim(config, "attention.key_length", "embedding_length", num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            config.expect(key, head_dim)
    max_position = config.integer("context_length", maximum=MAX_POSITION)
    options = replace(
        options,
        windows=options.windows or (None,) * num_layers,
        rope=options.rope or read_rope(config, max_position),
        max_position=max_position,
        norm_epsilon=config.number(EPSILONS[options.norm], above=0.0, maximum=1.0),
        mlp=options.mlp or config.integer("feed_forward_length", maximum=MAX_MLP),
    )
    config.expect("attention.causal", True)
    if options.moe is None:
        config.expect("expert_count", 0)
        config.expect("expert_used_count", 0)
    tokens = metadata.get("tokenizer.ggml.tokens")
    # older files have no vocab_size: it is the number of tokens of the tokenizer
    num_tokens = len(tokens) if isinstance(tokens, Collection) else None
    return DecoderConfig.alike(
        vocab_size=config.integer("vocab_size", maximum=MAX_VOCAB, default=num_tokens),
        embed=embed,
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tie_embeddings=f"{NAMES.head}.weight" not in tensors,
        **options.decoder_fields(),
    )


def read_rope(config: ConfigReader, max_position: int) -> RopeConfig:
    """Read the rotation as most architectures publish it."""
    theta = config.number("rope.freq_base", above=1.0, default=DEFAULT_THETA)
    kind = config.text("rope.scaling.type", default="none")
    config.expect("rope.scaling.attn_factor", 1.0)
    config.ignore(("rope.scaling.finetuned",))  # about training
    if kind == "none":
        config.ignore(("rope.scaling.factor", "rope.scaling.original_context_length"))
        return RopeConfig(theta)
    if kind not in ("linear", "yarn"):
        raise config.error("rope.scaling.type", "none, linear or yarn, the implemented ones")
    factor = config.number("rope.scaling.factor", above=0.0)
    if factor < 1.0:
        raise config.error("rope.scaling.factor", "a number not below 1")
    original = config.integer(
        "rope.scaling.original_context_length", maximum=MAX_POSITION, default=max_position
    )
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(factor))
    fast = config.number("rope.scaling.yarn_beta_fast", above=0.0, default=32.0)
    slow = config.number("rope.scaling.yarn_beta_slow", above=0.0, default=1.0)
    if fast <= slow:
        raise config.error("rope.scaling.yarn_beta_fast", f"a number above yarn_beta_slow ({slow})")
    return RopeConfig(theta, YarnScaling(factor, original, fast, slow))


def _with_factors(attention: Attention, read_tensor: ReadTensor | None) -> RopeConfig:
    expected, rope = attention.head_dim // 2, attention.rope
    assert isinstance(rope, RopeConfig), "models with rotary factors have rotary embeddings"
    if rope.scaling is not None:
        raise UnsupportedModel(
            f"{ROPE_FACTORS}: expected no rope.scaling.type beside it, "
            f"got {rope.scaling}. Their combination is not implemented."
        )
    if read_tensor is None:
        raise UnsupportedModel(
            f"{ROPE_FACTORS}: expected a way to read the tensor, got only the names of tensors."
        )
    factors = tuple(float(factor) for factor in read_tensor(ROPE_FACTORS))
    if len(factors) != expected or not all(math.isfinite(f) and f > 0 for f in factors):
        raise UnsupportedModel(
            f"{ROPE_FACTORS}: expected {expected} finite positive factors, got {len(factors)}: "
            f"{factors[:4]}..."
        )
    return replace(rope, scaling=FactorScaling(factors))
