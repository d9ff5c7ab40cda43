"""Attention of all layers of a call on a cache in pages: each layer writes tokens, then attends.

There is one source of keys and values, the pages of a row: for its earlier tokens, for those that
the call has just written, and for a row of one token as for a tile of many. So several rows of a
call may be pieces of one prompt.

Rows of a decode step may begin with pages that are read once for several rows (`shared_pages`).

Knows nothing of projections or of owners of pages.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..cache.layer_state import LayerState, NewEntries, PromptKeysValues, PromptLatents
from ..cache.pages import append_to_pages, page_of, pages_of_slots
from ..cache.stripes import EMPTY_POSITION
from ..layer_config import Attention
from ..operations import Operations
from .attend import Queries, with_sinks
from .layer_attention import AttendLayer, Positions
from .paged import AttendPages, PagedRows, queries_of_pages
from .prompt_pieces import write_pieces
from .shared_pages import SharedPages, attend_shared


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
    shared: SharedPages | None = None
    """The pages that rows begin with and that are read once for several rows; None for none."""

    AXES = (
        (axes.ATTENTION_BATCH,),
        (axes.ATTENTION_BATCH,),
        (axes.ATTENTION_BATCH, ""),
        (axes.ATTENTION_BATCH,),
        (),
        (axes.ATTENTION_BATCH,),
    )


@dataclass(frozen=True)
class PageAttention:
    """Attention of rows to their pages, the tokens of the call included."""

    attend: AttendPages
    operations: Operations
    """The operations by which the cache is laid out."""
    rows: PageRows
    num_tokens: int
    """The tokens of each row, padding included."""
    is_gathered: bool
    """Whether every device gets all rows, because a row may belong to a slot of any device. In
    decode, rows are slots, and a device has those of its own."""

    reads_cache: ClassVar[bool] = True

    @property
    def position_BT(self) -> Positions:
        """See `CallAttention`."""
        return self.rows.first_B[:, None] + jnp.arange(self.num_tokens)[None]

    @property
    def is_token_BT(self) -> jax.Array:
        """See `CallAttention`."""
        return jnp.arange(self.num_tokens)[None] < self.rows.count_B[:, None]

    def layer(
        self, options: Attention, cache: LayerState | None, scan_index: jax.Array
    ) -> AttendLayer:
        """See `CallAttention`."""
        rows, body = self.rows._replace(scan_index=scan_index), partial(self._attend, options)
        operations = self.operations
        attend_rows = operations.attend_gathered if self.is_gathered else operations.attend
        return partial(attend_rows(body, options.num_kv_heads), rows=rows, cache=cache)

    def _attend(
        self,
        options: Attention,
        queries: Queries,
        new: PromptKeysValues | None,
        latents: PromptLatents | None,
        rows: PageRows,
        cache: LayerState,
    ) -> tuple[jax.Array, LayerState]:
        new_entries = new if latents is None else latents
        assert new_entries is not None
        num_pages, first = cache.num_pages, rows.scan_index * cache.num_pages
        page_BN = rows.page_BN
        if slot_pages := cache.spec.slot_pages:
            page_BN = pages_of_slots(rows.slot_B, slot_pages, page_BN.shape[1])
        page_BN = self.operations.local_pages(page_BN, num_pages)
        rows = rows._replace(page_BN=page_BN)
        cache, is_here_B = self._write(cache, new_entries, rows)
        # a row has no page after its last one, and attention reads none there
        page_BN = first + jnp.minimum(page_BN, num_pages - 1)
        count_B = jnp.where(is_here_B, rows.count_B, 0)
        paged = PagedRows(page_BN, rows.first_B, count_B, stripe=self.operations.stripe)
        pages, H = cache.keys_values(), queries.q_BTKGH.shape[-1]
        q_BTKGH = queries_of_pages(queries.q_BTKGH, pages)
        # the scale is explicit if the cache pads heads
        attend = partial(self.attend, window=options.window, scores=options.scaled)
        if rows.shared is not None and options.window is None:
            page_GN = self.operations.local_pages(rows.shared.page_GN, num_pages)
            page_GN = first + jnp.minimum(page_GN, num_pages - 1)
            slot_GR = self.operations.local_pages(rows.shared.slot_GR, len(count_B))
            shared = SharedPages(slot_GR, page_GN, rows.shared.end_G)
            attend = partial(attend_shared, attend, shared)
        out_BTKGH, lse_BTKG = attend(q_BTKGH, *pages, paged)
        attended = out_BTKGH[..., :H], lse_BTKG
        attended = self.operations.merge_pages(*attended, is_gathered=self.is_gathered)
        out_BTKGH = with_sinks(*attended, queries.sink_KG)
        return out_BTKGH.reshape(*queries.q_BTKGH.shape[:-1], -1), cache

    def _write(
        self, cache: LayerState, new: NewEntries, rows: PageRows
    ) -> tuple[LayerState, jax.Array]:
        """Write the tokens of each row; return the memory, and whether a row has pages here."""
        stripe = self.operations.stripe
        position_B = jnp.where(rows.count_B > 0, rows.first_B, EMPTY_POSITION)
        page, num_pages = cache.page * stripe.count, cache.num_pages
        is_here_B = page_of(rows.page_BN, position_B, page, num_pages) < num_pages
        write, first_B = write_pieces, rows.first_B
        if self.num_tokens == 1:
            write, first_B = append_to_pages, position_B
        return write(cache, new, rows.page_BN, first_B, rows.scan_index, stripe), is_here_B
