"""A chunk of a prompt beside the cache: what it sees of its slot, and how it is kept there.

A chunk attends before it is kept: to what its slot holds from below its first position, and to
itself as to one more segment. So a ring needs no entry more than its window, however long a chunk
is. Then whole layers get the chunk as one block, and rings the latest tokens in place of the oldest
ones. Where the cache is dealt out in stripes a chunk is, too: every stripe keeps its own tokens.

A chunk lies within the last segment, so no token of it sees the last entries of that, as many as
the chunk has tokens: a chunk that begins a prompt in a segment of its own size sees itself alone.

Knows nothing of prompts, queues or meshes. Guarantees: nothing at or after a row's first position
is seen, so a slot that decode writes to while it fills up shows nothing of that; rows of a slot
that the cache does not have write nothing; every block is written in place where the cache is
donated.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import axes
from .attention import EMPTY_POSITION
from .kept_layers import OneLayer, PromptLayer
from .kv_cache import Positions, match_heads
from .operations import Axes, Operations, rows_of
from .segments import Segments, at_entries, held_positions, num_entries, segment_starts
from .stripes import Stripe


class ChunkRows(NamedTuple):
    """Which tokens each row of a chunk call has."""

    slot_B: jax.Array
    """Where the row's prompt is kept; past the slots for a dummy row."""
    start_B: jax.Array
    """Position of the first token. The chunk lies within the last segment, padding included."""
    count_B: jax.Array
    """Tokens; the rest of the row is padding."""

    def of(self, stripe: Stripe) -> "ChunkRows":
        """The rows as one stripe has them; first positions divide by the number of stripes."""
        start_B = self.start_B // stripe.count
        return ChunkRows(self.slot_B, start_B, stripe.num_tokens(self.count_B))

    def after(self, x_BTKGH: jax.Array, operations: Operations) -> "ChunkRows":
        """The same rows, their slots not known before `x_BTKGH` is computed."""
        return self._replace(slot_B=operations.after(self.slot_B, x_BTKGH))


def positions_below(
    positions: Positions, rows: ChunkRows, num_unseen: int, operations: Operations
) -> Positions:
    """The positions that the slots of rows hold below the rows' first ones.

    Of layers that keep every position the last `num_unseen` entries are left out.
    """

    def take(position_BS: jax.Array) -> jax.Array:
        taken_BS = operations.take_rows(position_BS, rows.slot_B, axes.CACHE_POSITIONS)
        return jnp.where(taken_BS < rows.start_B[:, None], taken_BS, EMPTY_POSITION)

    whole_BS = _without_last(positions.whole_BS, num_unseen, axis=1)
    return jax.tree.map(take, Positions(whole_BS, positions.ring_BS))


def layer_of_slots(
    layer: OneLayer,
    slot_B: jax.Array,
    num_unseen: int,
    num_heads: int,
    operations: Operations,
) -> OneLayer:
    """What the slots of rows keep of a layer, with `num_heads` where it keeps heads.

    The last `num_unseen` entries are left out.
    """

    def take(segments: Segments, axis: int, logical_axes: Axes) -> Segments:
        segments = _without_last(segments, num_unseen, axis)
        taken = (operations.take_rows(x, slot_B, logical_axes) for x in segments)
        if axes.KV_HEADS in logical_axes:
            taken = (match_heads(x, num_heads) for x in taken)
        return tuple(taken)

    return type(layer)(*map(take, layer, layer.POSITION_AXES, layer.AXES))


def _without_last(segments: Segments, num_entries: int, axis: int) -> Segments:
    """Segments without the last entries of the last of them, which has at least so many."""
    if not segments or not num_entries:
        return segments
    *others, last = segments
    if num_entries == last.shape[axis]:
        return tuple(others)
    return (*others, jax.lax.slice_in_dim(last, 0, last.shape[axis] - num_entries, axis=axis))


def with_chunk(layer: OneLayer, made: PromptLayer) -> OneLayer:
    """A layer with a chunk as its last segment."""
    return type(layer)(*((*old, new) for old, new in zip(layer, made, strict=True)))


def keep_chunk(
    layer: OneLayer, made: PromptLayer, rows: ChunkRows, is_ring: bool, operations: Operations
) -> OneLayer:
    """The layer with a chunk's tokens at their entries."""
    write = _write_ring if is_ring else _write_blocks
    arrays = zip(layer, made, layer.POSITION_AXES, layer.AXES, strict=True)
    return type(layer)(*(_keep(write, rows, operations, *array) for array in arrays))


def keep_positions(
    positions: Positions, position_BT: jax.Array, rows: ChunkRows, operations: Operations
) -> Positions:
    """The cache's entries under the positions of a chunk, which are empty where it is padded."""

    def marked(write: _Write, old: Segments) -> Segments:
        return _keep(write, rows, operations, old, position_BT, 1, axes.CACHE_POSITIONS)

    whole_BS, ring_BS = positions
    return Positions(
        marked(_write_blocks, whole_BS) if whole_BS else (),
        {size: marked(_write_ring, segments) for size, segments in ring_BS.items()},
    )


_Write = Callable[[Segments, jax.Array, ChunkRows, int], Segments]
"""Segments with the tokens of rows along an axis."""


def _keep(
    write: _Write, rows: ChunkRows, operations: Operations, old: Segments, new: jax.Array,
    axis: int, names: Axes,
) -> Segments:  # fmt: skip
    if axes.KV_HEADS in names:
        new = match_heads(new, old[0].shape[1])

    def body(old: Segments, new: jax.Array, rows: ChunkRows) -> Segments:
        return write(old, new, rows.of(operations.stripe), axis)

    return operations.write_rows(body, old, new, rows, names)


def _write_blocks(segments: Segments, new: jax.Array, rows: ChunkRows, axis: int) -> Segments:
    """Each row as one block of the last segment, its padding too, under empty positions."""
    *others, last = segments
    index_B = rows.start_B - segment_starts(segments, axis)[-1]
    return (*others, put_blocks(last, new, rows.slot_B, index_B, axis))


def _write_ring(segments: Segments, new: jax.Array, rows: ChunkRows, axis: int) -> Segments:
    """The latest tokens of each row, and what the ring had at the entries that they leave."""
    size = num_entries(segments, axis)

    def merged(old: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
        shape = [1] * old.ndim
        shape[axis - 1] = size
        is_new_S = held_positions(start + count, size) >= start
        fresh = at_entries(new, start, count, size, axis - 1)
        return jnp.where(is_new_S.reshape(shape), fresh, old)

    old = jnp.concatenate([rows_of(x, rows.slot_B) for x in segments], axis=axis)
    ring = jax.vmap(merged)(old, new.astype(old.dtype), rows.start_B, rows.count_B)
    pieces = jnp.split(ring, segment_starts(segments, axis)[1:], axis=axis)
    first_B = jnp.zeros_like(rows.slot_B)
    return tuple(
        put_blocks(old, piece, rows.slot_B, first_B, axis)
        for old, piece in zip(segments, pieces, strict=True)
    )


def put_blocks(
    x: jax.Array, blocks: jax.Array, slot_B: jax.Array, index_B: jax.Array, axis: int
) -> jax.Array:
    """Write block b at slot `slot_B[b]` and `index_B[b]` of `axis`; one that lies outside is not.

    As one scatter: with a slice for each row XLA's CPU backend takes more than twice as long to
    compile a graph, and five times as long to load it.
    """
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, x.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, axis),
    )
    return jax.lax.scatter(
        x,
        jnp.stack([slot_B, index_B], axis=1),
        blocks.astype(x.dtype),
        dimensions,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )
