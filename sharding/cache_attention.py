"""Attention to a cache whose entries are split over devices: each device reads its own entries.

In decode, the single token of each row is on every device. Two small all-reduces merge the partial
results of the devices. Their size does not depend on the length of the context.

In a chunk, tokens are split in the same way as cache entries. There are two ways to compute their
attention. Queries can be gathered, so that each device reads its entries once for all queries;
partial results are then summed and scattered. Or the queries stay, and entries go around the ring.
The way that sends fewer bytes is used: queries for a short chunk against a long span; entries where
a window or the span is short, or where many queries share a head. The choice follows from shapes,
so it is fixed for each layer of a graph.

Knows nothing of models or rules. Guarantees: the result equals attention to all entries, up to the
order of sums. Sources: Dao et al. 2023, "Flash-Decoding", for the merge; Yang et al. 2024, "Context
Parallelism for Scalable Million-Token Inference" (2411.01783), section 3.4, for the two ways to
continue a prompt.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..modelzoo.attention.attend import AttendEntries
from ..modelzoo.cache.state_spec import array_bytes
from ..modelzoo.layer_config import Window
from .projection import MeshAxes
from .ring_attention import FLOAT32_BYTES, Attended, merge_over_ring, num_ring_steps, own_part


def attend_sharded_cache(
    attend: AttendEntries,
    mesh_axes: MeshAxes,
    q_BTKGH: jax.Array,
    position_BT: jax.Array,
    entries: Any,
) -> Attended:
    """Attention to the cache entries of all devices, for queries that every device has."""
    return merge_shards(*attend(q_BTKGH, position_BT, entries), mesh_axes)


def attend_sharded_chunk(
    attend: AttendEntries,
    mesh_axes: MeshAxes,
    window: Window,
    q_BTKGH: jax.Array,
    position_BT: jax.Array,
    entries: Any,
) -> Attended:
    """Attention of this device's queries to the entries of all devices; both are in stripes."""
    n = jax.lax.axis_size(mesh_axes)
    num_steps = num_ring_steps(window, n)
    out_BTKGH, lse_BTKG = jax.eval_shape(attend, q_BTKGH, own_part(position_BT, mesh_axes), entries)
    cache_bytes = sum(array_bytes(x.shape, x.dtype) for x in jax.tree.leaves(entries))
    lse_bytes = lse_BTKG.size * FLOAT32_BYTES
    total_query_bytes = query_bytes(q_BTKGH.nbytes, lse_bytes, out_BTKGH.shape[-1], n)
    if entry_bytes(cache_bytes, num_steps) < total_query_bytes:
        return pass_entries(attend, mesh_axes, num_steps, q_BTKGH, position_BT, entries)
    return gather_queries(attend, mesh_axes, q_BTKGH, position_BT, entries)


def entry_bytes(own_bytes: int, num_steps: int) -> int:
    """Bytes that a device sends when entries go around the ring.

    Args:
      own_bytes: Bytes of the entries on one device, their positions included.
      num_steps: Stripes that the queries see.
    """
    return (num_steps - 1) * own_bytes


def query_bytes(q_bytes: int, lse_bytes: int, value_dim: int, n: int) -> int:
    """Bytes that a device sends when queries are gathered and results are summed and scattered.

    In the ring algorithms a gather and a reduce-scatter send n - 1 times their local bytes, an
    all-reduce (the maximum) twice as many.

    Args:
      q_bytes: Bytes of the queries on one device.
      lse_bytes: Bytes of one float32 number for each of these queries.
      value_dim: Head dim of the values.
      n: Devices along the cache.
    """
    return (n - 1) * (q_bytes + lse_bytes * (value_dim + 1) + 2 * lse_bytes)


def gather_queries(
    attend: AttendEntries,
    mesh_axes: MeshAxes,
    q_BTKGH: jax.Array,
    position_BT: jax.Array,
    entries: Any,
) -> Attended:
    """Attention of all queries to the entries here; a device gets the results of its queries."""
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
    """Attention of the queries here, as the entries of every device go around the ring."""
    position_BT = own_part(position_BT, mesh_axes)

    def attend_part(entries: Any, _: jax.Array) -> Attended:
        return attend(q_BTKGH, position_BT, entries)

    return merge_over_ring(attend_part, entries, mesh_axes, num_steps)


def merge_shards(
    out_BTKGH: jax.Array, lse_BTKG: jax.Array, mesh_axes: MeshAxes, *, is_scattered: bool = False
) -> Attended:
    """Merge partial results over devices, as `merge` does on one device.

    The maximum has B * T * N numbers, the sum B * T * N * (H + 1). With `is_scattered`, each device
    keeps only its part of the queries.
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
