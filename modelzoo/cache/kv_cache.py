"""The key/value cache of the decode batch: plain pytrees, written and read by position.

**Segments.** The cache is cut along the sequence at the spans of the grid into *segments*, each in
an array of its own. A decode graph with span `s` takes only the segments below `s`, so it neither
copies nor reads the rest. Every entry stores its position (`EMPTY_POSITION` if it holds no token),
and masks come only from positions. The keys of a segment may be stored in blocks of positions
(`segments`), which some platforms read faster. Entries may be stored as codes with scales
(`entry_codes`), never in blocks.

**Slots of a segment.** A segment has one row for each slot that is at least as long as the segment
reaches. These are the first slots, so short slots need no memory there. A write to a slot that a
segment does not have is dropped, and such a slot sees nothing in the segment.

**Rolling buffers.** A layer with a window shorter than the longest span has a *rolling* buffer with
as many entries as its window: position p is in entry p mod size and replaces position p - size,
which has just left the window. A decode step writes its token before it attends, so no extra entry
is needed. In a layer with chunked attention, each chunk overwrites the chunk before it. If a span
ends before the buffer is full, nothing has been overwritten yet, and the segments below the span
hold all entries.

**Stripes.** Entries may be distributed in stripes (`modelzoo.cache.segments`), for each segment
separately. Spans must then be multiples of the number of stripes, and rolling buffers are rounded
up to a multiple of it. One stripe is itself a cache of every n-th token, so the same code reads and
writes it.

**Reuse of slots.** A slot is not cleared for its next owner. Rows begin at position 0 and write
every position that they pass, so an entry of the former owner holds a later position than every
query until it is overwritten, and is never visible. The exception is NaN, as masked entries are
still multiplied: the host clears a slot in which NaN was found.

Knows nothing of owners of slots, buckets or meshes. Guarantees: `append` writes in place inside a
loop if the buffers are donated, and writes nothing for a row whose position is empty or past the
segments.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from .. import axes
from ..config import AS_PUBLISHED, Arrangement, DecoderConfig
from ..layer_config import Window, window_size
from ..layer_groups import block_layers
from ..weights.weight_products import Axes
from .layer_state import LayerState, NewEntries, layer_of
from .segments import (
    EMPTY_POSITION,
    ONE_STRIPE,
    Segments,
    Stripe,
    num_blocks,
    segment_lengths,
    segment_starts,
)
from .state_spec import StateArray, num_cache_entries, state_spec


class Positions(NamedTuple):
    """The position that each entry holds, shared by layers with the same number of entries."""

    whole_BS: Segments
    """Positions for layers that cache every position; no segments if all layers are rolling."""
    rolling_BS: dict[int, Segments]
    """Positions of rolling buffers, by their number of entries."""

    AXES = (axes.CACHE_POSITIONS, axes.CACHE_POSITIONS)

    def for_window(self, window: Window) -> Segments:
        """The positions of layers with this window."""
        size = self._rolling_size(window)
        return self.whole_BS if size is None else self.rolling_BS[size]

    def entry(self, position_B: jax.Array, window: Window) -> jax.Array:
        """The entry of a token in layers with this window; empty for an empty position."""
        size = self._rolling_size(window)
        return position_B if size is None else _rolling_entry(position_B, size)

    def map(self, visit: Callable[[Segments], Segments]) -> "Positions":
        """Apply `visit` to the segments of each kind of layer."""
        whole_BS = visit(self.whole_BS) if self.whole_BS else ()
        return Positions(whole_BS, {size: visit(x) for size, x in self.rolling_BS.items()})

    def below(self, length_B: jax.Array) -> "Positions":
        """The positions below the length of each row; the others are empty."""

        def hide(segments: Segments) -> Segments:
            return tuple(
                jnp.where(x_BS < length_B[: len(x_BS), None], x_BS, EMPTY_POSITION)
                for x_BS in segments
            )

        return self.map(hide)

    def is_rolling(self, window: Window) -> bool:
        """Whether layers with this window have rolling buffers."""
        return self._rolling_size(window) is not None

    def _rolling_size(self, window: Window) -> int | None:
        """The size of the smallest rolling buffer that holds the window; None without one."""
        if window is None:
            return None
        return min((size for size in self.rolling_BS if size >= window_size(window)), default=None)


class KVCache(NamedTuple):
    """The memory of all layers, and the positions of its entries."""

    layers: tuple[LayerState | None, ...]
    """The memory of each block of the decoder, in order; None for layers without attention."""
    positions: Positions

    def map(self, visit: Callable[[Segments, Axes], Segments]) -> "KVCache":
        """Apply `visit` to the segments and the logical axes of every array."""
        layers = (
            x and x.map(lambda segments, array: visit(segments, array.axes)) for x in self.layers
        )
        return KVCache(tuple(layers), self.positions.map(lambda x: visit(x, axes.CACHE_POSITIONS)))

    def head(self, num_segments: int) -> "KVCache":
        """The first segments, which are the input of a decode graph with their span."""
        return jax.tree.map(lambda segments: segments[:num_segments], self, is_leaf=_is_segments)

    def with_head(self, head: "KVCache") -> "KVCache":
        """This cache with its first segments replaced by `head`."""
        return jax.tree.map(
            lambda old, new: new + old[len(new) :], self, head, is_leaf=_is_segments
        )


EMPTY_CACHE = KVCache((), Positions((), {}))
"""A cache of no layers."""


def _is_segments(x: object) -> bool:
    """Whether `x` is the segments of an array: a tuple of nothing but arrays."""
    return type(x) is tuple and jax.tree_util.all_leaves(x)


def allocate(
    config: DecoderConfig,
    slots: int,
    spans: Sequence[int],
    dtype: jnp.dtype,
    head_shards: int = 1,
    stripes: int = 1,
    span_slots: Sequence[int] | None = None,
    arrangement: Arrangement = AS_PUBLISHED,
    chunk: int | None = None,
) -> KVCache:
    """Allocate an empty cache.

    The arrays are zeros, never `jnp.empty`: a NaN in a masked entry would spread to its whole row.

    Args:
      config: The decoder.
      slots: The number of slots.
      spans: The spans of the grid, in ascending order.
      dtype: The dtype of keys, values and latents, or of their scales if they are in codes.
      head_shards: The number of shards of query heads in decode; key/value heads have copies until
        they divide over them.
      stripes: The number of stripes that entries are distributed in.
      span_slots: For each span, the number of slots that are at least as long; by default all slots
        have the longest span.
      arrangement: The arrangement of weights and cache.
      chunk: The number of tokens of which all prompt chunks are multiples, if prompts come in
        chunks. Blocks of keys must divide it, as a chunk is written in whole blocks.
    """
    segment_slots = span_slots or [slots] * len(spans)
    longest = spans[-1] if spans else 0

    def segment_sizes(count: int) -> list[tuple[int, int]]:
        """The rows and the entries of each segment, for a layer with `count` entries."""
        return list(zip(segment_slots, segment_lengths(spans, count), strict=False))

    def allocate_layers(layers: range) -> LayerState | None:
        attention = config.layers[layers.start].attention
        if attention is None:
            return None
        spec = state_spec(attention, dtype, arrangement, chunk)
        sizes = segment_sizes(spec.num_entries(longest, stripes))
        return LayerState.empty(spec, len(layers), sizes, head_shards)

    def empty_positions(count: int) -> Segments:
        sizes = segment_sizes(count)
        return tuple(jnp.full(size, EMPTY_POSITION, jnp.int32) for size in sizes)

    counts = {num_cache_entries(x.window, longest, stripes) for x in config.attentions}
    whole_BS = empty_positions(longest) if longest in counts else ()
    rolling_BS = {size: empty_positions(size) for size in counts if size < longest}
    layers = tuple(map(allocate_layers, block_layers(config, arrangement)))
    return KVCache(layers, Positions(whole_BS, rolling_BS))


def match_heads(new: jax.Array, num_heads: int, axis: int = 1) -> jax.Array:
    """Repeat heads, or drop their copies, to get `num_heads`: phases may copy heads differently."""
    K = new.shape[axis]
    if num_heads < K:
        return jax.lax.slice_in_dim(new, 0, K, K // num_heads, axis)
    return jnp.repeat(new, num_heads // K, axis=axis) if num_heads > K else new


def match_head_dim(new: jax.Array, head_dim: int, axis: int) -> jax.Array:
    """Pad heads with zeros to the head size of the cache."""
    if new.shape[axis] == head_dim:
        return new
    padding = [(0, 0)] * new.ndim
    padding[axis] = (0, head_dim - new.shape[axis])
    return jnp.pad(new, padding)


def append_position(
    positions: Positions, position_B: jax.Array, stripe: Stripe = ONE_STRIPE
) -> Positions:
    """Set the positions of the entries that the next token of each row takes.

    Args:
      positions: The positions of the cache, or of one stripe of it.
      position_B: The position of each token; empty for a row without a token.
      stripe: The stripe that is written; tokens of other stripes change nothing.
    """

    def mark(segments: Segments, entry_B: jax.Array) -> Segments:
        index_B = stripe.local_index(entry_B)
        starts = segment_starts([x_BS.shape[1] for x_BS in segments])
        return tuple(
            _mark(segment, position_B, index_B - start)
            for segment, start in zip(segments, starts, strict=True)
        )

    rolling_BS = {
        size: mark(segments, _rolling_entry(position_B, size))
        for size, segments in positions.rolling_BS.items()
    }
    return Positions(mark(positions.whole_BS, position_B), rolling_BS)


def _rolling_entry(position_B: jax.Array, size: int) -> jax.Array:
    return jnp.where(position_B > EMPTY_POSITION, position_B % size, position_B)


def _mark(segment_BS: jax.Array, position_B: jax.Array, index_B: jax.Array) -> jax.Array:
    B, S = segment_BS.shape
    is_entry_BS = jnp.arange(S)[None] == index_B[:B, None]
    return jnp.where(is_entry_BS, position_B[:B, None], segment_BS)


def append(state: LayerState, new: NewEntries, entry_B: jax.Array, layer: jax.Array) -> LayerState:
    """Write the new entries of one layer, one token per row.

    Args:
      state: The memory of the layers of one block.
      new: Keys and values, or latents, of one token per row.
      entry_B: The entry of each token; outside of the segments it is not written.
      layer: The index of the layer in the arrays.
    """
    lengths, starts = state.lengths, segment_starts(state.lengths)

    def write(segments: Segments, array: StateArray, new: jax.Array) -> Segments:
        # new entries do not have the axis of layers
        new_BKH = jnp.squeeze(new, array.position_axis - 1)

        def write_segment(segment: jax.Array, length: int, start: int) -> jax.Array:
            index_B = entry_B - start
            if array.feature_axis is None:
                return _write_scales(segment, new_BKH, index_B, layer)
            return _write(segment, length, new_BKH, index_B, array, layer)

        return tuple(map(write_segment, segments, lengths, starts))

    return state.map(write, state.spec.encode(new))


def _write_scales(
    segment_LBKS: jax.Array, new_BK: jax.Array, index_B: jax.Array, layer: jax.Array
) -> jax.Array:
    """Write one scale per row and head at `index_B`, in one pass over the scales of the layer.

    NOTE: XLA for TPU compiles a scatter of single numbers to a loop over slots.
    """
    _, B, _, S = segment_LBKS.shape
    is_entry_BS = jnp.arange(S)[None] == index_B[:B, None]
    new_BK1 = new_BK[:B, :, None].astype(segment_LBKS.dtype)
    scale_BKS = jnp.where(is_entry_BS[:, None], new_BK1, layer_of(segment_LBKS, layer))
    if len(segment_LBKS) == 1:
        return scale_BKS[None]
    return jax.lax.dynamic_update_index_in_dim(segment_LBKS, scale_BKS, layer, axis=0)


def _write(
    segment: jax.Array,
    length: int,
    new_BKH: jax.Array,
    index_B: jax.Array,
    array: StateArray,
    layer: jax.Array,
) -> jax.Array:
    """Write one entry per row at `index_B`; an index outside of the segment's `length` is dropped.

    The first axis of the segment is layers. Its last two axes are head features and positions, in
    either order; positions may be in blocks.
    NOTE: every head of every entry is a separate update, at a row and a position. If head features
    are the minor dimension in memory, XLA for TPU compiles this scatter to one pass over the
    updates. It compiles a scatter of windows that are one position wide to a loop over slots.
    """
    axis, head_axis = array.position_axis, array.feature_axis
    assert head_axis is not None
    B, size = segment.shape[1], segment.shape[axis]
    count = num_blocks(length, size)
    H = segment.shape[head_axis] // count
    rows = segment.reshape(-1, H, size) if head_axis < axis else segment.reshape(-1, size, H)
    new = match_head_dim(new_BKH[:B], H, axis=-1).reshape(-1, H).astype(segment.dtype)
    row = layer * len(new) + jnp.arange(len(new))
    is_inside_B = (index_B >= 0) & (index_B < length)
    # past the end, and therefore dropped
    entry_B = jnp.where(is_inside_B, index_B % size, size)[:B]
    entry = jnp.repeat(entry_B, len(new) // B)
    if count > 1:
        block_B = jnp.where(is_inside_B, index_B // size, 0)[:B]
        row = row * count + jnp.repeat(block_B, len(new) // B)
    at = rows.at[row, :, entry] if head_axis < axis else rows.at[row, entry]
    written = at.set(new, mode="drop", unique_indices=True).reshape(segment.shape)
    return jax.lax.platform_dependent(written, cpu=with_axes_in_order, default=lambda x: x)


def with_axes_in_order(segment: jax.Array) -> jax.Array:
    """Keep the order of the axes in memory.

    NOTE: with one head on a device, XLA for the CPU chooses another order for the segment in a
    decode step, although both are the same bytes, and copies the whole cache twice in each step.
    """
    order = Layout(major_to_minor=tuple(range(segment.ndim)))
    return with_layout_constraint(segment, order)
