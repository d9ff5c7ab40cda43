"""Attention of decode over the pages of a pool, in its portable form.

The pages of all layers are one array, so no layer is cut out of it. A row names its pages in order:
entry e of a row is entry `e % page` of its page `e // page`, and holds position e. So what a query
sees follows from its position alone.

Knows nothing of layers, pools or meshes. Guarantees: an entry that a query does not see never
changes a bit of its result, whatever it holds.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..cache.segments import EMPTY_POSITION
from ..cache.state_spec import Entries
from ..layer_config import PLAIN_SCORES, Scores, Window
from .attend import attend_masked, visible


class PagedRows(NamedTuple):
    """The pages of batch rows, and the positions of their queries."""

    page_BN: jax.Array
    """The pages of each row in order. Entries after the last page of a row are any valid number."""
    position_BT: jax.Array
    """The position of each query; `EMPTY_POSITION` for a row without tokens."""


class AttendPages(Protocol):
    """An attention to pages, which must equal `attend_in_groups` within tolerance.

    It returns `out_BTKGH`, which has the dtype of queries and the feature size of values, and
    `lse_BTKG` in float32. Where a query sees nothing, `out` is zero and `lse` is -inf.
    """

    def __call__(
        self,
        q_BTKGH: jax.Array,
        k_PKSH: Entries,
        v_PKSH: Entries,
        rows: PagedRows,
        window: Window,
        scores: Scores,
    ) -> tuple[jax.Array, jax.Array]: ...


def attend_in_groups(
    q_BTKGH: jax.Array,
    k_PKSH: jax.Array,
    v_PKSH: jax.Array,
    rows: PagedRows,
    window: Window = None,
    scores: Scores = PLAIN_SCORES,
    *,
    group: int,
) -> tuple[jax.Array, jax.Array]:
    """Attend to pages, for a number of rows at a time."""
    found = [
        _attend_to_all(
            q_BTKGH[start : start + group],
            (k_PKSH, v_PKSH),
            PagedRows(*(x[start : start + group] for x in rows)),
            window,
            scores,
        )
        for start in range(0, len(q_BTKGH), group)
    ]
    out, lse = zip(*found, strict=True)
    return jnp.concatenate(out), jnp.concatenate(lse)


def _attend_to_all(
    q_BTKGH: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    rows: PagedRows,
    window: Window,
    scores: Scores,
) -> tuple[jax.Array, jax.Array]:
    """Attend to gathered pages."""
    k_BKSH, v_BKSH = (_gathered(x_PKSH, rows.page_BN) for x_PKSH in pages)
    position_1S = jnp.arange(k_BKSH.shape[2])[None]
    length_B = rows.position_BT.max(axis=1) + 1
    is_entry_BS = position_1S < length_B[:, None]
    v_BKSH = jnp.where(is_entry_BS[:, None, :, None], v_BKSH, 0)
    k_BKSH = jnp.where(is_entry_BS[:, None, :, None], k_BKSH, 0)
    key_position_BS = jnp.where(is_entry_BS, position_1S, EMPTY_POSITION)
    mask_BTS = visible(rows.position_BT, key_position_BS, window)
    out, lse = attend_masked(q_BTKGH, k_BKSH.swapaxes(2, 3), v_BKSH, mask_BTS, scores)
    return out.astype(q_BTKGH.dtype), lse


def _gathered(x_PKSH: jax.Array, page_BN: jax.Array) -> jax.Array:
    """The entries of all pages of each row, in order."""
    x_BKNSH = x_PKSH[page_BN].swapaxes(1, 2)
    return x_BKNSH.reshape(*x_BKNSH.shape[:2], -1, x_BKNSH.shape[-1])
