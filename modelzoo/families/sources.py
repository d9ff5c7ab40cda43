"""Sources of all parameters of a decoder, with the same axis patterns for all families and formats.

`TensorNames` are the tensor names of a format. The parameters and the axis patterns follow from the
configuration and the arrangement of weights. Knows nothing of files. Guarantees: exactly one source
for every parameter of the decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..config import AS_PUBLISHED, Arrangement, DecoderConfig
from ..layer_config import Attention, Experts, Layer, Mlp
from .expert_sources import ExpertNames, sparse_sources
from .latent_sources import LatentNames, latent_attention
from .mapping import NO_PREFIX, ParameterSource, Sizes, TensorPart, TensorPrefix


@dataclass(frozen=True)
class TensorNames:
    """The tensor names of a format, without `.weight` and `.bias`; `{i}` is the layer.

    If query, key and value have the same name, or gate and up, they are one tensor with their rows
    concatenated.
    """

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    sinks: str
    """The whole tensor name."""
    query_norm: str
    key_norm: str
    attention_post_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    mlp_post_norm: str
    experts: ExpertNames
    shared_gate: str
    shared_up: str
    shared_down: str
    latent: LatentNames | None = None
    """The names of latent attention; None for a format without it."""
    prefix: TensorPrefix = NO_PREFIX
    """The prefixes of names, for a model that is part of a larger one."""
    positions: str = ""
    token_types: str = ""
    input_norm: str = ""
    norm_suffixes: tuple[str, str] = ("weight", "bias")
    """The ends of the names of the scale and the bias of a norm."""
    dense: tuple[str, ...] = ()
    """The names of the dense layers over pooled vectors, in order."""
    dense_norm: str = ""
    """The name of the norm of such a layer."""
    is_grouped: bool = False
    """Whether the rows of a common tensor of queries, keys and values are ordered by key/value head
    first."""
    is_interleaved: bool = False
    """Whether the rows of a query or key head are ordered (pair, side) instead of (side, pair)."""


def parameter_sources(
    config: DecoderConfig, names: TensorNames, arrangement: Arrangement = AS_PUBLISHED
) -> tuple[ParameterSource, ...]:
    """The sources of all parameters, in the order of layers."""
    arrangement.check(config)
    padding = (arrangement.padded_vocab or config.vocab_size) - config.vocab_size

    def table(parameter: str, tensor: str) -> ParameterSource:
        return replace(_single(parameter, f"{tensor}.weight", "v d -> v d"), padding_rows=padding)

    sources = [
        table("embedding.table", names.embedding),
        *_inputs(config, names),
        *(
            source.in_layer(i)
            for i, layer in enumerate(config.layers)
            for source in _layer(config, layer, names, arrangement)
        ),
    ]
    if config.has_final_norm:
        sources += _norm(config, names, "final_norm", names.final_norm)
    if config.has_head and not config.tie_embeddings:
        sources.append(table("head.table", names.head))
    sources += _dense(config, names)
    return tuple(source.with_prefix(names.prefix) for source in sources)


def _layer(
    config: DecoderConfig, layer: Layer, names: TensorNames, arrangement: Arrangement
) -> list[ParameterSource]:
    """The sources of a layer, as in every layer: see `ParameterSource.in_layer`."""
    sources = [
        source
        for norm, tensor in _norms(layer, names).items()
        for source in _norm(config, names, norm, tensor)
    ]
    if (attention := layer.attention) is not None:
        if attention.latent is None:
            copies = arrangement.kv_copies(attention.num_kv_heads)
            sources += _attention(attention, names, copies)
        else:
            assert names.latent is not None, "a family with latent attention names its tensors"
            sources += latent_attention(attention, names.latent, names.is_interleaved)
    if layer.feed_forward is not None:
        sources += _feed_forward(layer.feed_forward, names)
    return sources


def _dense(config: DecoderConfig, names: TensorNames) -> list[ParameterSource]:
    """The sources of the dense layers over pooled vectors."""
    sources = []
    for i, projection in enumerate(config.pooling.projections):
        path, tensor = f"pooler.dense.{i}", names.dense[i]
        sources.append(_single(f"{path}.weight", f"{tensor}.weight", "o i -> i o"))
        if projection.has_bias:
            sources.append(_single(f"{path}.bias", f"{tensor}.bias", "o -> o"))
        if projection.norm_epsilon is not None:
            sources.append(_single(f"{path}.norm_scale", f"{names.dense_norm}.weight", "o -> o"))
            if projection.has_norm_bias:
                sources.append(_single(f"{path}.norm_bias", f"{names.dense_norm}.bias", "o -> o"))
    return sources


def _inputs(config: DecoderConfig, names: TensorNames) -> list[ParameterSource]:
    """The sources of what is added to the embeddings of tokens."""
    if config.inputs is None:
        return []
    sources = _norm(config, names, "inputs.norm", names.input_norm)
    if config.inputs.positions:
        sources.append(_single("inputs.positions", f"{names.positions}.weight", "p d -> p d"))
    if config.inputs.token_types:
        sources.append(_single("inputs.types", f"{names.token_types}.weight", "p d -> p d"))
    return sources


def _norm(
    config: DecoderConfig, names: TensorNames, parameter: str, tensor: str
) -> list[ParameterSource]:
    """The sources of the scale of a norm, and of its bias if norms have one."""
    scale, bias = names.norm_suffixes
    sources = [_single(f"{parameter}.scale", f"{tensor}.{scale}", "d -> d")]
    if config.norm_bias:
        sources.append(_single(f"{parameter}.bias", f"{tensor}.{bias}", "d -> d"))
    return sources


def _norms(layer: Layer, names: TensorNames) -> dict[str, str]:
    """The tensors of the norms of a block, by parameter."""
    if layer.is_parallel:
        return {"norm": names.attention_norm}
    before = {"attention_norm": names.attention_norm, "mlp_norm": names.mlp_norm}
    if not layer.has_attention_norm:
        del before["attention_norm"]
    residual = {
        "attention_residual_norm": names.attention_post_norm,
        "mlp_residual_norm": names.mlp_post_norm,
    }
    after = {
        "attention_post_norm": names.attention_post_norm,
        "mlp_post_norm": names.mlp_post_norm,
    }
    placed = {"before": before, "after": after, "both": before | after, "residual": residual}
    absent = [("attention", layer.attention is None), ("mlp", layer.feed_forward is None)]
    parts = tuple(part for part, is_absent in absent if is_absent)
    return {
        norm: tensor
        for norm, tensor in placed[layer.norm_placement].items()
        if norm.partition("_")[0] not in parts
    }


@dataclass(frozen=True)
class _Heads:
    """Axes of the heads of attention in tensors, and their sizes."""

    queries: Sizes
    keys: Sizes
    rotated: Sizes
    """The features of a query or key head."""
    rotated_in: str
    """The features in the order of published tensors."""
    rotated_out: str
    """The features as one axis, in the order of parameters."""


def _heads(options: Attention, kv_copies: int, is_interleaved: bool) -> _Heads:
    K, G, H = options.num_kv_heads, options.heads_per_kv, options.head_dim
    # each copy of a key/value head serves a part of the queries, which keep their order
    queries = (("k", K * kv_copies), ("g", G // kv_copies))
    keys = (("k", K), ("copy", kv_copies))
    if is_interleaved:
        pairs = (("pair", H // 2), ("side", 2))
        return _Heads(queries, keys, pairs, "pair side", "(side pair)")
    return _Heads(queries, keys, (("h", H),), "h", "h")


def _attention(options: Attention, names: TensorNames, kv_copies: int) -> list[ParameterSource]:
    heads = _heads(options, kv_copies, names.is_interleaved)
    sizes = (*heads.queries, ("h", options.head_dim))
    output = TensorPart(f"{names.output}.weight", "d (k g h) -> k g h d", sizes)
    sources = [
        _query_key_value(options, names, heads, "weight"),
        ParameterSource("attention.output", (output,)),
    ]
    if options.qkv_bias:
        sources.append(_query_key_value(options, names, heads, "bias"))
    if options.has_sinks:
        part = TensorPart(names.sinks, "(k g) -> k g", heads.queries)
        sources.append(ParameterSource("attention.sinks", (part,)))
    if options.output_bias:
        sources.append(_single("attention.output_bias", f"{names.output}.bias", "d -> d"))
    if options.qk_norm:
        sources += _query_key_norms(options, names, heads)
    return sources


def _query_key_value(
    options: Attention, names: TensorNames, heads: _Heads, kind: str
) -> ParameterSource:
    """The weight or bias of queries, keys and values, side by side for each key/value head."""
    K, G, H = options.num_kv_heads, options.heads_per_kv, options.head_dim
    parameter, concat_axis, d_in, d_out = ("qkv_bias", 1, "", "")
    if kind == "weight":
        parameter, concat_axis, d_in, d_out = ("qkv", 2, " d", "d ")
    e_in, e_out = heads.rotated_in, heads.rotated_out
    patterns = (
        (f"(k g {e_in}){d_in} -> {d_out}k g {e_out}", (*heads.queries, *heads.rotated)),
        (f"(k {e_in}){d_in} -> {d_out}(k copy) 1 {e_out}", (*heads.keys, *heads.rotated)),
        (f"(k h){d_in} -> {d_out}(k copy) 1 h", (*heads.keys, ("h", H))),
    )
    tensors = (names.query, names.key, names.value)
    sizes, block = (K * G * H, K * H, K * H), None
    if names.is_grouped:
        sizes, block = (G * H, H, H), (G + 2) * H
    rows = _rows(tensors, sizes)
    parts = tuple(
        TensorPart(f"{tensor}.{kind}", *pattern, part_rows, block)
        for tensor, pattern, part_rows in zip(tensors, patterns, rows, strict=True)
    )
    return ParameterSource(f"attention.{parameter}", parts, concat_axis)


def _query_key_norms(
    options: Attention, names: TensorNames, heads: _Heads
) -> list[ParameterSource]:
    axes, sizes = "h -> h", ()
    if options.qk_norm == "heads":
        inner = heads.rotated_out.strip("()")
        axes, sizes = f"n ({heads.rotated_in}) -> (n {inner})", heads.rotated
    return [
        ParameterSource(
            f"attention.{parameter}.scale", (TensorPart(f"{name}.weight", axes, sizes),)
        )
        for parameter, name in (("query_norm", names.query_norm), ("key_norm", names.key_norm))
    ]


def _feed_forward(options: Mlp | Experts, names: TensorNames) -> list[ParameterSource]:
    if isinstance(options, Mlp):
        if not options.is_gated:
            return _plain_mlp(options, names)
        return _mlp("mlp", options, (names.gate, names.up, names.down))
    sources = sparse_sources(options.moe, names.experts)
    if options.shared is not None:
        shared = (names.shared_gate, names.shared_up, names.shared_down)
        sources += _mlp("mlp.shared", options.shared, shared)
    return sources


def _plain_mlp(options: Mlp, names: TensorNames) -> list[ParameterSource]:
    sources = []
    for part, tensor, axes in (("up", names.up, "f d -> d f"), ("down", names.down, "d f -> f d")):
        sources.append(_single(f"mlp.{part}", f"{tensor}.weight", axes))
        if options.has_bias:
            sources.append(_single(f"mlp.{part}_bias", f"{tensor}.bias", "f -> f"))
    return sources


def _mlp(path: str, options: Mlp, gate_up_down: tuple[str, str, str]) -> list[ParameterSource]:
    *tensors, down = gate_up_down

    def joined(parameter: str, kind: str, axes: str) -> ParameterSource:
        """The source of gate and up, in this order."""
        rows = _rows(tensors, (options.size, options.size))
        parts = tuple(
            TensorPart(f"{name}.{kind}", axes, rows=part_rows)
            for name, part_rows in zip(tensors, rows, strict=True)
        )
        return ParameterSource(f"{path}.{parameter}", parts)

    sources = [
        joined("gate_up", "weight", "f d -> 1 d f"),
        _single(f"{path}.down", f"{down}.weight", "d f -> f d"),
    ]
    if options.has_bias:
        sources.append(joined("gate_up_bias", "bias", "f -> 1 f"))
        sources.append(_single(f"{path}.down_bias", f"{down}.bias", "d -> d"))
    return sources


def _rows(tensors: Sequence[str], sizes: Sequence[int]) -> list[tuple[int, int] | None]:
    """The rows of each part: all rows of its own tensor (None), or a range of the common tensor."""
    if len(set(tensors)) > 1:
        return [None] * len(tensors)
    return [(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _single(parameter: str, tensor: str, axes: str) -> ParameterSource:
    return ParameterSource(parameter, (TensorPart(tensor, axes),))
