"""Pieces of prompts in a cache in pages: the entries that a piece sees, and how it is written.

As in a cache with slots (`prompt_pieces`), a piece attends before it is written: to the entries of
its row below its first position, and to itself as one more segment. The pages of its row are
gathered to one segment. A piece is written in blocks, each of which lies in one page: a piece of n
tokens begins at a multiple of n, or at 0.

Knows nothing of requests, queues or meshes. Guarantees: no entry at or after the first position of
a row is visible; rows without pages write nothing; every write is in place if the cache is donated.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..cache.entry_codes import is_rotated
from ..cache.kv_cache import Positions, match_head_dim, match_heads
from ..cache.layer_state import LayerState, NewEntries
from ..cache.segments import EMPTY_POSITION, Segments
from ..cache.state_spec import StateArray
from ..operations import Operations
from .prompt_pieces import PromptPieces, put_blocks


def positions_in_pages(rows: PromptPieces, num_tokens: int, page: int) -> Positions:
    """The positions of the entries that `layer_of_pages` returns, as far as rows see them."""
    assert rows.page_BN is not None
    if rows.start_B is None:
        return Positions((), {})
    entry_1S = jnp.arange(_num_seen(rows, num_tokens, page))[None]
    position_BS = jnp.where(entry_1S < rows.start_B[:, None], entry_1S, EMPTY_POSITION)
    return Positions((position_BS,) if position_BS.shape[1] else (), {})


def layer_of_pages(
    state: LayerState,
    layer: jax.Array,
    rows: PromptPieces,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    operations: Operations,
) -> LayerState:
    """The entries of one layer in the pages of some rows, in the form that attention takes them.

    Args:
      state: The memory of the block that the layer belongs to.
      layer: The index of the layer in the arrays.
      rows: The rows of a call.
      num_tokens: The tokens of a piece. As many last entries are left out: no token sees them.
      num_heads: The key/value heads to return, copies included; not used for latents.
      head_dim: The head size to return; entries that are rotated keep the head size of the cache.
      operations: The operations by which the cache is laid out.
    """
    assert rows.page_BN is not None
    B, N = rows.page_BN.shape
    page_M = rows.page_BN.reshape(-1)

    def take(segments: Segments, array: StateArray) -> Segments:
        axis, feature_axis = array.position_axis - 1, array.feature_axis
        (taken,) = operations.take_rows(segments, page_M, array.axes, layer)
        size = _num_seen(rows, num_tokens, taken.shape[axis])
        if not size:
            return ()
        # [B, N, ..., page, ...] to [B, ..., N * page, ...]
        taken = jnp.moveaxis(taken.reshape(B, N, *taken.shape[1:]), 1, axis)
        shape = taken.shape
        taken = taken.reshape(*shape[:axis], -1, *shape[axis + 2 :])
        taken = jax.lax.slice_in_dim(taken, 0, size, axis=axis)
        # the zeros that pad a rotated head are rotated, too
        if feature_axis is not None and not is_rotated(array.dtype):
            taken = jax.lax.slice_in_dim(taken, 0, head_dim, axis=feature_axis - 1)
        if array.has_kv_heads:
            taken = match_heads(taken, num_heads)
        return (taken[None],)

    return state.map(take)


def _num_seen(rows: PromptPieces, num_tokens: int, page: int) -> int:
    """The entries in the pages of a row, without the last ones, which no token of a piece sees."""
    assert rows.page_BN is not None
    return max(0, rows.page_BN.shape[1] * page - num_tokens)


class _Target(NamedTuple):
    """The target of the blocks of a write: arrays that `write_rows` passes to every device."""

    page_M: jax.Array
    entry_M: jax.Array
    layer: jax.Array


def write_to_pages(
    state: LayerState,
    new: NewEntries,
    layer: jax.Array,
    rows: PromptPieces,
    operations: Operations,
) -> LayerState:
    """Write the new entries of a piece to one layer of the cache; padding is written, too.

    Args:
      state: The memory of the block that the layer belongs to.
      new: The new entries.
      layer: The index of the layer in the arrays.
      rows: The rows of the call.
      operations: The operations by which the cache is laid out.
    """

    def write_array(old: Segments, array: StateArray, new: jax.Array) -> Segments:
        axis, feature_axis = array.position_axis, array.feature_axis
        page, num_tokens = old[0].shape[axis], new.shape[axis - 1]
        size = min(page, num_tokens)
        if rows.start_B is not None:
            size = math.gcd(page, num_tokens)
        if array.has_kv_heads:
            new = match_heads(new, old[0].shape[array.axes.index(axes.KV_HEADS)])

        def body(old: Segments, new: jax.Array, target: _Target) -> Segments:
            page_M, entry_M, layer = target
            if feature_axis is not None:
                new = match_head_dim(new, old[0].shape[feature_axis], feature_axis)
            blocks = _split(new[0], size, axis - 1)
            return (put_blocks(old[0], blocks, page_M, entry_M, axis, layer),)

        target = _Target(*_places(rows, num_tokens, size, page), layer)
        return operations.write_rows(body, old, new[None], target, array.axes)

    # in codes before rows are sent to the devices of their pages, as codes are fewer bytes
    return state.map(write_array, state.spec.encode(new))


def _places(
    rows: PromptPieces, num_tokens: int, size: int, page: int
) -> tuple[jax.Array, jax.Array]:
    """The page and the first entry of each block of `size` tokens of all rows."""
    assert rows.page_BN is not None
    first_BJ = rows.first_B[:, None] + size * jnp.arange(-(-num_tokens // size))[None]
    index_BJ = jnp.minimum(first_BJ // page, rows.page_BN.shape[1] - 1)
    page_BJ = jnp.take_along_axis(rows.page_BN, index_BJ, axis=1)
    return page_BJ.reshape(-1), (first_BJ % page).reshape(-1)


def _split(new: jax.Array, size: int, axis: int) -> jax.Array:
    """Cut each row along its tokens into blocks of `size`, which become rows."""
    count = -(-new.shape[axis] // size)
    padding = [(0, 0)] * new.ndim
    padding[axis] = (0, count * size - new.shape[axis])
    new = jnp.pad(new, padding)
    new = new.reshape(*new.shape[:axis], count, size, *new.shape[axis + 1 :])
    new = jnp.moveaxis(new, axis, 1)
    return new.reshape(-1, *new.shape[2:])
