"""Prediction of the collectives of attention: batch/head exchanges, rings and split pages.

The prediction follows from shapes alone, as do the implementations in `sharded_operations` and
`ring_attention`. Knows nothing of products or programs.
"""

from collections.abc import Iterator

from ..modelzoo import axes
from ..modelzoo.layer_config import Window
from .layer_shapes import FLOAT32_BYTES, ExpectedCollective, LayerShapes
from .projection import MeshAxes
from .ring_attention import num_ring_steps


def predict_attention(shapes: LayerShapes) -> Iterator[ExpectedCollective]:
    """Predict the collectives of attention in one layer."""
    phase = shapes.call.phase
    if phase == "chunk":
        yield from _pieces_in_pages(shapes)
        return
    yield from _head_exchanges(shapes)
    if phase == "decode":
        yield from _merge_of_decode(shapes)
        return
    # each device holds the slots of some rows, and any row of a call may belong to any slot, so
    # every device gets the new entries of all rows before they are written
    over, length = shapes.rules[axes.ATTENTION_BATCH], shapes.rules[axes.LENGTH]
    yield from _gathered_entries(shapes, over, length, is_cached=True)
    yield from _ring_passes(shapes, shapes.attention.window)


def _head_exchanges(shapes: LayerShapes) -> Iterator[ExpectedCollective]:
    """All-to-alls that exchange heads for rows before attention, and rows for heads after it.

    Each copy of a key/value head sends one part of the head. Latents need no exchange: every device
    that has a row has its latents. Source: Pope et al. 2022, section 3.3.
    """
    over, call = shapes.rules.exchanged, shapes.call
    split, num_heads = shapes.rules.dimensions(axes.HEADS[:3]), shapes.attention.num_query_heads
    for dim in shapes.record.head_dims:
        num_bytes = shapes.local((call.rows, call.tokens, num_heads, dim), split)
        yield from shapes.send("all-to-all", over, num_bytes)
    if not shapes.record.makes_keys:
        return
    stored_heads = shapes.record.num_kv_heads
    copies = stored_heads // shapes.num_cache_heads
    for dim in shapes.record.head_dims:
        num_bytes = shapes.local((call.rows, call.tokens, stored_heads, dim), split)
        yield from shapes.send("all-to-all", over, num_bytes // copies)


def _ring_passes(shapes: LayerShapes, window: Window) -> Iterator[ExpectedCollective]:
    """Ring passes of keys and values: one pass less than the number of stripes that queries see."""
    over, call = shapes.rules[axes.LENGTH], shapes.call
    n = shapes.layout.mesh.num_shards(over)
    split = shapes.rules.dimensions((axes.ATTENTION_BATCH, axes.KV_HEADS))
    for dim in shapes.record.head_dims:
        num_bytes = shapes.local((call.rows, shapes.num_cache_heads, call.tokens // n, dim), split)
        yield from shapes.send("collective-permute", over, num_bytes, num_ring_steps(window, n) - 1)


def _pieces_in_pages(shapes: LayerShapes) -> Iterator[ExpectedCollective]:
    """Gather of the queries and entries of all pieces, and the merge of partial results.

    A row of a call may belong to a slot of any device, so every device gets all rows and tokens.
    """
    call, cache = shapes.call, shapes.layout.phase("decode")
    over = (*shapes.rules[axes.HEAD_BATCH], *shapes.rules[axes.LENGTH])
    heads, num_heads = cache[axes.KV_HEADS], shapes.attention.num_query_heads
    query_dim, value_dim = shapes.record.head_dims
    queries = call.rows, call.tokens, num_heads
    num_bytes = shapes.local((*queries, query_dim), (heads,))
    yield from shapes.send("all-gather", over + _split_heads(shapes)[1], num_bytes)
    yield from _gathered_entries(shapes, over, (), is_cached=False)
    merged = (*cache[axes.ATTENTION_BATCH], *cache[axes.CACHE_LENGTH])
    lse_bytes = shapes.local(queries, (heads,), FLOAT32_BYTES)
    yield from shapes.send("all-reduce", merged, lse_bytes)
    yield from shapes.send("all-reduce", merged, lse_bytes * (value_dim + 1))


def _merge_of_decode(shapes: LayerShapes) -> Iterator[ExpectedCollective]:
    """Merge of the partial results of decode: one maximum and one weighted sum for each query.

    The size of both does not depend on the number of keys.
    """
    over, call = shapes.rules[axes.CACHE_LENGTH], shapes.call
    split = shapes.rules.dimensions((axes.ATTENTION_BATCH, axes.KV_HEADS))
    queries = call.rows, call.tokens, shapes.attention.num_query_heads
    # one float32 number for each query: the log-sum-exp of its scores
    lse_bytes = shapes.local(queries, split, FLOAT32_BYTES)
    yield from shapes.send("all-reduce", over, lse_bytes)
    yield from shapes.send("all-reduce", over, lse_bytes * (shapes.record.head_dims[1] + 1))


def _gathered_entries(
    shapes: LayerShapes, over: MeshAxes, length: MeshAxes, *, is_cached: bool
) -> Iterator[ExpectedCollective]:
    """Gather of each array of new entries over `over`, and over mesh axes that split heads in the
    call but not in the cache. Of the copies of a head, each sends a part of the tokens."""
    call, (kept, gathered) = shapes.call, _split_heads(shapes)
    for array in shapes.state(is_cached=is_cached).arrays.values():
        heads, split, mesh_axes = array.heads or 1, (length,), over
        if array.has_kv_heads:
            heads, split, mesh_axes = shapes.num_heads(kept), (length, kept), over + gathered
        num_bytes = shapes.local((call.rows, call.tokens, heads), split, array.vector_bytes)
        yield from shapes.send("all-gather", mesh_axes, num_bytes)


def _split_heads(shapes: LayerShapes) -> tuple[MeshAxes, MeshAxes]:
    """The mesh axes of key/value heads in the call that split them in the cache, and the others."""
    heads, cache = shapes.rules[axes.KV_HEADS], shapes.layout.phase("decode")[axes.KV_HEADS]
    kept = tuple(axis for axis in heads if axis in cache)
    return kept, tuple(axis for axis in heads if axis not in cache)
