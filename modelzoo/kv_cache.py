"""The key/value cache of the decode batch: plain pytrees, written and read by position.

The cache is cut along the sequence at the grid's spans into *segments*, each an array of its own: a
decode graph with span `s` takes the segments below `s` and nothing else, so a short span costs
neither a copy nor a read of the rest. Every entry stores its position (`EMPTY_POSITION` when it
holds no token) and masks come from those alone.

A segment has as many rows as there are slots that reach so far, which are the first ones: where few
rows are long, the others need not keep room for it, nor read it. What a segment has no row for is
not written, and to such a row it shows nothing.

A layer whose window is shorter than the longest span is a *ring* of as many entries as its window
has: position p lies at entry p mod size, where position p - size has just left the window. So a
decode step, which writes one token before it attends, needs no entry more. A ring of a layer that
sees chunks fills with one chunk after the other, each on top of the last. Where the span ends
before the ring does, nothing has come round yet, and the segments below it are all there is.

Entries may be dealt out in stripes (`modelzoo.stripes`), each segment for itself; spans then divide
by the number of stripes, and rings are rounded up to a multiple of it. A stripe of a cache is a
cache of its own, of every n-th token, and what is written to and read from it is the same code.

An entry of a slot's former owner holds a later position than every query of the next one, until
that one writes there: rows begin at position 0 and write every position that they pass. So such an
entry is never seen, and a slot need not be emptied for its next owner. NaN is the exception, as a
masked entry is still multiplied: a slot in which it was met is cleared by its host.

Knows nothing of slots' owners, buckets or meshes. Guarantees: `append` writes in place inside a
loop when the buffers are donated, and writes nothing for a row whose position is empty or lies past
the segments.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from . import axes
from .attention import EMPTY_POSITION
from .config import AS_PUBLISHED, Arrangement, DecoderConfig, Window, window_size
from .kept_layers import KeptLayers, KeysValues, Latents, PromptLayer
from .layer_groups import places
from .segments import Segments, segment_lengths, segment_starts
from .stripes import WHOLE, Stripe

TPU_LANES = 128
"""Entries of a row of a tile."""


class Positions(NamedTuple):
    """The position that each entry holds; layers that keep the same ones share them."""

    whole_BS: Segments
    """Of layers that keep every position; without segments where all layers are rings."""
    ring_BS: dict[int, Segments]
    """Of rings, by their number of entries."""

    AXES = (axes.CACHE_POSITIONS, axes.CACHE_POSITIONS)

    def of(self, window: Window) -> Segments:
        """Those of layers with this window."""
        size = self._ring_size(window)
        return self.whole_BS if size is None else self.ring_BS[size]

    def entry(self, position_B: jax.Array, window: Window) -> jax.Array:
        """The entry of a token in layers with this window; none of them for an empty position."""
        size = self._ring_size(window)
        return position_B if size is None else _ring_entry(position_B, size)

    def map(self, visit: Callable[[Segments], Segments]) -> "Positions":
        """`visit` of the segments of each kind of layers."""
        whole_BS = visit(self.whole_BS) if self.whole_BS else ()
        return Positions(whole_BS, {size: visit(x) for size, x in self.ring_BS.items()})

    def is_ring(self, window: Window) -> bool:
        """Whether layers with this window keep rings."""
        return self._ring_size(window) is not None

    def _ring_size(self, window: Window) -> int | None:
        """Of the smallest ring that holds the window; None of layers that keep every position."""
        if window is None:
            return None
        return min((size for size in self.ring_BS if size >= window_size(window)), default=None)


class KVCache(NamedTuple):
    """What all layers keep, and their positions."""

    layers: tuple[KeptLayers, ...]
    """By the places of the decoder's groups of layers, in order."""
    positions: Positions

    def head(self, num_segments: int) -> "KVCache":
        """The first segments, as a decode graph of their span takes them."""
        return jax.tree.map(lambda segments: segments[:num_segments], self, is_leaf=_is_segments)

    def with_head(self, head: "KVCache") -> "KVCache":
        """This cache with its first segments replaced by `head`."""
        return jax.tree.map(
            lambda old, new: new + old[len(new) :], self, head, is_leaf=_is_segments
        )


