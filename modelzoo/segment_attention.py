"""Attention to a cache: to each of its segments, and merged.

Knows nothing of how entries came to be there: masks come from their positions.
"""

import jax
import jax.numpy as jnp

from .attention import Attend, Slots, Visibility, merge
from .config import Window
from .kept_layers import KeysAndValues
from .kv_cache import match_head_dim
from .segments import Segments


def attend_segments(
    attend: Attend,
    window: Window,
    q_BTKGH: jax.Array,
    query_position_BT: jax.Array,
    entries: tuple[list[KeysAndValues], Segments],
    slots: Slots | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend to every segment and merge.

    Args:
      attend: Attends to one segment, with the scale of scores given where heads are kept wider.
      window: The window of the layer.
      q_BTKGH: Queries; those of several heads may read one head of the entries.
      query_position_BT: Positions of the queries.
      entries: Keys and values of each segment, and their positions. A segment may have the first
        rows alone; the others see nothing there.
      slots: Where all segments but the last are a cache's, the layer and rows of these.

    Returns:
      `out` and `lse`, whose heads are those of the entries, as wide as those of queries.
    """
    parts, H = [], q_BTKGH.shape[-1]
    last = len(entries[0]) - 1
    for index, ((k_BKHS, v_BKSH), position_BS) in enumerate(zip(*entries, strict=True)):
        num_rows, num_heads, kept_dim = len(position_BS), v_BKSH.shape[-3], v_BKSH.shape[-1]
        query_BT = query_position_BT[:num_rows]
        grouped = q_BTKGH[:num_rows].reshape(*query_BT.shape, num_heads, -1, H)
        grouped = match_head_dim(grouped, kept_dim, axis=-1)
        visibility = Visibility(
            query_BT, position_BS, window, slots=slots if index < last else None
        )
        out_BTKGH, lse_BTKG = attend(grouped, k_BKHS, v_BKSH, visibility)
        num_missing = q_BTKGH.shape[0] - num_rows
        parts.append(_with_missing_rows(out_BTKGH[..., :H], lse_BTKG, num_missing))
    return merge(parts)


def _with_missing_rows(
    out_BTKGH: jax.Array, lse_BTKG: jax.Array, num_missing: int
) -> tuple[jax.Array, jax.Array]:
    """Attention to a segment with the rows that it does not have, which see nothing there."""
    if not num_missing:
        return out_BTKGH, lse_BTKG
    padding = [(0, num_missing)] + [(0, 0)] * 4
    return jnp.pad(out_BTKGH, padding), jnp.pad(lse_BTKG, padding[:4], constant_values=-jnp.inf)
