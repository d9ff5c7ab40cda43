"""Attention to a cache: to each of its segments, and merged.

Knows nothing of how entries came to be there: masks come from their positions.
"""

import jax
import jax.numpy as jnp

from .attention import Attend, Visibility, merge, with_sinks
from .config import Window
from .kept_layers import KeysAndValues
from .operations import ON_ONE_DEVICE, Operations
from .segments import Segments


def attend_cached(
    attend: Attend,
    q_BTKGH: jax.Array,
    entries: list[KeysAndValues],
    query_position_BT: jax.Array,
    key_position_BS: Segments,
    window: Window,
    sink_KG: jax.Array | None = None,
    operations: Operations = ON_ONE_DEVICE,
) -> jax.Array:
    """Attend to every segment and merge, with those of other devices too: `out_BTKGH`.

    Queries of several heads may read one head of the cache. `query_position_BT` is of all queries,
    also where some of them are elsewhere.
    """

    def attend_entries(
        q_BTKGH: jax.Array,
        query_position_BT: jax.Array,
        entries: tuple[list[KeysAndValues], Segments],
    ) -> tuple[jax.Array, jax.Array]:
        keys_values, key_position_BS = entries
        parts = []
        for (k_BKHS, v_BKSH), position_BS in zip(keys_values, key_position_BS, strict=True):
            visibility = Visibility(rows_in(query_position_BT, position_BS), position_BS, window)
            part = attend(rows_in(q_BTKGH, position_BS), k_BKHS, v_BKSH, visibility)
            parts.append(_seen_by_all(*part, q_BTKGH.shape[0]))
        return merge(parts)

    B, T, _, _, H = q_BTKGH.shape
    k_BKHS, _ = entries[0]
    grouped_BTKGH = q_BTKGH.reshape(B, T, k_BKHS.shape[1], -1, H)
    attend_cache = operations.over_cache(attend_entries, window)
    attended = attend_cache(grouped_BTKGH, query_position_BT, (entries, key_position_BS))
    return with_sinks(*attended, sink_KG).reshape(*q_BTKGH.shape[:-1], -1)


def rows_in(x_B: jax.Array, segment: jax.Array) -> jax.Array:
    """Those of an array's rows that a segment has."""
    return x_B[: segment.shape[0]]


def _seen_by_all(
    out_BTKGH: jax.Array, lse_BTKG: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Attention to a segment with the rows that it does not have, which see nothing there."""
    missing = num_rows - out_BTKGH.shape[0]
    if not missing:
        return out_BTKGH, lse_BTKG
    padding = [(0, missing)] + [(0, 0)] * 4
    return jnp.pad(out_BTKGH, padding), jnp.pad(lse_BTKG, padding[:4], constant_values=-jnp.inf)
