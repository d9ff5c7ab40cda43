"""What the layers of a model send each other's devices under any layout: from its rules alone.

Every product of a layer asks for the collectives that `projection` works out, attention for those
of rows exchanged for heads, of rings and of caches in pieces, a sparse layer for those of
`expert_exchange`, and a norm of a residual stream that is split along embed for a sum. Products
that read one array gather it once, those that add to one sum once. So this holds for layouts that
nobody has published, and tests hold it against compiled programs and against published formulas:
Pope et al. 2022, "Efficiently Scaling Transformer Inference" (2211.05102), section 3 and appendix
A; Korthikanti et al. 2022 (2205.05198), section 4.2.2; Liu et al. 2023, "Ring Attention"
(2310.01889), section 3; Lepikhin et al. 2020, "GShard" (2006.16668), section 3.3.

Bytes are of the whole array along the communicated dimension on one device, so that an all-reduce
has the bytes of the reduce-scatter and the all-gather that it is made of; over n devices a link
then carries about (n - 1) / n of them (twice that for an all-reduce).

Left out as too small to matter: sinks, and counts of how experts were used. Experts are taken to
dispatch losslessly. Rows of a chunk whose batch is split over caches in pieces are brought together
by XLA, which is not counted. Knows nothing of programs: `compile.collectives` reads what one does.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from ..modelzoo import axes
from ..modelzoo.config import DecoderConfig
from ..modelzoo.moe.config import MoeConfig
from ..modelzoo.moe.experts import DOWN_AXES, GATE_UP_AXES
from .attention_communication import of_attention
from .expert_exchange import ExpertExchange
from .layer_call import FLOAT32_BYTES, Expected, LayerCall, LayerShapes
from .layer_products import LayerProduct, attention_products, mlp_products
from .layout import Layout
from .projection import MeshAxes, Projection, beyond


def expected(
    config: DecoderConfig, layout: Layout, call: LayerCall, itemsize: int
) -> list[Expected]:
    """What all layers send in one call; collectives of equal kind, mesh axes and bytes are one."""
    shapes = LayerShapes(config, layout, call, itemsize)
    is_sparse = (False,) * config.num_layers if config.moe is None else config.moe.layers
    times: Counter[tuple[str, MeshAxes, int]] = Counter()
    for (window, sparse), count in Counter(zip(config.windows, is_sparse, strict=True)).items():
        moe = config.moe if sparse else None
        for one in [*_of_block(shapes, moe), *of_attention(shapes, window)]:
            times[one.kind, one.mesh_axes, one.num_bytes] += count * one.times
    return [Expected(*key, count) for key, count in times.items()]


def sent_bytes(kind: str, num_bytes: int, group: int) -> float:
    """Bytes that each device of a group sends for a collective, by the ring algorithms.

    Source: Pope et al. 2022, appendix A.1.
    """
    share = (group - 1) / group
    return num_bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share)


_Once = tuple[object, Expected]
"""A collective, and what it is of: two of the same kind, size and object are one."""


def _of_block(shapes: LayerShapes, moe: MoeConfig | None) -> Iterator[Expected]:
    """All but attention itself. Both halves of a parallel block read one array and add to one."""
    config, reads_cache = shapes.config, shapes.call.phase != "prefill"
    halves = [attention_products(config, reads_cache=reads_cache)]
    halves.append(mlp_products(config.mlp if moe is None else moe.shared_mlp))
    once = [{one for product in half for one in _once(shapes, product)} for half in halves]
    if moe is not None:
        exchange = ExpertExchange(shapes.rules, shapes.layout.rules)
        once[1] |= set(_once_around_experts(shapes, exchange))
        yield from _of_experts(shapes, exchange, moe)
    for of_half in [once[0] | once[1]] if config.is_parallel else once:
        yield from (collective for _, collective in of_half)
    for product in halves[0] + halves[1]:
        yield from _every_time(shapes, product)
    yield from _of_norms(shapes)


def _projection(shapes: LayerShapes, product: LayerProduct) -> Projection:
    rules, stored = shapes.rules, shapes.layout.rules
    return Projection.of(
        product.equation,
        rules.dimensions(product.x),
        stored.dimensions(product.weight),
        rules.dimensions(product.weight),
        rules.dimensions(product.out),
    )


def _once(shapes: LayerShapes, product: LayerProduct) -> Iterator[_Once]:
    """Gathers of what is read, and sums into the residual stream: XLA adds up, then sums."""
    labels, _, of_out = product.labels
    sizes = {**shapes.sizes, **product.sizes}
    projection, before = _projection(shapes, product), shapes.rules.dimensions(product.x)
    read = [sizes[label] for label in labels]
    for one in _gathers(shapes, read, before, projection.gather_x):
        yield product.reads, one
    if product.out == axes.RESIDUAL:
        for one in _reduced(shapes, [sizes[label] for label in of_out], projection):
            yield product.out, one


def _every_time(shapes: LayerShapes, product: LayerProduct) -> Iterator[Expected]:
    """Weights as they are gathered, and what becomes of results that are nobody else's."""
    _, of_weight, of_out = product.labels
    sizes = {**shapes.sizes, **product.sizes}
    projection = _projection(shapes, product)
    stored = shapes.layout.rules.dimensions(product.weight)
    weight = [sizes[label] for label in of_weight]
    yield from _gathers(shapes, weight, stored, projection.gather_weight)
    if product.out != axes.RESIDUAL:
        yield from _reduced(shapes, [sizes[label] for label in of_out], projection)