def _is_segments(x: object) -> bool:
    """Whether this is the segments of one array: the only plain tuple of no tuples here."""
    return type(x) is tuple and bool(x) and not isinstance(x[0], tuple)


def kept_entries(window: Window, longest: int, stripes: int = 1) -> int:
    """Entries that a layer keeps for every slot, where the longest span is `longest`."""
    if window is None:
        return longest
    return min(-(-window_size(window) // stripes) * stripes, longest)


def allocate(
    config: DecoderConfig,
    slots: int,
    spans: Sequence[int],
    dtype: jnp.dtype,
    num_heads: int | None = None,
    stripes: int = 1,
    span_slots: Sequence[int] | None = None,
    arrangement: Arrangement = AS_PUBLISHED,
) -> KVCache:
    """An empty cache of zeros: a NaN in a masked entry would poison its row, so never `empty`.

    `num_heads` are the key/value heads kept, where they are not the model's own ones; `span_slots`
    how many of the slots reach each span, where not all of them do.
    """
    K, H = num_heads or config.num_kv_heads, config.kept_dim
    reaching = span_slots or [slots] * len(spans)
    longest = spans[-1] if spans else 0
    num_kept = {window: kept_entries(window, longest, stripes) for window in config.windows}

    def sizes(kept: int) -> list[tuple[int, int]]:
        """Rows and entries of each segment."""
        return list(zip(reaching, segment_lengths(spans, kept), strict=False))

    def place(layers: range) -> KeptLayers:
        segments, L = sizes(num_kept[config.windows[layers.start]]), len(layers)
        if config.latent is not None:
            return Latents(tuple(jnp.zeros((L, B, S, H), dtype) for B, S in segments))
        return KeysValues(
            tuple(jnp.zeros((L, B, K, H, S), dtype) for B, S in segments),
            tuple(jnp.zeros((L, B, K, S, H), dtype) for B, S in segments),
        )

    def positions(kept: int) -> Segments:
        return tuple(jnp.full(size, EMPTY_POSITION, jnp.int32) for size in sizes(kept))

    kept = set(num_kept.values())
    whole_BS = positions(longest) if longest in kept else ()
    ring_BS = {size: positions(size) for size in kept if size < longest}
    layers = tuple(map(place, places(config, arrangement)))
    return KVCache(layers, Positions(whole_BS, ring_BS))


def match_heads(new: jax.Array, num_heads: int, axis: int = 1) -> jax.Array:
    """Heads in copies as single ones or the other way round: phases may keep them differently."""
    K = new.shape[axis]
    if num_heads < K:
        return jax.lax.slice_in_dim(new, 0, K, K // num_heads, axis)
    return jnp.repeat(new, num_heads // K, axis=axis) if num_heads > K else new


def append_position(
    positions: Positions, position_B: jax.Array, stripe: Stripe = WHOLE
) -> Positions:
    """Mark the entry of each row's next token as holding it, where it lies in this stripe.

    A row whose position is empty has no next token.
    """

    def mark(segments: Segments, entry_B: jax.Array) -> Segments:
        return _append(segments, position_B[:, None], stripe.place(entry_B), axis=1)

    rings = {
        size: mark(segments, _ring_entry(position_B, size))
        for size, segments in positions.ring_BS.items()
    }
    return Positions(mark(positions.whole_BS, position_B), rings)


def _ring_entry(position_B: jax.Array, size: int) -> jax.Array:
    return jnp.where(position_B > EMPTY_POSITION, position_B % size, position_B)


def append(
    layers: KeptLayers, new: PromptLayer, entry_B: jax.Array, layer: jax.Array
) -> KeptLayers:
    """Write what one layer keeps of one token per row, at its entry if that is here."""

    def write(segments: Segments, new: jax.Array, axis: int) -> Segments:
        # without layers, as their number is no axis of what one layer made
        starts = segment_starts(segments, axis)
        return tuple(
            _append_to_layer(segment, new, entry_B - start, axis - 1, layer)
            for segment, start in zip(segments, starts, strict=True)
        )

    return type(layers)(*map(write, layers, new, layers.POSITION_AXES))


def _append_to_layer(
    segment: jax.Array, new: jax.Array, index_B: jax.Array, axis: int, layer: jax.Array
) -> jax.Array:
    B = segment.shape[1]
    new, index_B = new[:B], index_B[:B]
    if segment.shape[0] == 1:
        return _write(segment[0], new, index_B, axis)[None]
    return _write(segment, new, index_B, axis, layer)


def _append(segments: Segments, new: jax.Array, entry_B: jax.Array, axis: int) -> Segments:
    def write(segment: jax.Array, start: int) -> jax.Array:
        B = segment.shape[0]
        return _write(segment, new[:B], entry_B[:B] - start, axis)

    return tuple(map(write, segments, segment_starts(segments, axis)))


def _write(
    segment: jax.Array,
    new: jax.Array,
    index_B: jax.Array,
    axis: int,
    layer: jax.Array | None = None,
) -> jax.Array:
    """Write one entry per row at `index_B` of `axis`; an index outside writes nothing.

    With a layer the segment leads with layers, which `axis` does not count.
    NOTE: on TPU this form alone stays in place inside a loop. Reading the old entry to write it
    back, or indexing with `.at`, copies the cache; a select over the segment rewrites it.
    """
    row_axis = 0 if layer is None else 1
    size = segment.shape[axis + row_axis]
    is_inside_B = (index_B >= 0) & (index_B < size)
    # past the end, and therefore dropped
    entry_B = jnp.where(is_inside_B, index_B, size)
    of_layer = () if layer is None else (jnp.full_like(entry_B, layer),)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, new.ndim)),
        inserted_window_dims=tuple(range(row_axis)),
        scatter_dims_to_operand_dims=(*range(row_axis), axis + row_axis),
        operand_batching_dims=(row_axis,),
        scatter_indices_batching_dims=(0,),
    )
    new = new.astype(segment.dtype)
    return jax.lax.scatter(
        segment,
        jnp.stack([*of_layer, entry_B], axis=1),
        new if layer is None else laid_like(new, segment, axis + row_axis),
        dimensions,
        indices_are_sorted=True,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )


def laid_like(new: jax.Array, segment: jax.Array, axis: int) -> jax.Array:
    """Entries with their axes in the order that a TPU gives those of the segment in memory.

    The last two axes of a segment come in the order that fills tiles with less padding, but for
    keys that lie by entry. NOTE: entries come in the order in which a projection made them, and XLA
    for TPU would lay the segment out like them: every call would copy the cache there and back.
    """
    second, last = segment.shape[-2:]
    order = list(range(new.ndim))
    is_less = _tiled_size(last, second) < _tiled_size(second, last)
    if is_less or lies_by_entry(segment.shape, axis):
        order[-2:] = reversed(order[-2:])
    return with_layout_constraint(new, Layout(major_to_minor=tuple(order)))


def lies_by_entry(shape: Sequence[int], axis: int) -> bool:
    """Whether a TPU has the heads of an entry along the last axis, though positions are `axis`.

    Keys of scanned layers lie so, if a device has one head that fills its tiles: XLA writes entries
    in this order there, and would otherwise lay all keys out anew before each loop and after it.
    """
    if len(shape) != 5 or axis != 4:
        return False
    num_layers, _, num_heads, head_dim, _ = shape
    return num_layers > 1 and num_heads == 1 and not head_dim % TPU_LANES


def _tiled_size(second: int, last: int) -> int:
    """Elements of a matrix in whole tiles of 8 x 128."""
    return -(-second // 8) * 8 * -(-last // TPU_LANES) * TPU_LANES
