"""Attention to a cache: to each of its segments, with a merge of the results.

Masks are computed from the positions of entries. Does not know how entries were written.
"""

import jax
import jax.numpy as jnp

from .attention import Attend, Slots, Visibility, merge
from .config import Window
from .kv_cache import match_head_dim, match_heads
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
    """Attend to every segment and merge the results.

    Args:
      attend: Attention to one segment. Its scores must have an explicit scale if the cache pads
        heads, as the default scale follows from the head size.
      window: The window of the layer.
      q_BTKGH: Queries. Several of their key/value heads may read the same head of the entries.
      query_position_BT: Positions of the queries.
      entries: Keys and values of each segment, and their positions. A segment may have only the
        first rows; the other rows see nothing in it. The first segments may be shared by all rows.
      slots: The layer and slots to read, if all segments but the last are whole arrays of a cache.

    Returns:
      `out` and `lse` by the heads of the entries, with the head size of queries.
    """
    parts, num_segments = [], len(entries[0])
    shared, _ = split_shared(entries[1], row_axis=0)
    for index, ((k_BKHS, v_BKSH), position_BS) in enumerate(zip(*entries, strict=True)):
        num_rows, num_heads, cache_dim = len(position_BS), v_BKSH.shape[-3], v_BKSH.shape[-1]
        cache_slots = slots if index < num_segments - 1 else None
        q, query_position = q_BTKGH[:num_rows], query_position_BT[:num_rows]
        if index < len(shared):
            # all tokens as one row: one product reads the keys for all rows
            q, query_position = _as_one_row(q_BTKGH), _as_one_row(query_position_BT)
            cache_slots = None if slots is None else slots._replace(slot_B=slots.slot_B[:1] * 0)
        grouped = q.reshape(*query_position.shape, num_heads, -1, q.shape[-1])
        grouped = match_head_dim(grouped, cache_dim, axis=-1)
        visibility = Visibility(query_position, position_BS, window, slots=cache_slots)
        out, lse = attend(grouped, k_BKHS, v_BKSH, visibility)
        out = out[..., : q.shape[-1]]
        if index < len(shared):
            rows = query_position_BT.shape
            out, lse = (x.reshape(*rows, *x.shape[2:]) for x in (out, lse))
        parts.append(_with_missing_rows(out, lse, len(q_BTKGH) - len(out)))
    return merge(parts)


def attend_joined(
    attend: Attend,
    window: Window,
    q_BTKGH: jax.Array,
    query_position_BT: jax.Array,
    entries: tuple[list[KeysAndValues], Segments],
    slots: Slots,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_segments` does, to the segments of each row joined into one.

    The rows of the slots are copied out of the cache. Where `attend` would copy them anyway, one
    softmax over all entries is faster than one for each segment and a merge.
    """
    (*cached, new), (*cached_position_BS, new_position_BS) = entries
    parts = []
    for (k_BKHS, v_BKSH), position_BS in zip(cached, cached_position_BS, strict=True):
        position_BS = jnp.broadcast_to(position_BS, (len(q_BTKGH), position_BS.shape[1]))
        seen = Visibility(query_position_BT, position_BS, slots=slots)
        parts.append((*seen.keys_values(k_BKHS, v_BKSH), position_BS))
    if parts:
        new = map(_like, new, parts[0], (2, 3))
    parts.append((*new, new_position_BS))
    k_BKHS, v_BKSH, position_BS = map(jnp.concatenate, zip(*parts, strict=True), (3, 2, 1))
    joined = [(k_BKHS, v_BKSH)], (position_BS,)
    return attend_segments(attend, window, q_BTKGH, query_position_BT, joined)


def _like(new: jax.Array, cached: jax.Array, head_axis: int) -> jax.Array:
    """New keys or values with the heads and the dtype of cached ones."""
    new = match_heads(new, cached.shape[1]).astype(cached.dtype)
    return match_head_dim(new, cached.shape[head_axis], head_axis)


def _as_one_row(x_BT: jax.Array) -> jax.Array:
    """The tokens of all rows as the tokens of one row."""
    return x_BT.reshape(1, -1, *x_BT.shape[2:])


def _with_missing_rows(
    out_BTKGH: jax.Array, lse_BTKG: jax.Array, num_missing: int
) -> tuple[jax.Array, jax.Array]:
    """Pad results to all rows: rows that the segment does not have see nothing in it."""
    if not num_missing:
        return out_BTKGH, lse_BTKG
    padding = [(0, num_missing)] + [(0, 0)] * 4
    return jnp.pad(out_BTKGH, padding), jnp.pad(lse_BTKG, padding[:4], constant_values=-jnp.inf)
