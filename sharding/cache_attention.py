"""Attention to a cache whose entries are shared out over devices: each attends to its own.

One token a row, as decode has it, is on every device. Two small sums merge what devices make of
their entries, whatever the length of the context.

The tokens of a chunk are shared out as the entries are. Either their queries are brought together,
so that each device looks at its entries once for all of them, and partial results are summed on
their way back; or entries go round, and queries stay. Whichever sends less is done: queries of a
short chunk against a long span, entries where a window or the span is short, or where many queries
read one head. Shapes decide, so the choice is one of a graph and a layer.

Knows nothing of models or rules. Guarantees: equals attention to all entries, up to the order of
sums. Sources: Dao et al. 2023, "Flash-Decoding", for the merge; Yang et al. 2024, "Context
Parallelism for Scalable Million-Token Inference" (2411.01783), section 3.4, for the two ways of a
prompt that goes on.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..modelzoo.attention import AttendEntries
from ..modelzoo.config import Window
from .projection import MeshAxes
from .ring_attention import FLOAT32_BYTES, Attended, merge_round, own_part, steps


def attend_for_all(
    attend: AttendEntries,
    mesh_axes: MeshAxes,
    q_BTKGH: jax.Array,
    position_BT: jax.Array,
    entries: Any,
) -> Attended:
    """Attention of queries that are on every device to the entries everywhere."""
    return merge_shards(*attend(q_BTKGH, position_BT, entries), mesh_axes)


def attend_for_some(
    attend: AttendEntries,
    mesh_axes: MeshAxes,
    window: Window,
    q_BTKGH: jax.Array,
    position_BT: jax.Array,
    entries: Any,
) -> Attended:
    """Attention of the queries here to the entries everywhere; both are stripes."""
    n = jax.lax.axis_size(mesh_axes)
    num_steps = steps(window, n)
    out_BTKGH, lse_BTKG = jax.eval_shape(attend, q_BTKGH, own_part(position_BT, mesh_axes), entries)
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(entries))
    of_lse = lse_BTKG.size * FLOAT32_BYTES
    of_queries = query_bytes(q_BTKGH.nbytes, of_lse, out_BTKGH.shape[-1], n)
    if entry_bytes(num_bytes, num_steps) < of_queries:
        return pass_entries(attend, mesh_axes, num_steps, q_BTKGH, position_BT, entries)
    return gather_queries(attend, mesh_axes, q_BTKGH, position_BT, entries)


def entry_bytes(of_entries: int, num_steps: int) -> int:
    """What a device sends where entries go round, from the bytes of its own and their positions."""
    return (num_steps - 1) * of_entries


def query_bytes(of_queries: int, of_lse: int, value_dim: int, n: int) -> int:
    """What a device sends where queries are gathered, and float32 results summed on their way back.

    From the bytes of its own queries and of one float32 number for each. By the ring algorithms a
    gather and a scattered sum send n - 1 times as much, a maximum that all get twice that.
    """
    return (n - 1) * (of_queries + of_lse * (value_dim + 1) + 2 * of_lse)


def gather_queries(
    attend: AttendEntries,
    mesh_axes: MeshAxes,
    q_BTKGH: jax.Array,
    position_BT: jax.Array,
    entries: Any,
) -> Attended:
    """All queries look at the entries here; of the merged results each device gets its own."""
    q_BTKGH = jax.lax.all_gather(q_BTKGH, mesh_axes, axis=1, tiled=True)
    attended = attend(q_BTKGH, position_BT, entries)
    return merge_shards(*attended, mesh_axes, is_scattered=True)


def pass_entries(
    attend: AttendEntries,
    mesh_axes: MeshAxes,
    num_steps: int,
    q_BTKGH: jax.Array,
    position_BT: jax.Array,
    entries: Any,
) -> Attended:
    """Entries go round, and the queries here look at one device's after the other's."""
    position_BT = own_part(position_BT, mesh_axes)

    def attend_part(entries: Any, _: jax.Array) -> Attended:
        return attend(q_BTKGH, position_BT, entries)

    return merge_round(attend_part, entries, mesh_axes, num_steps)


def merge_shards(
    out_BTKGH: jax.Array, lse_BTKG: jax.Array, mesh_axes: MeshAxes, *, is_scattered: bool = False
) -> Attended:
    """`merge` over devices: a maximum of B * T * N numbers, and a sum of B * T * N * (H + 1).

    Where it is scattered, each device keeps its part of the queries.
    """
    max_BTKG = jax.lax.pmax(lse_BTKG, mesh_axes)
    safe_max_BTKG = jnp.where(jnp.isneginf(max_BTKG), 0.0, max_BTKG)
    weight_BTKG1 = jnp.exp(lse_BTKG - safe_max_BTKG)[..., None]
    weighted = [weight_BTKG1 * out_BTKGH.astype(jnp.float32), weight_BTKG1]
    sum_BTKGH = jnp.concatenate(weighted, axis=-1)
    if is_scattered:
        sum_BTKGH = jax.lax.psum_scatter(sum_BTKGH, mesh_axes, scatter_dimension=1, tiled=True)
        safe_max_BTKG = own_part(safe_max_BTKG, mesh_axes)
    else:
        sum_BTKGH = jax.lax.psum(sum_BTKGH, mesh_axes)
    total_BTKG = sum_BTKGH[..., -1]
    is_seen_BTKG = total_BTKG > 0
    safe_total_BTKG = jnp.where(is_seen_BTKG, total_BTKG, 1.0)
    merged_BTKGH = (sum_BTKGH[..., :-1] / safe_total_BTKG[..., None]).astype(out_BTKGH.dtype)
    lse_BTKG = jnp.where(is_seen_BTKG, safe_max_BTKG + jnp.log(safe_total_BTKG), -jnp.inf)
    return merged_BTKGH, lse_BTKG
