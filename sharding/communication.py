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
by XLA, which is not counted; nor is what it sends where prefill and the cache keep their heads in
different ways. Knows nothing of programs: `compile.programs.collectives` reads what one does.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from ..modelzoo import axes
from ..modelzoo.config import DecoderConfig
from .attention_communication import of_attention
from .call import Call
from .expert_exchange import ExpertExchange
from .layer_shapes import FLOAT32_BYTES, Expected, LayerShapes
from .layout import Layout
from .projection import MeshAxes, Projection, beyond


def expected(config: DecoderConfig, layout: Layout, call: Call, itemsize: int) -> list[Expected]:
    """What all layers send in one call; collectives of equal kind, mesh axes and bytes are one."""
    times: Counter[tuple[str, MeshAxes, int]] = Counter()
    kinds = config.layer_kinds
    for kind, count in Counter(kinds).items():
        shapes = LayerShapes(config, layout, call, itemsize, kinds.index(kind))
        for one in [*_of_block(shapes), *of_attention(shapes, kind[0])]:
            times[one.kind, one.mesh_axes, one.num_bytes] += count * one.times
    return [Expected(*key, count) for key, count in times.items()]


def sent_bytes(kind: str, num_bytes: int, group: int) -> float:
    """Bytes that each device of a group sends for a collective, by the ring algorithms.

    Source: Pope et al. 2022, appendix A.1.
    """
    share = (group - 1) / group
    return num_bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share)


def _of_block(shapes: LayerShapes) -> Iterator[Expected]:
    """All but attention itself: of its products, its experts and its norms."""
    rules, stored, record = shapes.rules, shapes.layout.rules, shapes.record
    placed = [(one, shapes.projection(one)) for one in record.products]
    if record.mixture is not None:
        placed.append((record.mixture, shapes.exchange.projection))
        yield from _of_experts(shapes, shapes.exchange)
    once: dict[tuple[str, int, Expected], None] = {}
    for product, projection in placed:
        sizes = {**product.sizes, "B": shapes.call.rows, "T": shapes.call.tokens}
        x, weight, out = ([sizes[label] for label in labels] for labels in product.labels)
        for one in _gathers(shapes, x, rules.dimensions(product.x), projection.gather_x):
            once["reads", product.reads, one] = None
        lies = stored.dimensions(product.weight)
        yield from _gathers(shapes, weight, lies, projection.gather_weight)
        for one in _reduced(shapes, out, projection):
            if product.out == axes.RESIDUAL:
                # XLA adds up, then sums
                once["adds to", product.adds_to, one] = None
            else:
                yield one
    yield from (one for _, _, one in once)
    yield from _of_norms(shapes)


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


def _of_experts(shapes: LayerShapes, exchange: ExpertExchange) -> Iterator[Expected]:
    """A row a token to every device that experts are exchanged with, its choices beside it.

    As `modelzoo.moe.mix` packs it: ids of experts in words as wide as activations, weights of
    choices in float32. One row a token comes back.
    """
    call, moe, of_row = shapes.call, shapes.config.moe, shapes.config.embed * shapes.itemsize
    assert moe is not None, "a sparse layer has experts"
    over, num_shards = exchange.exchanged, shapes.layout.mesh.num_shards
    rows = shapes.local((call.rows, call.tokens), exchange.tokens, 1) * num_shards(over)
    of_choices = moe.routing.num_chosen * (shapes.itemsize + FLOAT32_BYTES)
    yield from shapes.send("all-to-all", over, rows * (of_row + of_choices))
    yield from shapes.send("all-to-all", over, rows * of_row)
    for product in shapes.record.expert_products:
        sizes = [product.sizes[label] for label in product.labels[1]]
        stored, used = (r.dimensions(product.weight) for r in (shapes.layout.rules, shapes.rules))
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
