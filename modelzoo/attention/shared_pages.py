"""Attention of a decode step to pages with which several rows begin: they are read once for all.

The rows are in *groups*. The first pages of the rows of a group hold equal entries, as their tokens
are equal, so those of one row are read for all of them: their queries are the tokens of one row.
Each row reads the rest of its pages itself, and both results are merged. Sources of the idea:
Juravsky et al. 2024, "Hydragen" (2402.05099), section 3; Zhu et al. 2024, "RelayAttention"
(2402.14808), section 4.

Knows nothing of layers, prefixes or meshes. Guarantees: a row's result depends on its own entries
and on the number of those that its group reads, not on the other rows of the group.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..cache.state_spec import Entries
from .attend import merge
from .paged import PagedRows


class SharedPages(NamedTuple):
    """The pages that groups of rows begin with."""

    slot_GR: jax.Array
    """The rows of each group; past the last row for no row. A row is in one group at most."""
    page_GN: jax.Array
    """The pages of each group in order; after the last one any number."""
    end_G: jax.Array
    """The entries of the pages of each group; 0 for a group without rows."""


class SlotPages(NamedTuple):
    """The pages of the slots of a decode call."""

    page_BN: jax.Array
    """The pages of each slot in order; past the last page for no page."""
    shared: SharedPages | None = None
    """The pages that are read once for several slots; None for none."""


def attend_shared(
    attend: Callable[[jax.Array, Entries, Entries, PagedRows], tuple[jax.Array, jax.Array]],
    shared: SharedPages,
    q_B1KGH: jax.Array,
    k_PKSH: Entries,
    v_PKSH: Entries,
    rows: PagedRows,
) -> tuple[jax.Array, jax.Array]:
    """Attend to the pages of groups, then to the rest of each row, and merge the results.

    Args:
      attend: Attention of rows to their pages, in a layer without a window.
      shared: The groups; all of their rows and pages are on this device.
      q_B1KGH: Queries, one a row.
      k_PKSH: Keys of all pages.
      v_PKSH: Values of all pages.
      rows: The pages of each row, and the positions of its queries.

    Returns:
      `out` and `lse`, as `attend` returns them.
    """
    slot_GR, page_GN, end_G = shared
    B, (G, R) = len(q_B1KGH), slot_GR.shape
    is_place_BM = slot_GR.reshape(1, G * R) == jnp.arange(B)[:, None]
    begin_B = jnp.where(is_place_BM, jnp.repeat(end_G, R), 0).max(axis=1)
    own = attend(q_B1KGH, k_PKSH, v_PKSH, rows._replace(begin_B=begin_B))
    # all entries of the pages are before each query of the group
    of_groups = PagedRows(
        page_GN, end_G, jnp.where(end_G > 0, R, 0), end_B=end_G, stripe=rows.stripe
    )
    q_GRKGH = q_B1KGH[:, 0].at[slot_GR].get(mode="fill", fill_value=0)
    out_GRKGH, lse_GRKG = attend(q_GRKGH, k_PKSH, v_PKSH, of_groups)
    place_B = jnp.where(is_place_BM.any(axis=1), is_place_BM.argmax(axis=1), G * R)

    def of_rows(x: jax.Array, fill: float) -> jax.Array:
        x_M = x.reshape(G * R, *x.shape[2:])
        return x_M.at[place_B].get(mode="fill", fill_value=fill)[:, None]

    return merge([own, (of_rows(out_GRKGH, 0.0), of_rows(lse_GRKG, -jnp.inf))])
