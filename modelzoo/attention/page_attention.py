"""Attention of all layers of a call on a cache in pages: each layer writes tokens, then attends.

There is one source of keys and values, the pages of a row: for its earlier tokens, for those that
the call has just written, and for a row of one token as for a tile of many. So several rows of a
call may be pieces of one prompt.

Rows of a decode step may follow a prefix that others share (`prefixes`). It has a cache of its own,
and the results of both are merged. The pages of a row are counted from the end of its prefix.

Knows nothing of projections or of owners of pages.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..cache.kv_cache import Positions
from ..cache.layer_state import LayerState, NewEntries, PromptKeysValues, PromptLatents
from ..cache.pages import append_to_pages, page_of, pages_of_slots
from ..cache.segments import EMPTY_POSITION
from ..layer_config import Attention, Chunk
from ..operations import Operations
from .attend import Attend, Queries, merge
from .layer_attention import AttendLayer, Caches, with_query_heads
from .page_pieces import write_pieces
from .paged import AttendPages, PagedRows, attend_pages, counted_after
from .segment_attention import Entries, attend_segments


class PageRows(NamedTuple):
    """The rows of a call: consecutive tokens, and the pages in which they belong."""

    first_B: jax.Array
    """The position of the first token; any in a row without tokens."""
    count_B: jax.Array
    """The number of tokens."""
    page_BN: jax.Array
    """The pages of each row in order, in layers that take them from a pool; past its last page for
    no page."""
    slot_B: jax.Array
    """The slot of each row; past the last slot for no slot."""
    scan_index: jax.Array
    """The index of the layer in the arrays, which is set for each layer."""
    before_B: jax.Array | None = None
    """The number of tokens of each row's prefix; None without prefixes."""
    prefix: Positions | None = None
    """Positions of the entries of prefixes; None without prefixes."""

    AXES = (
        (axes.ATTENTION_BATCH,),
        (axes.ATTENTION_BATCH,),
        (axes.ATTENTION_BATCH, ""),
        (axes.ATTENTION_BATCH,),
        (),
        (axes.ATTENTION_BATCH,),
        axes.CACHE_POSITIONS,
    )


@dataclass(frozen=True)
class PageAttention:
    """Attention of rows to their pages, the tokens of the call included."""

    attend: AttendPages
    attend_prefix: Attend
    """Attention to the entries of prefixes."""
    operations: Operations
    """The operations by which the cache is laid out."""
    rows: PageRows
    is_gathered: bool
    """Whether every device gets all rows, because a row may belong to a slot of any device. In
    decode, rows are slots, and a device has those of its own."""

    reads_cache: ClassVar[bool] = True

    def layer(
        self, options: Attention, caches: Caches, scan_index: jax.Array, x_BTD: jax.Array
    ) -> AttendLayer:
        """See `CallAttention`."""
        rows, body = self.rows._replace(scan_index=scan_index), partial(self._attend, options)
        if self.is_gathered:
            attend = self.operations.attend_gathered(body, options.num_kv_heads)
        else:
            attend = self.operations.attend(body, options.num_kv_heads, writes_cache=True)
        return partial(attend, rows=rows, caches=caches)

    def update_cache(
        self,
        options: Attention,
        cache: LayerState,
        cache_update: LayerState,
        scan_index: jax.Array,
        x_BTD: jax.Array,
    ) -> LayerState:
        """See `CallAttention`. Attention has already written the cache."""
        return cache_update

    def _attend(
        self,
        options: Attention,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None,
        rows: PageRows,
        caches: Caches,
    ) -> tuple[jax.Array, LayerState]:
        new_entries = new if latents is None else latents
        assert new_entries is not None
        own, *prefixes = caches
        num_pages, first = own.num_slots, rows.scan_index * own.num_slots
        page_BN = rows.page_BN
        if slot_pages := own.spec.slot_pages:
            page_BN = pages_of_slots(rows.slot_B, slot_pages, page_BN.shape[1])
        page_BN = self.operations.local_pages(page_BN, num_pages)
        rows = rows._replace(page_BN=page_BN)
        own, is_here_B = self._write(own, new_entries, rows, queries.q_BTKGH.shape[1])
        # a row has no page after its last one, and attention reads none there
        page_BN = first + jnp.minimum(page_BN, num_pages - 1)
        before_B = rows.before_B if isinstance(options.window, Chunk) else None
        count_B = jnp.where(is_here_B, rows.count_B, 0)
        paged = PagedRows(page_BN, rows.first_B, count_B, before_B, self.operations.stripe)
        attended = attend_pages(
            self.attend, options.window, options.scaled, queries.q_BTKGH, own.pages(), paged
        )
        attended = self.operations.merge_pages(*attended, is_gathered=self.is_gathered)
        if prefixes:
            attended = merge([attended, self._attend_prefix(options, queries, rows, *prefixes)])
        return with_query_heads(queries, *attended), own

    def _attend_prefix(
        self, options: Attention, queries: Queries, rows: PageRows, cache: LayerState
    ) -> tuple[jax.Array, jax.Array]:
        """Attend to the prefix of each row."""
        assert rows.prefix is not None
        paged = PagedRows(rows.page_BN, rows.first_B, rows.count_B)
        own_position_BT = paged.position_BT(queries.q_BTKGH.shape[1])
        position_BT = counted_after(own_position_BT, rows.before_B)
        window, keys_values = options.window, cache.read_layer(rows.scan_index)
        entries = Entries((), (), keys_values, rows.prefix.for_window(window))
        attend = partial(self.attend_prefix, scores=options.scaled)
        attend_entries = partial(attend_segments, attend, window)
        attend_all = self.operations.over_cache(attend_entries, window)
        return attend_all(queries.q_BTKGH, position_BT, entries)

    def _write(
        self, own: LayerState, new: NewEntries, rows: PageRows, num_tokens: int
    ) -> tuple[LayerState, jax.Array]:
        """Write the tokens of each row; return the memory, and whether a row has pages here."""
        stripe = self.operations.stripe
        position_B = jnp.where(rows.count_B > 0, rows.first_B, EMPTY_POSITION)
        page, num_pages = own.lengths[0] * stripe.count, own.num_slots
        is_here_B = page_of(rows.page_BN, position_B, page, num_pages) < num_pages
        write, first_B = write_pieces, rows.first_B
        if num_tokens == 1:
            write, first_B = append_to_pages, position_B
        return write(own, new, rows.page_BN, first_B, rows.scan_index, stripe), is_here_B
