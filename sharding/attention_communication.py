"""What attention sends: rows had for heads, rings of keys and values, caches in pieces.

Shapes alone decide, as in `sharded_operations`, `ring_attention` and `cache_attention`, which do
it. Knows nothing of products or programs.
"""

from collections.abc import Iterator
from itertools import chain

from ..modelzoo import axes
from ..modelzoo.config import Window
from .cache_attention import entry_bytes, query_bytes
from .layer_shapes import FLOAT32_BYTES, INT32_BYTES, Expected, LayerShapes
from .ring_attention import steps


def of_attention(shapes: LayerShapes, window: Window) -> Iterator[Expected]:
    """Of one layer with this window."""
    yield from _exchanged(shapes)
    rules, phase = shapes.rules, shapes.call.phase
    if phase == "decode":
        yield from _merged(shapes)
        return
    yield from _written(shapes)
    if phase == "prefill":
        yield from _ring(shapes, window)
    elif rules[axes.CACHE_LENGTH]:
        yield from _chunk(shapes, window)


def _exchanged(shapes: LayerShapes) -> Iterator[Expected]:
    """Queries go from heads to rows, results back; of a head in copies each copy sends a part.

    Source: Pope et al. 2022, section 3.3. Latents are on every device that has their row.
    """
    over, call, config = shapes.rules.exchanged, shapes.call, shapes.config
    split = shapes.rules.dimensions(axes.HEADS[:3])
    for dim in shapes.record.head_dims:
        num_bytes = shapes.local((call.rows, call.tokens, config.num_query_heads, dim), split)
        yield from shapes.send("all-to-all", over, num_bytes)
    if not shapes.record.makes_keys:
        return
    stored_heads = shapes.record.num_kv_heads
    copies = stored_heads // shapes.kept_heads
    for dim in shapes.record.head_dims:
        num_bytes = shapes.local((call.rows, call.tokens, stored_heads, dim), split)
        yield from shapes.send("all-to-all", over, num_bytes // copies)


def _ring(shapes: LayerShapes, window: Window) -> Iterator[Expected]:
    """Keys and values go on to the next device until all that are seen have come by."""
    over, call = shapes.rules[axes.LENGTH], shapes.call
    n = shapes.layout.mesh.num_shards(over)
    split = shapes.rules.dimensions((axes.ATTENTION_BATCH, axes.KV_HEADS))
    for dim in shapes.record.head_dims:
        num_bytes = shapes.local((call.rows, shapes.kept_heads, call.tokens // n, dim), split)
        yield from shapes.send("collective-permute", over, num_bytes, steps(window, n) - 1)


def _written(shapes: LayerShapes) -> Iterator[Expected]:
    """What is kept of new tokens goes to every device that may have their slots.

    A device has the slots of some rows, and any row of a call may be one of them.
    """
    over, call = shapes.rules[axes.ATTENTION_BATCH], shapes.call
    heads, length = shapes.rules.dimensions((axes.KV_HEADS, axes.LENGTH))
    if shapes.config.latent is not None:
        sizes = (call.rows, call.tokens, shapes.config.cache_dim)
        yield from shapes.send("all-gather", over, shapes.local(sizes, (length,)))
        return
    for dim in shapes.record.head_dims:
        sizes = (call.rows, shapes.kept_heads, call.tokens, dim)
        yield from shapes.send("all-gather", over, shapes.local(sizes, (heads, length)))


def _merged(shapes: LayerShapes) -> Iterator[Expected]:
    """A maximum, and a sum of results with their weights, of any number of keys."""
    over, lse = shapes.rules[axes.CACHE_LENGTH], _lse_bytes(shapes)
    yield from shapes.send("all-reduce", over, lse)
    yield from shapes.send("all-reduce", over, lse * (shapes.record.head_dims[1] + 1))


def _lse_bytes(shapes: LayerShapes) -> int:
    """Of one float32 number a query, of all tokens: what a part of keys counts for."""
    split = shapes.rules.dimensions((axes.ATTENTION_BATCH, axes.KV_HEADS))
    call, num_heads = shapes.call, shapes.config.num_query_heads
    return shapes.local((call.rows, call.tokens, num_heads), (split[0], split[1]), FLOAT32_BYTES)


def _chunk(shapes: LayerShapes, window: Window) -> Iterator[Expected]:
    """Queries are gathered and results scattered, or entries go round: what is less to send."""
    over, call = shapes.rules[axes.CACHE_LENGTH], shapes.call
    n = shapes.layout.mesh.num_shards(over)
    num_steps = steps(window, n)
    lengths = [*(end - start for _, start, end in call.pieces), call.tokens]
    of_segments = [_entries(shapes, length // n) for length in lengths]
    query_dim, value_dim = shapes.record.head_dims
    lse = _lse_bytes(shapes)
    queries = lse // FLOAT32_BYTES * query_dim * shapes.itemsize
    num_bytes = sum(chain.from_iterable(of_segments))
    if entry_bytes(num_bytes, num_steps) < query_bytes(queries // n, lse // n, value_dim, n):
        for of_array in chain.from_iterable(of_segments):
            yield from shapes.send("collective-permute", over, of_array, num_steps - 1)
        return
    yield from shapes.send("all-gather", over, queries)
    yield from shapes.send("all-reduce", over, lse)
    yield from shapes.send("reduce-scatter", over, lse * (value_dim + 1))


def _entries(shapes: LayerShapes, length: int) -> list[int]:
    """Bytes of so many entries of the cache: of keys and values or latents, and of positions."""
    split = shapes.rules.dimensions((axes.ATTENTION_BATCH, axes.KV_HEADS))
    rows, latent = shapes.call.rows, shapes.config.latent
    heads, over_heads = (shapes.kept_heads, split[1]) if latent is None else (1, ())
    of_array = shapes.local((rows, heads, length, shapes.config.cache_dim), (split[0], over_heads))
    positions = shapes.local((rows, length), split[:1], INT32_BYTES)
    return [of_array] * (2 if latent is None else 1) + [positions]
