"""A piece of a prompt beside the cache: what it sees of its slot, and how it is written there.

A piece attends before it is written: to what its slot holds from below its first position, and to
itself as to one more segment. So a ring needs no entry more than its window, however long a piece
is. Then whole layers get the piece as one block, and rings the latest tokens in place of the oldest
ones. Where the cache is dealt out in stripes a piece is, too: every stripe keeps its own tokens.

A piece that goes on lies within the last segment, so no token of it sees the last entries of that,
as many as the piece has tokens. A whole prompt begins at position 0, sees only itself, and may lie
in several segments. Segments that all slots share are read and not written.

Knows nothing of prompts, queues or meshes. Guarantees: nothing at or after a row's first position
is seen, so a slot that decode writes to while it fills up shows nothing of that; rows of a slot
that the cache does not have write nothing; every block is written in place where the cache is
donated.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from . import axes
from .attention import EMPTY_POSITION
from .key_blocks import in_blocks, joined, num_blocks
from .kv_cache import Positions, match_head_dim, match_heads
from .layer_cache import LayerCache, PromptLayer
from .operations import Axes, Operations, rows_of
from .segments import (
    Segments,
    arrange_at_entries,
    entry_positions,
    heads_last,
    segment_starts,
    split_shared,
)
from .stripes import Stripe


class PromptPieces(NamedTuple):
    """The tokens that each row of a prefill call has, and the slot that keeps them."""

    slot_B: jax.Array
    """The slot that keeps the row's prompt; past the slots for a row that is kept nowhere."""
    start_B: jax.Array | None
    """Position of the first token; None for whole prompts, which begin at 0."""
    count_B: jax.Array
    """Tokens; the rest of the row is padding."""

    @property
    def first_B(self) -> jax.Array:
        """Position of the first token."""
        return jnp.zeros_like(self.count_B) if self.start_B is None else self.start_B

    def of(self, stripe: Stripe) -> "PromptPieces":
        """The rows as one stripe has them; first positions divide by the number of stripes."""
        start_B = None if self.start_B is None else self.start_B // stripe.count
        return PromptPieces(self.slot_B, start_B, stripe.num_tokens(self.count_B))

    def after(self, x_BTD: jax.Array, operations: Operations) -> "PromptPieces":
        """The same rows, their slots not known before `x_BTD` is computed."""
        return self._replace(slot_B=operations.after(self.slot_B, x_BTD))


def positions_below(
    positions: Positions, rows: PromptPieces, num_unseen: int, operations: Operations
) -> Positions:
    """The positions that the slots of rows hold below the rows' first ones.

    Of layers that keep every position the last `num_unseen` entries are left out.
    """

    def take(segments: Segments) -> Segments:
        shared, own = split_shared(segments, row_axis=0)
        taken = operations.take_rows(own, rows.slot_B, axes.CACHE_POSITIONS)
        first_B1 = rows.first_B[:, None]
        below = tuple(jnp.where(x_BS < first_B1, x_BS, EMPTY_POSITION) for x_BS in taken)
        # every row begins after what all share
        return shared + below

    whole_BS, rolling_BS = positions.map(take)
    return Positions(_without_last(whole_BS, num_unseen, axis=1), rolling_BS)


def layer_of_slots(
    layers: LayerCache,
    layer: jax.Array,
    slot_B: jax.Array,
    num_unseen: int,
    num_heads: int,
    head_dim: int,
    operations: Operations,
) -> LayerCache:
    """The entries of one layer in the slots of rows, with `num_heads` where it keeps heads.

    The last `num_unseen` entries are left out, and so are zeros that follow `head_dim` numbers of a
    head. Keys come out of their blocks.
    """

    def take(segments: Segments, axis: int, logical_axes: Axes) -> Segments:
        shared, own = split_shared(segments, axes.row_axis(logical_axes))
        taken = operations.take_rows(own, slot_B, logical_axes, layer)
        if shared:
            taken = operations.take_rows(shared, slot_B[:1] * 0, logical_axes, layer) + taken
        taken = tuple(map(partial(_without_blocks, axis=axis - 1), taken, layers.lengths))
        # of all slots, a part without the last entries would be a copy
        taken = _without_last(taken, num_unseen, axis - 1)
        *_, head_axis = heads_last(len(logical_axes) - 1, axis - 1)
        taken = tuple(jax.lax.slice_in_dim(x, 0, head_dim, axis=head_axis) for x in taken)
        if axes.KV_HEADS in logical_axes:
            taken = tuple(match_heads(x, num_heads) for x in taken)
        return tuple(x[None] for x in taken)

    return type(layers)(*map(take, layers, layers.POSITION_AXES, layers.AXES))


