"""The key/value cache of the decode batch: plain pytrees, written and read by position.

The cache is cut along the sequence at the grid's spans into *segments*, each an array of its own: a
decode graph with span `s` takes the segments below `s` and nothing else, so a short span costs
neither a copy nor a read of the rest. Every entry stores its position (`EMPTY_POSITION` when it
holds no token) and masks come from those alone.

The keys of a segment may lie in blocks of positions (`key_blocks`), where a platform reads these
faster.

A segment has as many rows as there are slots that reach so far, which are the first ones: where few
rows are long, the others need not keep room for it, nor read it. What a segment has no row for is
not written, and to such a row it shows nothing.

The first segments may have one row that all slots share: the beginning of every prompt, kept once.
A graph that has no other segment fills it as the only slot. Graphs that have others read it, for
all rows at once, and write nothing to it. A ring changes with every token, so slots share none.

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

from . import axes
from .attention import EMPTY_POSITION
from .config import AS_PUBLISHED, Arrangement, DecoderConfig, Window, window_size
from .key_blocks import blocks_shape, num_blocks
from .layer_cache import KeysValues, Latents, LayerCache, PromptLayer
from .layer_groups import block_layers
from .segments import Segments, heads_last, segment_lengths, segment_starts, split_shared
from .stripes import ONE_STRIPE, Stripe


class Positions(NamedTuple):
    """The position that each entry holds; layers that keep the same ones share them."""

    whole_BS: Segments
    """Of layers that keep every position; without segments where all layers are rings."""
    rolling_BS: dict[int, Segments]
    """Of rings, by their number of entries."""

    AXES = (axes.CACHE_POSITIONS, axes.CACHE_POSITIONS)

    def of(self, window: Window) -> Segments:
        """Those of layers with this window."""
        size = self._rolling_size(window)
        return self.whole_BS if size is None else self.rolling_BS[size]

    def entry(self, position_B: jax.Array, window: Window) -> jax.Array:
        """The entry of a token in layers with this window; none of them for an empty position."""
        size = self._rolling_size(window)
        return position_B if size is None else _rolling_entry(position_B, size)

    def map(self, visit: Callable[[Segments], Segments]) -> "Positions":
        """`visit` of the segments of each kind of layers."""
        whole_BS = visit(self.whole_BS) if self.whole_BS else ()
        return Positions(whole_BS, {size: visit(x) for size, x in self.rolling_BS.items()})

    def is_rolling(self, window: Window) -> bool:
        """Whether layers with this window keep rings."""
        return self._rolling_size(window) is not None

    def _rolling_size(self, window: Window) -> int | None:
        """Of the smallest ring that holds the window; None of layers that keep every position."""
        if window is None:
            return None
        return min((size for size in self.rolling_BS if size >= window_size(window)), default=None)


class KVCache(NamedTuple):
    """What all layers keep, and their positions."""

    layers: tuple[LayerCache, ...]
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


def num_cache_entries(window: Window, longest: int, stripes: int = 1) -> int:
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
    chunk: int | None = None,
) -> KVCache:
    """An empty cache of zeros: a NaN in a masked entry would poison its row, so never `empty`.

    `num_heads` are the key/value heads kept, where they are not the model's own ones; `span_slots`
    how many of the slots reach each span, where not all of them do, or 1 for a first span that all
    share. Where prompts come in chunks, all are multiples of `chunk` tokens, and each is written as
    whole blocks of keys.
    """
    K, H = num_heads or config.num_kv_heads, arrangement.cache_dim(config)
    reaching = span_slots or [slots] * len(spans)
    longest = spans[-1] if spans else 0
    num_kept = {window: num_cache_entries(window, longest, stripes) for window in config.windows}
    blocks = [size for size in arrangement.key_blocks if not (chunk or 0) % size]

    def sizes(kept: int) -> list[tuple[int, int]]:
        """Rows and entries of each segment."""
        rows = reaching
        if kept < longest:  # a ring
            rows = [max(reaching[i:]) for i in range(len(reaching))]
        return list(zip(rows, segment_lengths(spans, kept), strict=False))

    def allocate_layers(layers: range) -> LayerCache:
        segments, L = sizes(num_kept[config.windows[layers.start]]), len(layers)
        if config.latent is not None:
            return Latents(tuple(jnp.zeros((L, B, S, H), dtype) for B, S in segments))
        return KeysValues(
            tuple(jnp.zeros((L, B, K, *blocks_shape(H, S, blocks)), dtype) for B, S in segments),
            tuple(jnp.zeros((L, B, K, S, H), dtype) for B, S in segments),
        )

    def positions(kept: int) -> Segments:
        return tuple(jnp.full(size, EMPTY_POSITION, jnp.int32) for size in sizes(kept))

    kept = set(num_kept.values())
    whole_BS = positions(longest) if longest in kept else ()
    rolling_BS = {size: positions(size) for size in kept if size < longest}
    layers = tuple(map(allocate_layers, block_layers(config, arrangement)))
    return KVCache(layers, Positions(whole_BS, rolling_BS))


def match_heads(new: jax.Array, num_heads: int, axis: int = 1) -> jax.Array:
    """Heads in copies as single ones or the other way round: phases may keep them differently."""
    K = new.shape[axis]
    if num_heads < K:
        return jax.lax.slice_in_dim(new, 0, K, K // num_heads, axis)
    return jnp.repeat(new, num_heads // K, axis=axis) if num_heads > K else new


def match_head_dim(new: jax.Array, head_dim: int, axis: int) -> jax.Array:
    """Heads as wide as the cache keeps them, with zeros at their ends."""
    if new.shape[axis] == head_dim:
        return new
    padding = [(0, 0)] * new.ndim
    padding[axis] = (0, head_dim - new.shape[axis])
    return jnp.pad(new, padding)


def append_position(
    positions: Positions, position_B: jax.Array, stripe: Stripe = ONE_STRIPE
) -> Positions:
    """Mark the entry of each row's next token as holding it, where it lies in this stripe.

    A row whose position is empty has no next token.
    """

    def mark(segments: Segments, entry_B: jax.Array) -> Segments:
        index_B = stripe.local_index(entry_B)
        shared, own = split_shared(segments, row_axis=0)
        starts = segment_starts([x_BS.shape[1] for x_BS in segments])[len(shared) :]
        return shared + tuple(
            _mark(segment, position_B, index_B - start)
            for segment, start in zip(own, starts, strict=True)
        )

    rings = {
        size: mark(segments, _rolling_entry(position_B, size))
        for size, segments in positions.rolling_BS.items()
    }
    return Positions(mark(positions.whole_BS, position_B), rings)


def _rolling_entry(position_B: jax.Array, size: int) -> jax.Array:
    return jnp.where(position_B > EMPTY_POSITION, position_B % size, position_B)


def _mark(segment_BS: jax.Array, position_B: jax.Array, index_B: jax.Array) -> jax.Array:
    B, S = segment_BS.shape
    is_entry_BS = jnp.arange(S)[None] == index_B[:B, None]
    return jnp.where(is_entry_BS, position_B[:B, None], segment_BS)


def append(
    layers: LayerCache, new: PromptLayer, entry_B: jax.Array, layer: jax.Array
) -> LayerCache:
    """Write what one layer keeps of one token per row, at its entry if that is here."""

    lengths, starts = layers.lengths, segment_starts(layers.lengths)

    def write(segments: Segments, new: jax.Array, axis: int) -> Segments:
        # without layers, as their number is no axis of what one layer made
        new_BKH = jnp.squeeze(new, axis - 1)
        shared, own = split_shared(segments, row_axis=1)
        ranges = list(zip(lengths, starts, strict=True))[len(shared) :]
        return shared + tuple(
            _write(segment, length, new_BKH, entry_B - start, axis, layer)
            for segment, (length, start) in zip(own, ranges, strict=True)
        )

    return type(layers)(*map(write, layers, new, layers.POSITION_AXES))


def _write(
    segment: jax.Array,
    length: int,
    new_BKH: jax.Array,
    index_B: jax.Array,
    axis: int,
    layer: jax.Array,
) -> jax.Array:
    """Write one entry per row at `index_B` of a segment's `length`; others write nothing.

    The segment leads with layers, and ends with heads' entries and positions in either order; of
    positions it may have blocks.
    NOTE: every head of every entry is an update of its own, at a row and a position. Where heads
    lie along the last axis in memory, XLA for TPU compiles this scatter to one pass over the
    updates. It compiles a scatter of windows that are one position wide to a loop over slots.
    """
    B, size = segment.shape[1], segment.shape[axis]
    count = num_blocks(length, size)
    *_, head_axis = heads_last(segment.ndim, axis)
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
    return at.set(new, mode="drop", unique_indices=True).reshape(segment.shape)
