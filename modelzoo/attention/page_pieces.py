"""Writes of prompts to a cache in pages, in blocks of tokens each of which lies in one page.

A piece of n tokens begins at a multiple of n, and a whole prompt at 0. Padding is written, too: no
query sees what follows the last token of a row, and it is written again before one does. But the
portable form multiplies it by weights of zero, so it must be finite.

Knows nothing of attention, requests, queues or meshes. Guarantees: rows without pages write
nothing; every write is in place if the cache is donated.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..cache.kv_cache import match_head_dim, match_heads
from ..cache.layer_state import LayerState, NewEntries
from ..cache.pages import NO_PAGE, latest_pages, with_order_on_cpu
from ..cache.segments import ONE_STRIPE, Segments, Stripe
from ..cache.state_spec import StateArray
from ..operations import Operations
from .prompt_pieces import PromptPieces, put_blocks


class _Target(NamedTuple):
    """The target of the blocks of a write: arrays that `write_rows` passes to every device."""

    page_M: jax.Array
    entry_M: jax.Array
    layer: jax.Array


def write_pieces(
    state: LayerState,
    new: NewEntries,
    page_BN: jax.Array,
    first_B: jax.Array,
    layer: jax.Array,
    stripe: Stripe = ONE_STRIPE,
) -> LayerState:
    """Write the new entries of pieces of prompts to one layer of the pages on this device.

    Args:
      state: The memory of the block that the layer belongs to.
      new: The new entries, with the heads of the cache.
      page_BN: The pages of each row.
      first_B: The position of the first token of each row, a multiple of the tokens of a piece.
      layer: The index of the layer in the arrays.
      stripe: The stripe of entries that the pages here have. Its count divides the tokens.
    """

    def write_array(old: Segments, array: StateArray, new: jax.Array) -> Segments:
        axis = array.position_axis
        new = _of_stripe(new, axis - 1, stripe)
        size = math.gcd(old[0].shape[axis], new.shape[axis - 1])
        first_here_B = first_B // stripe.count
        places = _places(page_BN, first_here_B, new.shape[axis - 1], size, old[0].shape[axis])
        return _put(old, new, _Target(*places, layer), array, size)

    return state.map(write_array, state.spec.encode(new))


def write_prompts(
    state: LayerState,
    new: NewEntries,
    layer: jax.Array,
    rows: PromptPieces,
    operations: Operations,
) -> LayerState:
    """Write the new entries of whole prompts to one layer of the cache.

    Args:
      state: The memory of the block that the layer belongs to.
      new: The new entries, in the stripes of the cache.
      layer: The index of the layer in the arrays.
      rows: The rows of the call.
      operations: The operations by which the cache is laid out.
    """
    assert rows.page_BN is not None
    page_BN = rows.page_BN
    if slot_pages := state.spec.slot_pages:
        length_B, (page,) = rows.first_B + rows.count_B, state.lengths
        page_BN = latest_pages(rows.slot_B, length_B, slot_pages, page_BN.shape[1], page)

    def write_array(old: Segments, array: StateArray, new: jax.Array) -> Segments:
        count, axis = operations.cache_stripes.count, array.position_axis
        page, num_tokens = old[0].shape[axis] // count, new.shape[axis - 1] // count
        size = math.gcd(page, num_tokens)
        if array.has_kv_heads:
            new = match_heads(new, old[0].shape[array.axes.index(axes.KV_HEADS)])

        def body(old: Segments, new: jax.Array, target: _Target) -> Segments:
            return _put(old, new[0], target, array, size)

        places = _places(page_BN, rows.first_B, num_tokens, size, page)
        return operations.write_rows(body, old, new[None], _Target(*places, layer), array.axes)

    # in codes before rows are sent to the devices of their pages, as codes are fewer bytes
    return state.map(write_array, state.spec.encode(new))


def _put(old: Segments, new: jax.Array, target: _Target, array: StateArray, size: int) -> Segments:
    """Write the tokens of each row in blocks of `size`."""
    (pages,), axis, feature_axis = old, array.position_axis, array.feature_axis
    page_M, entry_M, layer = target
    if feature_axis is None:
        return (put_blocks(pages, _split(new, size, axis - 1), page_M, entry_M, axis, layer),)
    # padded on each device, so that zeros are not sent
    L, P, S, H = *pages.shape[:2], pages.shape[axis], pages.shape[feature_axis]
    new = match_head_dim(new, H, feature_axis - 1)
    blocks = _split(new, size, axis - 1).astype(pages.dtype).reshape(len(page_M), -1, size, H)
    # rows of an array with one index each: XLA for TPU compiles other forms to a loop over blocks
    rows = pages.reshape(-1, size, H)
    K = blocks.shape[1]
    index_M1 = jnp.where(page_M < P, layer * P + page_M, L * P)[:, None]
    row_MK = (index_M1 * K + jnp.arange(K)[None]) * (S // size) + entry_M[:, None] // size
    written = rows.at[row_MK].set(blocks, mode="drop", unique_indices=True)
    return (with_order_on_cpu(written.reshape(pages.shape)),)


def _of_stripe(new: jax.Array, axis: int, stripe: Stripe) -> jax.Array:
    """The tokens along `axis` that are in a stripe."""
    if stripe.count == 1:
        return new
    shape = new.shape
    in_stripes = new.reshape(*shape[:axis], -1, stripe.count, *shape[axis + 1 :])
    return jax.lax.dynamic_index_in_dim(in_stripes, stripe.index, axis + 1, keepdims=False)


def _places(
    page_BN: jax.Array, first_B: jax.Array, num_tokens: int, size: int, page: int
) -> tuple[jax.Array, jax.Array]:
    """The page and the first entry of each block of `size` tokens of all rows."""
    first_BJ = first_B[:, None] + size * jnp.arange(-(-num_tokens // size))[None]
    # padding may reach beyond the last page of a row
    page_BJ = jnp.take_along_axis(
        page_BN, first_BJ // page, axis=1, mode="fill", fill_value=NO_PAGE
    )
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
