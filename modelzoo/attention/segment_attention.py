"""Attention to a cache: to each of its segments, with a merge of the results.

Masks are computed from the positions of entries. Does not know how entries were written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..cache.entry_codes import EntryCodes
from ..cache.kv_cache import match_head_dim, match_heads
from ..cache.segments import Segments
from ..cache.state_spec import KeysAndValues
from ..layer_config import Window
from .attend import Attend, Slots, Visibility, merge


class Entries(NamedTuple):
    """The entries of a layer that a call reads, by segment."""

    keys_values: Sequence[KeysAndValues]
    positions: Segments
    """A segment may have only the first rows of the batch; the other rows see nothing in it."""


def attend_segments(
    attend: Attend,
    window: Window,
    q_BTKGH: jax.Array,
    query_position_BT: jax.Array,
    entries: Entries,
    slots: Slots | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend to every segment and merge the results.

    Args:
      attend: Attention to one segment. Its scores must have an explicit scale if the cache pads
        heads, as the default scale follows from the head size.
      window: The window of the layer.
      q_BTKGH: Queries. Several of their key/value heads may read the same head of the entries.
      query_position_BT: Positions of the queries.
      entries: Keys and values of each segment, and their positions.
      slots: The layer and slots to read, if entries are whole arrays of a cache: all segments but
        the last one, which holds new tokens.

    Returns:
      `out` and `lse`, grouped by the heads of the entries, with the head size of queries.
    """
    H, last = q_BTKGH.shape[-1], len(entries.keys_values) - 1
    parts = []
    segments = zip(entries.keys_values, entries.positions, strict=True)
    for index, ((k_BKHS, v_BKSH), position_BS) in enumerate(segments):
        q, query_position = (x[: len(position_BS)] for x in (q_BTKGH, query_position_BT))
        cache_slots = None if index == last else slots
        num_heads, cache_dim = v_BKSH.shape[-3], v_BKSH.shape[-1]
        grouped = q.reshape(*query_position.shape, num_heads, -1, H)
        grouped = match_head_dim(grouped, cache_dim, axis=-1)
        visibility = Visibility(query_position, position_BS, window, slots=cache_slots)
        out, lse = attend(grouped, k_BKHS, v_BKSH, visibility)
        out = out[..., :H]
        parts.append(_with_missing_rows(out, lse, len(q_BTKGH) - len(out)))
    return merge(parts)


def join_segments(entries: Entries, slots: Slots) -> Entries:
    """Join the segments of each row into one.

    The rows of the slots are copied out of the cache. Where attention would copy them anyway, one
    softmax over all entries is faster than one for each segment and a merge. Segments in codes stay
    as they are: new tokens are not in codes.
    """
    if any(isinstance(k_BKHS, EntryCodes) for k_BKHS, _ in entries.keys_values):
        return entries
    (*cached, new), (*cached_position_BS, new_position_BS) = entries.keys_values, entries.positions
    parts: list[tuple[Any, ...]] = []
    for (k_BKHS, v_BKSH), position_BS in zip(cached, cached_position_BS, strict=True):
        taken = Visibility(position_BS, position_BS, slots=slots).keys_values(k_BKHS, v_BKSH)
        parts.append((*taken, position_BS))
    if parts:
        new = map(_like, new, parts[0], (2, 3))
    parts.append((*new, new_position_BS))
    k_BKHS, v_BKSH, position_BS = map(jnp.concatenate, zip(*parts, strict=True), (3, 2, 1))
    return entries._replace(keys_values=[(k_BKHS, v_BKSH)], positions=(position_BS,))


def _like(new: Any, cached: jax.Array, head_axis: int) -> jax.Array:
    """New keys or values with the heads and the dtype of cached ones."""
    new = match_heads(new, cached.shape[1]).astype(cached.dtype)
    return match_head_dim(new, cached.shape[head_axis], head_axis)


def _with_missing_rows(
    out_BTKGH: jax.Array, lse_BTKG: jax.Array, num_missing: int
) -> tuple[jax.Array, jax.Array]:
    """Pad results to all rows: rows that the segment does not have see nothing in it."""
    if not num_missing:
        return out_BTKGH, lse_BTKG
    padding = [(0, num_missing)] + [(0, 0)] * 4
    return jnp.pad(out_BTKGH, padding), jnp.pad(lse_BTKG, padding[:4], constant_values=-jnp.inf)
