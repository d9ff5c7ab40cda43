"""Attention of rows to their pages, page by page, so that no more is read than rows hold.

The queries of a row are consecutive tokens: one of a decode step, or a tile of a prompt. A query
sees the entries at positions up to its own, as far as its window reaches: no positions are stored.
Knows nothing of layers, of how pages are written, or of meshes. Guarantees: a row's pages are read
in order and merged one after the other, and pages of other rows are never read for it, so its bits
depend on its own entries alone.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..cache.pages import pick
from ..cache.state_spec import Entries, KeysAndValues, transposed
from ..cache.stripes import EMPTY_POSITION, ONE_STRIPE, Stripe, pad_end
from ..layer_config import PLAIN_SCORES, Scores, Window
from .attend import attend_masked, first_visible, merge, visible


class PagedRows(NamedTuple):
    """The pages of rows, and the positions of their queries, which are consecutive."""

    page_BN: jax.Array
    """The pages of each row in order; after its last page any number of a page."""
    first_B: jax.Array
    """The position of the first query of each row."""
    count_B: jax.Array
    """The queries of each row that are tokens. The others come last and see nothing."""
    begin_B: jax.Array | None = None
    """The entries at the beginning of each row that are not read, in whole pages; None for 0."""
    end_B: jax.Array | None = None
    """The entries after which nothing of a row is read, in whole pages; None for all."""
    stripe: Stripe = ONE_STRIPE
    """The stripe of entries that the pages on this device have."""

    def position_BT(self, num_queries: int) -> jax.Array:
        """The position of each query; `EMPTY_POSITION` for one that is no token."""
        index_1T = jnp.arange(num_queries)[None]
        position_BT = self.first_B[:, None] + index_1T
        return jnp.where(index_1T < self.count_B[:, None], position_BT, EMPTY_POSITION)


class AttendPages(Protocol):
    """Attention to pages, which must equal `attend_in_groups` within tolerance.

    It takes keys and values `[pages, heads, entries, features]`, which are in codes if the cache
    has codes, and returns `(out, lse)` as `attend_masked` does, `out` in the dtype of queries.
    """

    def __call__(
        self,
        q_BTKGH: jax.Array,
        k_PKSH: Any,
        v_PKSH: Any,
        rows: PagedRows,
        window: Window = ...,
        scores: Scores = ...,
    ) -> tuple[jax.Array, jax.Array]: ...


@dataclass(frozen=True)
class PageReader:
    """An attention implementation of a graph that reads pages."""

    attend: AttendPages


def attend_in_groups(
    q_BTKGH: jax.Array,
    k_PKSH: Entries,
    v_PKSH: Entries,
    rows: PagedRows,
    window: Window = None,
    scores: Scores = PLAIN_SCORES,
    *,
    group: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend in groups of rows, each with as many turns as its longest row has pages.

    Args:
      q_BTKGH: Queries.
      k_PKSH: Keys.
      v_PKSH: Values.
      rows: The pages of each row, and the positions of its queries.
      window: The window of the layer.
      scores: Scale and cap of the scores.
      group: Static: the rows of a group; None for all rows. Groups run one after the other.
    """
    B = len(q_BTKGH)
    size = min(group or B, B)
    count = -(-B // size)

    def pad(x: jax.Array) -> jax.Array:
        return pad_end(x, 0, count * size).reshape(count, size, *x.shape[1:])

    groups = jax.tree.map(pad, (q_BTKGH, *rows[:-1]))
    attend = partial(_attend_group, _Pages(k_PKSH, v_PKSH), rows.stripe, window, scores, groups)
    # results begin as queries, not as zeros: of these, XLA for the CPU makes copies for all layers
    # at the beginning of a call
    begin, H = groups[0][..., :1], v_PKSH.shape[-1]
    results = jnp.broadcast_to(begin, (*begin.shape[:-1], H)), begin[..., 0].astype(jnp.float32)
    results = attend(0, results) if count == 1 else jax.lax.fori_loop(0, count, attend, results)
    out_BTKGH, lse_BTKG = (x.reshape(-1, *x.shape[2:])[:B] for x in results)
    return out_BTKGH, lse_BTKG


def _attend_group(
    pages: "_Pages",
    stripe: Stripe,
    window: Window,
    scores: Scores,
    groups: tuple[jax.Array, ...],
    index: jax.Array | int,
    results: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Attend to one page of each row of a group at a time, and put the merge into `results`.

    Groups are their queries, and the arrays of their `PagedRows`.
    """
    q_BTKGH, *by_row = jax.tree.map(lambda x: x[index], groups)
    rows = PagedRows._make((*by_row, stripe))
    page_BN, (_, _, S, H) = rows.page_BN, pages.shape
    position_BT, is_row_B = rows.position_BT(q_BTKGH.shape[1]), rows.count_B > 0
    first_B, last_B = read_range(rows, S * stripe.count, window)
    first = jnp.int32(0)
    if window is not None or rows.begin_B is not None:
        first = jnp.where(is_row_B, first_B, page_BN.shape[1]).min().astype(jnp.int32)
    end = jnp.where(is_row_B, last_B + 1, 0).max()

    def turn(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # a row without this page reads one of its own pages, and sees nothing of it: the pages of
        # other rows may hold NaN
        is_page_B = (first_B <= number) & (number <= last_B)
        page_B = pick(page_BN, jnp.clip(number, first_B, jnp.maximum(last_B, first_B)))
        k_BKSH, v_BKSH = pages.take(page_B)
        entry_1S = stripe.position(number * S + jnp.arange(S))[None]
        entry_BS = jnp.where(is_page_B[:, None], entry_1S, EMPTY_POSITION)
        mask_BTS = visible(position_BT, entry_BS, window)
        part = attend_masked(q_BTKGH, transposed(k_BKSH), v_BKSH, mask_BTS, scores)
        return merge([carry, part])

    def hide(x: jax.Array, value: float) -> jax.Array:
        """Give rows without tokens a value, as the page that they read may hold NaN."""
        return jnp.where(is_row_B.reshape(-1, *[1] * (x.ndim - 1)), x, value)

    shape = q_BTKGH.shape[:-1]
    empty = jnp.zeros((*shape, H)), jnp.full(shape, -jnp.inf)
    out_BTKGH, lse_BTKG = jax.lax.fori_loop(first, end, turn, empty)
    attended = hide(out_BTKGH, 0.0).astype(q_BTKGH.dtype), hide(lse_BTKG, -jnp.inf)
    out_BTKGH, lse_BTKG = (x.at[index].set(new) for x, new in zip(results, attended, strict=True))
    return out_BTKGH, lse_BTKG


def read_range(rows: PagedRows, page: int, window: Window) -> tuple[jax.Array, jax.Array]:
    """The first and the last page that each row reads; any for a row without tokens.

    The last one is before the first one if it reads none.
    """
    last_B = jnp.where(rows.count_B > 0, rows.first_B + rows.count_B - 1, 0) // page
    if rows.end_B is not None:
        last_B = jnp.minimum(last_B, rows.end_B // page - 1)
    first_B = jnp.zeros_like(last_B)
    if window is not None:
        first_B = jnp.maximum(first_visible(rows.first_B, window), 0) // page
    if rows.begin_B is not None:
        first_B = jnp.maximum(first_B, rows.begin_B // page)
    return first_B, last_B


class _Pages:
    """Keys and values of pages, each page as one line.

    NOTE: with one head, XLA for the CPU would copy the pool to another order of its axes.
    """

    def __init__(self, k_PKSH: Entries, v_PKSH: Entries):
        arrays, self._tree = jax.tree.flatten((k_PKSH, v_PKSH))
        self._shapes = [x.shape[1:] for x in arrays]
        self._lines = [x.reshape(len(x), -1) for x in arrays]
        self.shape = v_PKSH.shape

    def take(self, page_B: jax.Array) -> KeysAndValues:
        """The keys and values of some pages."""
        taken = [
            lines.at[page_B].get(mode="clip").reshape(-1, *shape)
            for lines, shape in zip(self._lines, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._tree, taken)


def queries_of_pages(q_BTKGH: jax.Array, pages: KeysAndValues) -> jax.Array:
    """Group queries by the heads of pages, and pad their features to those of pages.

    Several key/value heads of the queries may read the same head of the pages.
    """
    _, num_heads, _, cache_dim = pages[1].shape
    grouped = q_BTKGH.reshape(*q_BTKGH.shape[:2], num_heads, -1, q_BTKGH.shape[-1])
    return pad_end(grouped, -1, cache_dim)