def _without_last(segments: Segments, num_entries: int, axis: int) -> Segments:
    """Segments without the last entries of the last of them, which has at least so many."""
    if not segments or not num_entries:
        return segments
    *others, last = segments
    if num_entries == last.shape[axis]:
        return tuple(others)
    return (*others, jax.lax.slice_in_dim(last, 0, last.shape[axis] - num_entries, axis=axis))


class _Write(NamedTuple):
    """The ranges that rows are written to: arrays that `write_rows` gives to every device."""

    slot_B: jax.Array
    start_B: jax.Array | None
    count_B: jax.Array
    layer: jax.Array


def write_piece(
    layers: LayerCache,
    new: PromptLayer,
    layer: jax.Array,
    rows: PromptPieces,
    is_rolling: bool,
    operations: Operations,
) -> LayerCache:
    """The layers with the tokens of a piece at their entries of one layer."""
    write = _write_rolling if is_rolling else _write_blocks
    lengths = [length // operations.cache_stripes.count for length in layers.lengths]

    def keep(old: Segments, new: jax.Array, axis: int, names: Axes) -> Segments:
        if not old:  # nothing is kept
            return old
        shared, own = split_shared(old, axes.row_axis(names))
        ranges = _segment_ranges(lengths)[len(shared) :]
        if axes.KV_HEADS in names:
            new = match_heads(new, old[0].shape[names.index(axes.KV_HEADS)])
        *_, head_axis = heads_last(old[0].ndim, axis)

        def body(old: Segments, new: jax.Array, where: _Write) -> Segments:
            slot_B, start_B, count_B, layer = where
            # here, as zeros need not be sent
            count = num_blocks(ranges[0].length, old[0].shape[axis])
            head_dim = old[0].shape[head_axis] // count
            new = match_head_dim(new, head_dim, head_axis)
            rows = PromptPieces(slot_B, start_B, count_B).of(operations.stripe)
            return write(old, ranges, new[0], rows, axis, layer)

        return shared + operations.write_rows(body, own, new[None], _Write(*rows, layer), names)

    return type(layers)(*map(keep, layers, new, layers.POSITION_AXES, layers.AXES))


def write_positions(
    positions: Positions, position_BT: jax.Array, rows: PromptPieces, operations: Operations
) -> Positions:
    """The cache's entries under the positions of a piece, which are empty where it is padded."""

    def marked(write: Callable[..., Segments], old: Segments) -> Segments:
        shared, own = split_shared(old, row_axis=0)
        lengths = [x_BS.shape[1] // operations.cache_stripes.count for x_BS in old]
        ranges = _segment_ranges(lengths)[len(shared) :]

        def body(old: Segments, new: jax.Array, rows: PromptPieces) -> Segments:
            return write(old, ranges, new, rows.of(operations.stripe), axis=1)

        return shared + operations.write_rows(body, own, position_BT, rows, axes.CACHE_POSITIONS)

    whole_BS, rolling_BS = positions
    return Positions(
        marked(_write_blocks, whole_BS) if whole_BS else (),
        {size: marked(_write_rolling, segments) for size, segments in rolling_BS.items()},
    )


class _SegmentRange(NamedTuple):
    """The entries that a segment has, counted over all segments."""

    start: int
    length: int


def _segment_ranges(lengths: Sequence[int]) -> list[_SegmentRange]:
    return list(map(_SegmentRange, segment_starts(lengths), lengths))


def _write_blocks(
    segments: Segments,
    ranges: Sequence[_SegmentRange],
    new: jax.Array,
    rows: PromptPieces,
    axis: int,
    layer: jax.Array | None = None,
) -> Segments:
    """Each row as one block of the last segment, or a whole prompt as one of every segment.

    Padding is written too, under empty positions.
    """
    if rows.start_B is not None:
        *others, last = segments
        start, length = ranges[-1]
        index_B = rows.start_B - start
        return (*others, _put(last, length, new, rows.slot_B, index_B, axis, layer))
    new_axis = axis if layer is None else axis - 1
    T, first_B = new.shape[new_axis], jnp.zeros_like(rows.slot_B)

    def write(segment: jax.Array, segment_range: _SegmentRange) -> jax.Array:
        start, length = segment_range
        if start >= T:
            return segment
        block = jax.lax.slice_in_dim(new, start, min(T, start + length), axis=new_axis)
        return _put(segment, length, block, rows.slot_B, first_B, axis, layer)

    return tuple(map(write, segments, ranges))


def _write_rolling(
    segments: Segments,
    ranges: Sequence[_SegmentRange],
    new: jax.Array,
    rows: PromptPieces,
    axis: int,
    layer: jax.Array | None = None,
) -> Segments:
    """The latest tokens of each row, and what the ring had at the entries that they leave."""
    starts, lengths = zip(*ranges, strict=True)
    size, row_axis = sum(lengths), 0 if layer is None else 1
    if rows.start_B is None and new.shape[axis - row_axis] <= size:
        return _write_blocks(segments, ranges, new, rows, axis, layer)

    def merged(old: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
        shape = [1] * old.ndim
        shape[axis - row_axis - 1] = size
        is_new_S = entry_positions(start + count, size) >= start
        fresh = arrange_at_entries(new, start, count, size, axis - row_axis - 1)
        return jnp.where(is_new_S.reshape(shape), fresh, old)

    of_rows = [rows_of(x, rows.slot_B, layer) for x in segments]
    of_rows = map(partial(_without_blocks, axis=axis - row_axis), of_rows, lengths)
    old = jnp.concatenate(list(of_rows), axis=axis - row_axis)
    ring = jax.vmap(merged)(old, new.astype(old.dtype), rows.first_B, rows.count_B)
    pieces = jnp.split(ring, starts[1:], axis=axis - row_axis)
    first_B = jnp.zeros_like(rows.slot_B)
    return tuple(
        _put(old, length, piece, rows.slot_B, first_B, axis, layer)
        for old, length, piece in zip(segments, lengths, pieces, strict=True)
    )


def _without_blocks(x: jax.Array, length: int, axis: int) -> jax.Array:
    """Entries of rows in the order of positions, of which there are `length` along `axis`."""
    return x if x.shape[axis] == length else joined(x, length)


def _put(
    segment: jax.Array,
    length: int,
    new: jax.Array,
    slot_B: jax.Array,
    index_B: jax.Array,
    axis: int,
    layer: jax.Array | None,
) -> jax.Array:
    """Write each row's entries, from the `index_B`th of its segment's `length` on.

    Into keys in blocks whole blocks are written, with zeros where `new` ends before a block does:
    indices are of first positions of blocks.
    """
    size = segment.shape[axis]
    if size == length:
        return put_blocks(segment, new, slot_B, index_B, axis, layer)
    head_axis = axis - 1
    H = segment.shape[head_axis] // num_blocks(length, size)
    return put_blocks(segment, in_blocks(new, size), slot_B, index_B // size * H, head_axis, layer)


def put_blocks(
    x: jax.Array,
    blocks: jax.Array,
    slot_B: jax.Array,
    index_B: jax.Array,
    axis: int,
    layer: jax.Array | None = None,
) -> jax.Array:
    """Write block b at slot `slot_B[b]` and `index_B[b]` of `axis`; one that lies outside is not.

    With a layer `x` leads with layers. As one scatter: with a slice for each row XLA's CPU backend
    takes more than twice as long to compile a graph, and five times as long to load it.
    """
    of_layer = () if layer is None else (jnp.full_like(slot_B, layer),)
    row_axis = len(of_layer)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, blocks.ndim)),
        inserted_window_dims=tuple(range(row_axis + 1)),
        scatter_dims_to_operand_dims=(*range(row_axis + 1), axis),
    )
    return jax.lax.scatter(
        x,
        jnp.stack([*of_layer, slot_B, index_B], axis=1),
        _with_heads_last(blocks.astype(x.dtype), axis - row_axis),
        dimensions,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )


def _with_heads_last(blocks: jax.Array, axis: int) -> jax.Array:
    """Blocks that lie on a TPU as its caches do, with heads' entries along the last axis.

    NOTE: blocks come in the order in which a projection made them, and XLA for TPU would lay the
    cache out like them: every call would copy it there and back.
    """
    if blocks.ndim < 3:
        return blocks
    layout = Layout(major_to_minor=heads_last(blocks.ndim, axis))
    lay = partial(with_layout_constraint, layouts=layout)
    return jax.lax.platform_dependent(blocks, tpu=lay, default=lambda blocks: blocks)
