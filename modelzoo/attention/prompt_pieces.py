"""Pieces of prompts in slots: the entries that a piece sees, and how it is written.

A piece is a whole prompt or a chunk of one. It attends before it is written: to the entries of its
slot below its first position, and to itself as one more segment. So a rolling buffer needs no more
entries than its window, however long a piece is. After the attention of a layer, the piece is
written: as one block of each segment in layers that cache every position, and in rolling buffers as
the latest tokens in place of the oldest. If the cache is in stripes, so is a piece, and every
stripe takes its own tokens.

A chunk lies within the last segment of its graph. If a chunk has n tokens, none of them sees the
last n entries of this segment. A whole prompt begins at position 0, sees only itself, and may
extend over several segments.

Knows nothing of requests, queues or meshes. Guarantees: no entry at or after the first position of
a row is visible, so decode may write to a slot while its prompt is prefilled in chunks; rows of a
slot that the cache does not have write nothing; every write is in place if the cache is donated.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from .. import axes
from ..cache.entry_codes import is_rotated
from ..cache.kv_cache import Positions, match_head_dim, match_heads
from ..cache.layer_state import LayerState, NewEntries
from ..cache.segments import (
    Segments,
    Stripe,
    arrange_at_entries,
    entry_positions,
    heads_last,
    join_blocks,
    num_blocks,
    segment_starts,
    split_blocks,
)
from ..cache.state_spec import StateArray
from ..operations import Operations, rows_of


class PromptPieces(NamedTuple):
    """The rows of a prefill call: the tokens of each row, and the slot they are written to."""

    slot_B: jax.Array
    """The slot of the row; past the last slot for a row that is not written."""
    start_B: jax.Array | None
    """The position of the first token; None for whole prompts, which begin at 0."""
    count_B: jax.Array
    """The number of tokens; the rest of the row is padding."""
    page_BN: jax.Array | None = None
    """The pages of each row's slot up to the span of the graph, past the last page for no page;
    None in a cache without pages."""

    @property
    def first_B(self) -> jax.Array:
        """The position of the first token."""
        return jnp.zeros_like(self.count_B) if self.start_B is None else self.start_B

    def in_stripe(self, stripe: Stripe) -> "PromptPieces":
        """The part of the rows in one stripe; `stripe.count` must divide first positions."""
        start_B = None if self.start_B is None else self.start_B // stripe.count
        return self._replace(start_B=start_B, count_B=stripe.num_tokens(self.count_B))

    def after(self, x_BTD: jax.Array, operations: Operations) -> "PromptPieces":
        """The same rows, with slots that depend on `x_BTD` (see `Operations.after`)."""
        rows = self._replace(slot_B=operations.after(self.slot_B, x_BTD))
        if self.page_BN is None:
            return rows
        return rows._replace(page_BN=operations.after(self.page_BN, x_BTD))


def positions_below(
    positions: Positions, rows: PromptPieces, num_unseen: int, operations: Operations
) -> Positions:
    """The positions of the cache entries that rows see: those below their first positions.

    The last `num_unseen` entries are left out in layers that cache every position. Whole prompts
    see nothing of their slots, so no segment is left.
    """
    if rows.start_B is None:
        return positions.map(lambda segments: ())
    whole_BS, rolling_BS = rows_of_positions(positions, rows.slot_B, operations).below(rows.first_B)
    return Positions(_without_last(whole_BS, num_unseen, axis=1), rolling_BS)


def rows_of_positions(positions: Positions, row_B: jax.Array, operations: Operations) -> Positions:
    """The positions of the entries of some rows of a cache."""
    return positions.map(lambda x: operations.take_rows(x, row_B, axes.CACHE_POSITIONS))


def layer_of_slots(
    state: LayerState,
    layer: jax.Array,
    slot_B: jax.Array,
    num_unseen: int,
    num_heads: int,
    head_dim: int,
    operations: Operations,
) -> LayerState:
    """The memory of one layer in some slots, in the form that attention takes it.

    Args:
      state: The memory of the block that the layer belongs to.
      layer: The index of the layer in the arrays.
      slot_B: The slots.
      num_unseen: The number of last entries to leave out.
      num_heads: The key/value heads to return, copies included; not used for latents.
      head_dim: The head size to return; the zeros that pad a head are left out. Entries that are
        rotated (`entry_codes`) keep the head size of the cache.
      operations: The operations by which the cache is laid out.

    Returns:
      Entries with one layer and one row per slot, and with keys out of their blocks.
    """

    def take(segments: Segments, array: StateArray) -> Segments:
        axis, feature_axis = array.position_axis - 1, array.feature_axis
        taken = operations.take_rows(segments, slot_B, array.axes, layer)
        taken = tuple(map(partial(_without_blocks, axis=axis), taken, state.lengths))
        # slicing after the gather: a slice of all slots would be a copy
        taken = _without_last(taken, num_unseen, axis)
        # the zeros that pad a rotated head are rotated, too
        if feature_axis is not None and not is_rotated(array.dtype):
            taken = tuple(
                jax.lax.slice_in_dim(x, 0, head_dim, axis=feature_axis - 1) for x in taken
            )
        if array.has_kv_heads:
            taken = tuple(match_heads(x, num_heads) for x in taken)
        return tuple(x[None] for x in taken)

    return state.map(take)


def _without_last(segments: Segments, num_entries: int, axis: int) -> Segments:
    """Segments without the last `num_entries` entries, all of which are in the last segment."""
    if not segments or not num_entries:
        return segments
    *others, last = segments
    if num_entries == last.shape[axis]:
        return tuple(others)
    return (*others, jax.lax.slice_in_dim(last, 0, last.shape[axis] - num_entries, axis=axis))


class _Write(NamedTuple):
    """The target of a write: arrays that `write_rows` passes to every device."""

    slot_B: jax.Array
    start_B: jax.Array | None
    count_B: jax.Array
    layer: jax.Array


def write_piece(
    state: LayerState,
    new: NewEntries,
    layer: jax.Array,
    rows: PromptPieces,
    is_rolling: bool,
    operations: Operations,
) -> LayerState:
    """Write the new entries of a piece to one layer of the cache.

    Args:
      state: The memory of the block that the layer belongs to.
      new: The new entries, in the stripes of the cache.
      layer: The index of the layer in the arrays.
      rows: The rows of the call.
      is_rolling: Whether the layer has a rolling buffer.
      operations: The operations by which the cache is laid out.
    """
    if not state.lengths:  # a cache without entries
        return state
    write = _write_rolling if is_rolling else _write_blocks
    ranges = _segment_ranges([length // operations.cache_stripes.count for length in state.lengths])

    def write_array(old: Segments, array: StateArray, new: jax.Array) -> Segments:
        axis, feature_axis = array.position_axis, array.feature_axis
        if array.has_kv_heads:
            new = match_heads(new, old[0].shape[array.axes.index(axes.KV_HEADS)])

        def body(old: Segments, new: jax.Array, target: _Write) -> Segments:
            slot_B, start_B, count_B, layer = target
            # padded on each device, so that zeros are not sent
            if feature_axis is not None:
                count = num_blocks(ranges[0].length, old[0].shape[axis])
                head_dim = old[0].shape[feature_axis] // count
                new = match_head_dim(new, head_dim, feature_axis)
            rows = PromptPieces(slot_B, start_B, count_B).in_stripe(operations.stripe)
            return write(old, ranges, new[0], rows, axis, layer)

        target = _Write(rows.slot_B, rows.start_B, rows.count_B, layer)
        return operations.write_rows(body, old, new[None], target, array.axes)

    # in codes before rows are sent to the devices of their slots, as codes are fewer bytes
    return state.map(write_array, state.spec.encode(new))


def write_positions(
    positions: Positions, position_BT: jax.Array, rows: PromptPieces, operations: Operations
) -> Positions:
    """Write the positions of a piece to its entries; padding has empty positions."""

    def write_segments(write: Callable[..., Segments], old: Segments) -> Segments:
        lengths = [x_BS.shape[1] // operations.cache_stripes.count for x_BS in old]
        ranges = _segment_ranges(lengths)

        def body(old: Segments, new: jax.Array, rows: PromptPieces) -> Segments:
            return write(old, ranges, new, rows.in_stripe(operations.stripe), axis=1)

        return operations.write_rows(body, old, position_BT, rows, axes.CACHE_POSITIONS)

    whole_BS, rolling_BS = positions
    return Positions(
        write_segments(_write_blocks, whole_BS) if whole_BS else (),
        {size: write_segments(_write_rolling, segments) for size, segments in rolling_BS.items()},
    )


class _SegmentRange(NamedTuple):
    """The entries of a segment, numbered over all segments."""

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
    """Write each chunk as one block of the last segment, or a whole prompt as a block per segment.

    Padding is written, too; its positions are empty.
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
    """Write the latest tokens of each row to a rolling buffer; other entries keep their tokens."""
    starts, lengths = zip(*ranges, strict=True)
    size, row_axis = sum(lengths), 0 if layer is None else 1
    if rows.start_B is None and new.shape[axis - row_axis] <= size:
        return _write_blocks(segments, ranges, new, rows, axis, layer)

    def merge_row(old: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
        shape = [1] * old.ndim
        shape[axis - row_axis - 1] = size
        is_new_S = entry_positions(start + count, size) >= start
        fresh = arrange_at_entries(new, start, count, size, axis - row_axis - 1)
        return jnp.where(is_new_S.reshape(shape), fresh, old)

    slots = [rows_of(x, rows.slot_B, layer) for x in segments]
    slots = map(partial(_without_blocks, axis=axis - row_axis), slots, lengths)
    old = jnp.concatenate(list(slots), axis=axis - row_axis)
    buffer = jax.vmap(merge_row)(old, new.astype(old.dtype), rows.first_B, rows.count_B)
    pieces = jnp.split(buffer, starts[1:], axis=axis - row_axis)
    first_B = jnp.zeros_like(rows.slot_B)
    return tuple(
        _put(old, length, piece, rows.slot_B, first_B, axis, layer)
        for old, length, piece in zip(segments, lengths, pieces, strict=True)
    )


def _without_blocks(x: jax.Array, length: int, axis: int) -> jax.Array:
    """Entries of rows without blocks, with `length` entries along `axis`."""
    return x if x.shape[axis] == length else join_blocks(x, length)


def _put(
    segment: jax.Array,
    length: int,
    new: jax.Array,
    slot_B: jax.Array,
    index_B: jax.Array,
    axis: int,
    layer: jax.Array | None,
) -> jax.Array:
    """Write the entries of each row to a segment of `length` entries, from entry `index_B` on.

    Keys in blocks are written in whole blocks, with zeros after the end of `new`. Then every
    `index_B` must be the first position of a block.
    """
    size = segment.shape[axis]
    if size == length:
        return put_blocks(segment, new, slot_B, index_B, axis, layer)
    head_axis = axis - 1
    H = segment.shape[head_axis] // num_blocks(length, size)
    return put_blocks(
        segment, split_blocks(new, size), slot_B, index_B // size * H, head_axis, layer
    )


def put_blocks(
    x: jax.Array,
    blocks: jax.Array,
    slot_B: jax.Array,
    index_B: jax.Array,
    axis: int,
    layer: jax.Array | None = None,
) -> jax.Array:
    """Write block b to slot `slot_B[b]`, at index `index_B[b]` of `axis`, unless it is outside.

    If `layer` is given, the first axis of `x` is layers. The write is one scatter: with one slice
    update per row, XLA for CPU takes more than twice as long to compile a graph, and five times as
    long to load it.
    """
    layer_B = () if layer is None else (jnp.full_like(slot_B, layer),)
    row_axis = len(layer_B)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, blocks.ndim)),
        inserted_window_dims=tuple(range(row_axis + 1)),
        scatter_dims_to_operand_dims=(*range(row_axis + 1), axis),
    )
    return jax.lax.scatter(
        x,
        jnp.stack([*layer_B, slot_B, index_B], axis=1),
        _with_heads_last(blocks.astype(x.dtype), axis - row_axis),
        dimensions,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )


def _with_heads_last(blocks: jax.Array, axis: int) -> jax.Array:
    """Give blocks the memory layout of the cache on TPU, with head features as minor dimension.

    NOTE: otherwise XLA for TPU gives the cache the memory layout in which a projection writes the
    blocks, and copies the cache to this layout and back in every call.
    """
    is_scales = blocks.ndim == 3 and axis == 2
    if blocks.ndim < 3 or is_scales:
        return blocks
    layout = Layout(major_to_minor=heads_last(blocks.ndim, axis))
    constrain = partial(with_layout_constraint, layouts=layout)
    return jax.lax.platform_dependent(blocks, tpu=constrain, default=lambda blocks: blocks)
