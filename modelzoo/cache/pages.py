"""The key/value cache: the entries of a row are in pages of a pool, in any order and place.

Entry e of a row is entry e % page of the row's page e // page, and holds position e. A table
`page_BN` says which pages are a row's; it is data, so rows take pages as they grow. It has the
number of pages, which no page has, where a row has none: such entries are not written.

If the entries of a cache are split over devices, so are those of each page: position p lies on
device p mod n, in the same page on all of them.

A layer with a window may have a few pages for each slot instead, which hold the latest entries of
its row: the row's page n is then page n % W of the W pages of its slot, and takes the place of page
n - W. Masks follow from a row's length in all layers, so there are no stored positions. Keys have
head features last, as values do: a token is then one line of an array on every platform.

A page is not cleared for its next owner. A row writes every entry before a query of its own sees
it, so an entry of the former owner is never visible. The exception is NaN, as masked entries are
still multiplied: the host clears the pages of a slot in which NaN was found.

Knows nothing of owners of pages, buckets or meshes. Guarantees: `append_to_pages` writes in place
inside a loop if the arrays are donated, and writes nothing for a row without a page.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from ..config import AS_PUBLISHED, Arrangement, DecoderConfig
from ..cpu.moves import put_lines
from ..layer_config import window_size
from ..layer_groups import block_layers
from .layer_state import Cache, LayerState, NewEntries, PromptKeysValues
from .state_spec import StateArray, state_spec
from .stripes import EMPTY_POSITION, ONE_STRIPE, Stripe, pad_end

NO_PAGE = np.iinfo(np.int32).max
"""A number past the pages of any pool."""


class PageCounts(NamedTuple):
    """The numbers of pages of a cache."""

    pages: int
    """The pages of the pool, from which rows take them."""
    page: int
    """The entries of a page."""
    slots: int = 0
    """The slots with pages of their own in layers with windows."""
    of_window: Callable[[int], int | None] = lambda window: None
    """The pages of a slot in a layer whose tokens see so many positions; None if rows take pages of
    the pool there."""


def allocate_pages(
    config: DecoderConfig,
    counts: PageCounts,
    dtype: jnp.dtype,
    head_shards: int = 1,
    arrangement: Arrangement = AS_PUBLISHED,
) -> Cache:
    """Allocate pages of zeros, never `jnp.empty`: NaN in a masked entry would spread to its row.

    Args:
      config: The decoder.
      counts: The numbers of pages.
      dtype: The dtype of keys, values and latents, or of their scales if they are in codes.
      head_shards: The number of shards of query heads in decode; key/value heads have copies until
        they divide over them.
      arrangement: The arrangement of weights and cache.
    """

    def allocate_layers(layers: range) -> LayerState | None:
        attention = config.layers[layers.start].attention
        if attention is None:
            return None
        spec, pages = state_spec(attention, dtype, arrangement), counts.pages
        if (window := attention.window) and (own := counts.of_window(window_size(window))):
            spec, pages = replace(spec, slot_pages=own), counts.slots * own
        return LayerState.empty(spec, len(layers), pages, counts.page, head_shards)

    return tuple(map(allocate_layers, block_layers(config, arrangement)))


def match_heads(new: PromptKeysValues, num_heads: int) -> PromptKeysValues:
    """Repeat heads, or drop their copies, to get `num_heads`: phases may copy heads differently.

    Each copy of a head gives other tokens, so that devices that have a copy each send a part of it.
    """
    arrays = zip(new, new.POSITION_AXES, strict=True)
    return PromptKeysValues(*(_match_heads(x, num_heads, axis) for x, axis in arrays))


def _match_heads(x: jax.Array, num_heads: int, token_axis: int) -> jax.Array:
    B, K = x.shape[:2]
    if num_heads >= K:
        return x if num_heads == K else jnp.repeat(x, num_heads // K, axis=1)
    copies, T = K // num_heads, x.shape[token_axis]
    x_BKTH = pad_end(jnp.moveaxis(x, token_axis, 2), 2, T + -T % copies)
    # copies, parts, and tokens of a part
    parts = x_BKTH.reshape(B, num_heads, copies, copies, -1, x_BKTH.shape[-1])
    # a sum with one non-zero term, because devices would send what a selection does not take
    own = jnp.where(jnp.eye(copies, dtype=bool)[..., None, None], parts, 0).sum(axis=3)
    whole_BKTH = own.reshape(B, num_heads, -1, x_BKTH.shape[-1])[:, :, :T]
    return jnp.moveaxis(whole_BKTH, 2, token_axis)


def pages_of_slots(slot_B: jax.Array, slot_pages: int, num_pages: int) -> jax.Array:
    """The pages of rows in a layer where each slot has pages of its own, `[rows, num_pages]`.

    Example:
      Pages 0 to 4 of a row in slot 2, which has three pages: 6, 7, 8, 6, 7.
    """
    return slot_B[:, None] * slot_pages + jnp.arange(num_pages, dtype=jnp.int32)[None] % slot_pages


def latest_pages(
    slot_B: jax.Array, length_B: jax.Array, slot_pages: int, num_pages: int, page: int
) -> jax.Array:
    """The same, but past all pages for those of the row's pages that it leaves behind or lacks."""
    page_BN = pages_of_slots(slot_B, slot_pages, num_pages)
    later_BN = ((length_B - 1) // page)[:, None] - jnp.arange(num_pages, dtype=jnp.int32)[None]
    return jnp.where((later_BN >= 0) & (later_BN < slot_pages), page_BN, NO_PAGE)


def page_of(page_BN: jax.Array, position_B: jax.Array, page: int, num_pages: int) -> jax.Array:
    """The page of a position of each row; `num_pages`, which no page has, for an empty position and
    for one past the row's table."""
    index_B = position_B // page
    is_here_B = (position_B > EMPTY_POSITION) & (index_B < page_BN.shape[1])
    return jnp.where(is_here_B, pick(page_BN, index_B), num_pages)


def pick(page_BN: jax.Array, index_B: jax.Array) -> jax.Array:
    """The page of each row at an index; 0 if it is outside of the row.

    NOTE: XLA for TPU compiles a gather of single numbers to a loop over rows.
    """
    is_page_BN = jnp.arange(page_BN.shape[1])[None] == index_B[:, None]
    return jnp.where(is_page_BN, page_BN, 0).sum(axis=1, dtype=page_BN.dtype)


def append_to_pages(
    state: LayerState,
    new: NewEntries,
    page_BN: jax.Array,
    position_B: jax.Array,
    layer: jax.Array,
    stripe: Stripe = ONE_STRIPE,
) -> LayerState:
    """Write the new entries of one layer, one token per row.

    Args:
      state: The memory of the layers of one block.
      new: Keys and values, or latents, of one token per row.
      page_BN: The pages of each row.
      position_B: The position of each token; an empty position is not written.
      layer: The index of the layer in the arrays.
      stripe: The stripe of entries that the pages here have.
    """

    def write(pages: jax.Array, array: StateArray, new: jax.Array) -> jax.Array:
        L, P, S = pages.shape[0], pages.shape[1], pages.shape[array.position_axis]
        page_B = page_of(page_BN, position_B, S * stripe.count, P)
        if stripe.count > 1:
            page_B = jnp.where(position_B % stripe.count == stripe.index, page_B, P)
        entry_B = position_B // stripe.count % S
        # past the end for rows without a page, and therefore dropped
        index_B = jnp.where(page_B < P, layer * P + page_B, L * P)
        # new entries do not have the axis of layers
        new_BKH = jnp.squeeze(new, array.position_axis - 1).astype(pages.dtype)
        if array.features is None:
            return with_order_on_cpu(_write_scales(pages, new_BKH, index_B, entry_B))
        H = pages.shape[-1]
        lines = pages.reshape(-1, S, H)
        new_BKH = pad_end(new_BKH, -1, H).reshape(len(index_B), -1, H)
        K = new_BKH.shape[1]
        line_BK = index_B[:, None] * K + jnp.arange(K)[None]

        def put() -> jax.Array:
            at = lines.at[line_BK, jnp.broadcast_to(entry_B[:, None], line_BK.shape)]
            written = at.set(new_BKH, mode="drop", unique_indices=True)
            return with_order_on_cpu(written.reshape(pages.shape))

        place_M = (line_BK * S + entry_B[:, None]).reshape(-1)
        return put_lines(pages, new_BKH.reshape(-1, H), place_M, put)

    return state.map(write, state.spec.encode(new))


def with_order_on_cpu(pages: jax.Array) -> jax.Array:
    """The same array; on a CPU, no other order of its axes may be chosen for the loop.

    NOTE: with one head on a device, XLA for the CPU would choose another order in a decode step,
    although both are the same bytes, and copy the whole cache twice in each step.
    """
    order = Layout(major_to_minor=tuple(range(pages.ndim)))
    in_order = partial(with_layout_constraint, layouts=order)
    return jax.lax.platform_dependent(pages, cpu=in_order, default=lambda x: x)


def _write_scales(
    scale_LPKS: jax.Array, new_BK: jax.Array, index_B: jax.Array, entry_B: jax.Array
) -> jax.Array:
    """Write one scale per row and head, in the pages `index_B` of all layers.

    NOTE: XLA for TPU compiles a scatter of single numbers to a loop over rows, so all scales of a
    page are written again.
    """
    scale_PKS = scale_LPKS.reshape(-1, *scale_LPKS.shape[2:])
    old_BKS = scale_PKS.at[index_B].get(mode="clip")
    is_entry_BS = jnp.arange(scale_PKS.shape[-1])[None] == entry_B[:, None]
    row_BKS = jnp.where(is_entry_BS[:, None], new_BK[..., None], old_BKS)
    written = scale_PKS.at[index_B].set(row_BKS, mode="drop", unique_indices=True)
    return written.reshape(scale_LPKS.shape)