def _gathers(
    shapes: LayerShapes,
    sizes: Sequence[int],
    before: Sequence[MeshAxes],
    gathered: Sequence[MeshAxes],
) -> Iterator[Expected]:
    """One dimension after the other, from an array that is split as `before`."""
    split = list(before)
    for dimension, mesh_axes in enumerate(gathered):
        if mesh_axes:
            split[dimension] = split[dimension][: -len(mesh_axes)]
            yield from shapes.send("all-gather", mesh_axes, shapes.local(sizes, split))


def _reduced(
    shapes: LayerShapes, sizes: Sequence[int], projection: Projection
) -> Iterator[Expected]:
    """Partial sums of a result: scattered, summed, and what lies in pieces too many gathered."""
    split = list(projection.made)
    for dimension, mesh_axes in enumerate(projection.scatter):
        if mesh_axes:
            yield from shapes.send("reduce-scatter", mesh_axes, shapes.local(sizes, split))
            split[dimension] += mesh_axes
    yield from shapes.send("all-reduce", projection.sum_over, shapes.local(sizes, split))
    yield from _gathers(shapes, sizes, split, projection.gather_out)


def _once_around_experts(shapes: LayerShapes, exchange: ExpertExchange) -> Iterator[_Once]:
    """Experts read and add to what the expert that all tokens share does."""
    before, projection = shapes.rules.dimensions(axes.RESIDUAL), exchange.projection
    sizes = [shapes.sizes[label] for label in "BTD"]
    for one in _gathers(shapes, sizes, before, projection.gather_x):
        yield ("BTD", axes.RESIDUAL), one
    for one in _reduced(shapes, sizes, projection):
        yield axes.RESIDUAL, one


def _of_experts(
    shapes: LayerShapes, exchange: ExpertExchange, moe: MoeConfig
) -> Iterator[Expected]:
    """A row a token to every device that experts are exchanged with, its choices beside it.

    As `modelzoo.moe.mix` packs it: ids of experts in words as wide as activations, weights of
    choices in float32. One row a token comes back.
    """
    B, T, D = (shapes.sizes[label] for label in "BTD")
    batch, length = exchange.tokens
    over, Z = exchange.exchanged, moe.routing.num_chosen
    rows = shapes.local((B, T), (batch, length), 1) * shapes.layout.mesh.num_shards(over)
    of_choices = Z * (shapes.itemsize + FLOAT32_BYTES)
    yield from shapes.send("all-to-all", over, rows * (D * shapes.itemsize + of_choices))
    yield from shapes.send("all-to-all", over, rows * D * shapes.itemsize)
    E, F, P = moe.routing.num_experts, moe.mlp, 2
    for of_weight, sizes in ((GATE_UP_AXES, (E, P, D, F)), (DOWN_AXES, (E, F, D))):
        stored, used = (r.dimensions(of_weight) for r in (shapes.layout.rules, shapes.rules))
        yield from _gathers(shapes, sizes, stored, tuple(map(beyond, stored, used)))


def _of_norms(shapes: LayerShapes) -> Iterator[Expected]:
    """Norms of a residual stream that is split along embed sum one number a token over the pieces.

    A layer norm sums twice, once for the mean. The partitioner does it, in float32.
    """
    config, rules = shapes.config, shapes.rules
    num_norms = 1 if config.is_parallel else 4 if config.norm_placement == "both" else 2
    sums = num_norms * (2 if config.norm == "layer" else 1)
    batch, length, embed = rules.dimensions(axes.RESIDUAL)
    call = shapes.call
    num_bytes = shapes.local((call.rows, call.tokens), (batch, length), FLOAT32_BYTES)
    yield from shapes.send("all-reduce", embed, num_bytes, sums)
    if config.qk_norm and config.qk_norm_kind == "projection":
        batch, length, heads = rules.dimensions(axes.HEADS[:3])
        num_bytes = shapes.local((call.rows, call.tokens), (batch, length), FLOAT32_BYTES)
        yield from shapes.send("all-reduce", heads, num_bytes, 2)
