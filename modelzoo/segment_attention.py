"""Attention to a cache: to each of its segments, and merged.

Knows nothing of how entries came to be there: masks come from their positions.
"""

import jax
import jax.numpy as jnp

from .attention import Attend, Slots, Visibility, merge
from .config import Window
from .kv_cache import match_head_dim
from .layer_cache import KeysAndValues
from .segments import Segments, split_shared


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
        rows alone; the others see nothing there. A first segment may be shared by all rows.
      slots: Where all segments but the last are a cache's, the layer and rows of these.

    Returns:
      `out` and `lse`, whose heads are those of the entries, as wide as those of queries.
    """
    parts, num_segments = [], len(entries[0])
    shared, _ = split_shared(entries[1], row_axis=0)
    for index, ((k_BKHS, v_BKSH), position_BS) in enumerate(zip(*entries, strict=True)):
        num_rows, num_heads, cache_dim = len(position_BS), v_BKSH.shape[-3], v_BKSH.shape[-1]
        of_cache = slots if index < num_segments - 1 else None
        q, query_position = q_BTKGH[:num_rows], query_position_BT[:num_rows]
        if index < len(shared):
            # as tokens of one row: one product reads the keys for all rows
            q, query_position = _as_one_row(q_BTKGH), _as_one_row(query_position_BT)
            of_cache = None if slots is None else slots._replace(slot_B=slots.slot_B[:1] * 0)
        grouped = q.reshape(*query_position.shape, num_heads, -1, q.shape[-1])
        grouped = match_head_dim(grouped, cache_dim, axis=-1)
        visibility = Visibility(query_position, position_BS, window, slots=of_cache)
        out, lse = attend(grouped, k_BKHS, v_BKSH, visibility)
        out = out[..., : q.shape[-1]]
        if index < len(shared):
            rows = query_position_BT.shape
            out, lse = (x.reshape(*rows, *x.shape[2:]) for x in (out, lse))
        parts.append(_with_missing_rows(out, lse, len(q_BTKGH) - len(out)))
    return merge(parts)


def _as_one_row(x_BT: jax.Array) -> jax.Array:
    """The tokens of all rows as those of one."""
    return x_BT.reshape(1, -1, *x_BT.shape[2:])


def _with_missing_rows(
    out_BTKGH: jax.Array, lse_BTKG: jax.Array, num_missing: int
) -> tuple[jax.Array, jax.Array]:
    """Attention to a segment with the rows that it does not have, which see nothing there."""
    if not num_missing:
        return out_BTKGH, lse_BTKG
    padding = [(0, num_missing)] + [(0, 0)] * 4
    return jnp.pad(out_BTKGH, padding), jnp.pad(lse_BTKG, padding[:4], constant_values=-jnp.inf)
