"""Prediction of the collectives of every layer of a model, from a layout's rules alone.

The prediction has four parts. Each product of a layer needs the collectives that `projection`
derives. Attention needs those of `attention_communication`. A sparse layer needs those of
`expert_exchange`. A norm of a residual stream that is split along embed needs a sum. Products that
read the same array share one gather, and products that add to the same sum share one reduction.

So the prediction also holds for layouts that nobody has published. Tests compare it with compiled
programs and with published formulas: Pope et al. 2022, "Efficiently Scaling Transformer Inference"
(2211.05102), section 3 and appendix A; Korthikanti et al. 2022 (2205.05198), section 4.2.2; Liu et
al. 2023, "Ring Attention" (2310.01889), section 3; Lepikhin et al. 2020, "GShard" (2006.16668),
section 3.3.

The bytes of a collective are the bytes of the array on one device, counted as if the communicated
dimension were whole there. So an all-reduce has as many bytes as the reduce-scatter and the
all-gather of which it consists. Over n devices a link carries about (n - 1) / n of these bytes, and
twice that for an all-reduce.

Not counted, because small: attention sinks and the counts of how experts were used. Expert dispatch
is assumed to be lossless. Knows nothing of programs: `compile.programs.collectives` reads the
collectives of a compiled program.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from ..modelzoo import axes
from ..modelzoo.config import DecoderConfig
from .attention_communication import predict_attention
from .call import Call
from .expert_exchange import ExpertExchange
from .layer_shapes import FLOAT32_BYTES, ExpectedCollective, LayerShapes
from .layout import Layout
from .projection import MeshAxes, Projection, extra_axes


def predict_collectives(
    config: DecoderConfig,
    layout: Layout,
    call: Call,
    itemsize: int,
    element_bytes: Mapping[str, float] = MappingProxyType({}),
    cache_codes: str | None = None,
) -> list[ExpectedCollective]:
    """Predict the collectives of all layers in one call.

    Args:
      config: The model.
      layout: The mesh and its rules.
      call: The shape of the call.
      itemsize: Bytes of an element of activations, and of weights that are not in `element_bytes`.
      element_bytes: Average bytes of an element of a weight, scales included, by dotted path. Codes
        and scales of a weight count as one collective.
      cache_codes: The dtype of cache entries in codes; None for entries of `itemsize`.

    Returns:
      One entry for all collectives of the same kind, mesh axes and bytes.
    """
    times: Counter[tuple[str, MeshAxes, int]] = Counter()
    for kind, count in Counter(config.layers).items():
        layer = config.layers.index(kind)
        shapes = LayerShapes(config, layout, call, itemsize, layer, element_bytes, cache_codes)
        attention = [] if kind.attention is None else predict_attention(shapes)
        for collective in [*_block_collectives(shapes), *attention]:
            key = collective.kind, collective.mesh_axes, collective.num_bytes
            times[key] += count * collective.times
    return [
        ExpectedCollective(kind, mesh_axes, num_bytes, count)
        for (kind, mesh_axes, num_bytes), count in times.items()
    ]


def sent_bytes(kind: str, num_bytes: int, group: int) -> float:
    """Bytes that each device of a group sends for a collective in the ring algorithms.

    Source: Pope et al. 2022, appendix A.1.

    Args:
      kind: The HLO name, such as `all-reduce`.
      num_bytes: Bytes of the whole array along the communicated dimension.
      group: Number of devices.
    """
    share = (group - 1) / group
    return num_bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share)


def _block_collectives(shapes: LayerShapes) -> Iterator[ExpectedCollective]:
    """Collectives of a block without its attention: of its products, its experts and its norms."""
    rules, stored, record = shapes.rules, shapes.layout.rules, shapes.record
    placed = [(product, shapes.projection(product)) for product in record.products]
    if record.mixture is not None:
        placed.append((record.mixture, shapes.exchange.projection))
        yield from _expert_collectives(shapes, shapes.exchange)
    shared: dict[tuple[str, int, ExpectedCollective], None] = {}
    for product, projection in placed:
        sizes = {**product.sizes, "B": shapes.call.rows, "T": shapes.call.tokens}
        x, weight, out = ([sizes[label] for label in labels] for labels in product.labels)
        for collective in _gathers(shapes, x, rules.dimensions(product.x), projection.gather_x):
            shared["reads", product.reads, collective] = None
        weight_split = stored.dimensions(product.weight)
        size = shapes.element_size(product)
        yield from _gathers(shapes, weight, weight_split, projection.gather_weight, size)
        for collective in _reductions(shapes, out, projection):
            if product.out == axes.RESIDUAL:
                # XLA first adds the products, then sums over devices
                shared["adds to", product.adds_to, collective] = None
            else:
                yield collective
    yield from (collective for _, _, collective in shared)
    yield from _norm_collectives(shapes)


def _gathers(
    shapes: LayerShapes,
    sizes: Sequence[int],
    before: Sequence[MeshAxes],
    gathered: Sequence[MeshAxes],
    itemsize: float | None = None,
) -> Iterator[ExpectedCollective]:
    """Gather an array that is split as `before`, one dimension after the other."""
    split = list(before)
    for dimension, mesh_axes in enumerate(gathered):
        if mesh_axes:
            split[dimension] = split[dimension][: -len(mesh_axes)]
            yield from shapes.send("all-gather", mesh_axes, shapes.local(sizes, split, itemsize))


def _reductions(
    shapes: LayerShapes, sizes: Sequence[int], projection: Projection
) -> Iterator[ExpectedCollective]:
    """Reductions of the partial sums of a result, and gathers of dimensions split too far."""
    split = list(projection.partial_split)
    for dimension, mesh_axes in enumerate(projection.scatter):
        if mesh_axes:
            yield from shapes.send("reduce-scatter", mesh_axes, shapes.local(sizes, split))
            split[dimension] += mesh_axes
    yield from shapes.send("all-reduce", projection.sum_over, shapes.local(sizes, split))
    yield from _gathers(shapes, sizes, split, projection.gather_out)


def _expert_collectives(
    shapes: LayerShapes, exchange: ExpertExchange
) -> Iterator[ExpectedCollective]:
    """Exchange of tokens with the devices of their experts, and gathers of the experts' weights.

    `modelzoo.moe.mix` packs one vector for each token: the activations, the ids of its experts in
    words as wide as the activations, and the float32 weights of its choices. One vector of
    activations for each token comes back.
    """
    call, row_bytes = shapes.call, shapes.config.embed * shapes.itemsize
    moe = shapes.config.moe
    assert moe is not None, "a sparse layer has experts"
    over, num_shards = exchange.exchanged, shapes.layout.mesh.num_shards
    rows = shapes.local((call.rows, call.tokens), exchange.tokens, 1) * num_shards(over)
    choice_bytes = moe.routing.num_chosen * (shapes.itemsize + FLOAT32_BYTES)
    yield from shapes.send("all-to-all", over, rows * (row_bytes + choice_bytes))
    yield from shapes.send("all-to-all", over, rows * row_bytes)
    for product in shapes.record.expert_products:
        sizes = [product.sizes[label] for label in product.labels[1]]
        stored, used = (r.dimensions(product.weight) for r in (shapes.layout.rules, shapes.rules))
        gathered, size = tuple(map(extra_axes, stored, used)), shapes.element_size(product)
        yield from _gathers(shapes, sizes, stored, gathered, size)


def _norm_collectives(shapes: LayerShapes) -> Iterator[ExpectedCollective]:
    """Sums of the norms, where the residual stream is split along embed: one number for each token.

    A layer norm sums twice, once for the mean. The partitioner adds these sums, in float32.
    """
    layer, rules = shapes.config.layers[shapes.layer], shapes.rules
    num_parts = 1 if layer.is_parallel else 2 - (None in (layer.attention, layer.feed_forward))
    num_norms = num_parts * (2 if layer.norm_placement == "both" else 1)
    sums = num_norms * (2 if shapes.config.norm == "layer" else 1)
    batch, length, embed = rules.dimensions(axes.RESIDUAL)
    call = shapes.call
    num_bytes = shapes.local((call.rows, call.tokens), (batch, length), FLOAT32_BYTES)
    yield from shapes.send("all-reduce", embed, num_bytes, sums)
    if layer.attention is not None and layer.attention.qk_norm == "projection":
        batch, length, heads = rules.dimensions(axes.HEADS[:3])
        num_bytes = shapes.local((call.rows, call.tokens), (batch, length), FLOAT32_BYTES)
        yield from shapes.send("all-reduce", heads, num_bytes, 2)
