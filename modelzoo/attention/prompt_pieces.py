"""Pieces of prompts, and their writes to pages in blocks of tokens each of which lies in one page.

A piece is a whole prompt or a chunk of one. A piece of n tokens begins at a multiple of n, and a
whole prompt at 0. Padding is written, too: no query sees what follows the last token of a row, and
it is written again before one does. But the portable form multiplies it by weights of zero, so it
must be finite.

Knows nothing of attention, requests, queues or meshes. Guarantees: rows without pages write
nothing; every write is in place if the cache is donated.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..cache.layer_state import LayerState, NewEntries, PromptKeysValues
from ..cache.pages import NO_PAGE, latest_pages, match_heads, with_order_on_cpu
from ..cache.state_spec import StateArray
from ..cache.stripes import ONE_STRIPE, Stripe, Stripes, change_stripes, pad_end
from ..cpu.moves import put_lines
from ..operations import Operations


class PromptPieces(NamedTuple):
    """The rows of a prefill call: the tokens of each row, and the slot they are written to."""

    slot_B: jax.Array
    """The slot of the row; past the last slot for a row that is not written."""
    start_B: jax.Array | None
    """The position of the first token; None for whole prompts, which begin at 0."""
    count_B: jax.Array
    """The number of tokens; the rest of the row is padding."""
    page_BN: jax.Array | None
    """The pages of each row's slot, as many as the longest row of the graph has; past the last page
    for no page. None in a plan without slots."""

    @property
    def first_B(self) -> jax.Array:
        """The position of the first token."""
        return jnp.zeros_like(self.count_B) if self.start_B is None else self.start_B


class _Target(NamedTuple):
    """The target of a write: arrays that `write_rows` passes to every device."""

    page_BN: jax.Array
    """The pages of each row."""
    first_B: jax.Array
    """The first entry of each row, counted in the entries that a device has of the row's pages."""
    layer: jax.Array
    """The index of the layer in the arrays."""


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

    def write_array(old: jax.Array, array: StateArray, new: jax.Array) -> jax.Array:
        return _put(old, _of_stripe(new, array.position_axis - 1, stripe), target, array)

    target = _Target(page_BN, first_B // stripe.count, layer)
    return state.map(write_array, state.spec.encode(new))


def write_prompts(
    rows: PromptPieces,
    stripes: Stripes,
    operations: Operations,
    state: LayerState,
    new: NewEntries,
    layer: jax.Array,
) -> LayerState:
    """Write the new entries of whole prompts to one layer of the cache.

    Args:
      rows: The rows of the call.
      stripes: The order of the new entries.
      operations: The operations by which the cache is laid out.
      state: The memory of the block that the layer belongs to.
      new: The new entries.
      layer: The index of the layer in the arrays.
    """
    if isinstance(new, PromptKeysValues):
        new = match_heads(new, operations.num_cache_heads(state.spec.num_kv_heads))
    arrays, in_cache = zip(new, new.POSITION_AXES, strict=True), operations.cache_stripes
    new = type(new)(*(change_stripes(x, axis, stripes, in_cache) for x, axis in arrays))
    page_BN = rows.page_BN
    assert page_BN is not None
    if slot_pages := state.spec.slot_pages:
        length_B = rows.first_B + rows.count_B
        page_BN = latest_pages(rows.slot_B, length_B, slot_pages, page_BN.shape[1], state.page)

    def write_array(old: jax.Array, array: StateArray, new: jax.Array) -> jax.Array:
        def body(old: jax.Array, new: jax.Array, target: _Target) -> jax.Array:
            return _put(old, new[0], target, array)

        return operations.write_rows(body, old, new[None], target, array.axes)

    # whole prompts begin at 0 on every device
    target = _Target(page_BN, rows.first_B, layer)
    # in codes before rows are sent to the devices of their pages, as codes are fewer bytes
    return state.map(write_array, state.spec.encode(new))


def _put(pages: jax.Array, new: jax.Array, target: _Target, array: StateArray) -> jax.Array:
    """Write the tokens of each row to the pages on this device, in blocks."""
    axis, layer = array.position_axis, target.layer
    size = math.gcd(pages.shape[axis], new.shape[axis - 1])
    page_M, entry_M = _places(target, new.shape[axis - 1], size, pages.shape[axis])
    if array.features is None:
        scales = _split(new, size, axis - 1).astype(pages.dtype)
        return with_order_on_cpu(_put_scales(pages, scales, page_M, entry_M // size, layer))
    # padded on each device, so that zeros are not sent
    L, P, S, H = *pages.shape[:2], pages.shape[axis], pages.shape[-1]
    blocks = (
        _split(pad_end(new, -1, H), size, axis - 1)
        .astype(pages.dtype)
        .reshape(len(page_M), -1, size, H)
    )
    # rows of an array with one index each: XLA for TPU compiles other forms to a loop over blocks
    rows = pages.reshape(-1, size, H)
    K = blocks.shape[1]
    index_M1 = jnp.where(page_M < P, layer * P + page_M, L * P)[:, None]
    row_MK = (index_M1 * K + jnp.arange(K)[None]) * (S // size) + entry_M[:, None] // size

    def put() -> jax.Array:
        written = rows.at[row_MK].set(blocks, mode="drop", unique_indices=True)
        return with_order_on_cpu(written.reshape(pages.shape))

    return put_lines(pages, blocks.reshape(-1, size * H), row_MK.reshape(-1), put)


def _put_scales(
    scale_LPKS: jax.Array,
    new_MKs: jax.Array,
    page_M: jax.Array,
    part_M: jax.Array,
    layer: jax.Array,
) -> jax.Array:
    """Write blocks of scales, each of which is a part of a page, in one layer.

    NOTE: XLA for TPU compiles a scatter of parts of rows to a loop over blocks, so the first of the
    blocks of a page writes the whole page: the blocks of this call in it, and what was there.
    """
    L, P, K, S = scale_LPKS.shape
    M, _, size = new_MKs.shape
    pages = scale_LPKS.reshape(L * P, K, S)
    is_same_MM = page_M[:, None] == page_M[None]
    is_here_MJM = is_same_MM[:, None] & (part_M[None, None] == jnp.arange(S // size)[None, :, None])
    new_MKJs = new_MKs[jnp.argmax(is_here_MJM, axis=-1)].swapaxes(1, 2)
    index_M = jnp.where(page_M < P, layer * P + page_M, L * P)
    old_MKJs = pages.at[index_M].get(mode="clip").reshape(new_MKJs.shape)
    is_new_MJ = is_here_MJM.any(axis=-1)
    whole_MKJs = jnp.where(is_new_MJ[:, None, :, None], new_MKJs, old_MKJs)
    is_first_M = jnp.argmax(is_same_MM, axis=1) == jnp.arange(M)
    at = pages.at[jnp.where(is_first_M, index_M, L * P)]
    written = at.set(whole_MKJs.reshape(M, K, S), mode="drop", unique_indices=True)
    return written.reshape(scale_LPKS.shape)


def _of_stripe(new: jax.Array, axis: int, stripe: Stripe) -> jax.Array:
    """The tokens along `axis` that are in a stripe."""
    if stripe.count == 1:
        return new
    shape = new.shape
    in_stripes = new.reshape(*shape[:axis], -1, stripe.count, *shape[axis + 1 :])
    return jax.lax.dynamic_index_in_dim(in_stripes, stripe.index, axis + 1, keepdims=False)


def _places(target: _Target, num_tokens: int, size: int, page: int) -> tuple[jax.Array, jax.Array]:
    """The page and the first entry of each block of `size` tokens of all rows."""
    first_BJ = target.first_B[:, None] + size * jnp.arange(-(-num_tokens // size))[None]
    # padding may reach beyond the last page of a row
    page_BJ = jnp.take_along_axis(
        target.page_BN, first_BJ // page, axis=1, mode="fill", fill_value=NO_PAGE
    )
    return page_BJ.reshape(-1), (first_BJ % page).reshape(-1)


def _split(new: jax.Array, size: int, axis: int) -> jax.Array:
    """Cut each row along its tokens into blocks of `size`, which become rows."""
    count = -(-new.shape[axis] // size)
    new = pad_end(new, axis, count * size)
    new = new.reshape(*new.shape[:axis], count, size, *new.shape[axis + 1 :])
    new = jnp.moveaxis(new, axis, 1)
    return new.reshape(-1, *new.shape[2:])
