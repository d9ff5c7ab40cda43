"""Attention over tokens that are split over devices: partial results of the one primitive, merged.

A prompt's queries, keys and values lie in equal parts on a ring of devices. Keys and values go
round, the next part in flight while one is attended to; or, where that is less to send, queries and
their partial results go round and keys stay. A token that reads a cache in parts attends to each
where it is, and two small sums merge the results, whatever the length of the context.

Positions are data: those of all tokens are on every device, so only what has heads travels, once a
key/value head however many queries read it. Keys and values that were made from latents travel as
heads, too: they would be made anew on every device otherwise. Sinks are the caller's, after the
last merge.

Knows nothing of models or rules. Guarantees: equals `attend` over all keys, up to the order of
sums. Sources: Liu et al. 2023, "Ring Attention" (2310.01889), section 3; Yang et al. 2024, "Context
Parallelism for Scalable Million-Token Inference" (2411.01783), section 3.4, for queries that go
round; Dao et al. 2023, "Flash-Decoding", for the merge of a cache's parts.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..modelzoo.attention import Attend, Visibility, first_visible, merge
from ..modelzoo.config import PLAIN_SCORES, Scores, Window, window_size
from .projection import MeshAxes

FLOAT32_BYTES = 4
Attended = tuple[jax.Array, jax.Array]
Arrays = tuple[jax.Array, jax.Array, jax.Array]
"""Queries, keys and values of one device."""


@dataclass(frozen=True)
class Ring:
    """Devices along mesh axes, each with an equal part of the tokens; for use in a `shard_map`."""

    mesh_axes: MeshAxes
    is_striped: bool
    """Whether a part is a stripe, or a run of neighbours."""

    def attend(
        self,
        attend: Attend,
        q_BTKGH: jax.Array,
        k_BKHS: jax.Array,
        v_BKSH: jax.Array,
        visibility: Visibility,
        scores: Scores = PLAIN_SCORES,
    ) -> Attended:
        """Attention of the queries here to the keys everywhere; positions are of all tokens."""
        n, T = jax.lax.axis_size(self.mesh_axes), q_BTKGH.shape[1]
        attend = partial(attend, scores=scores)
        num_steps = steps(visibility.window, T, n, self.is_striped)
        passes = pass_keys
        if query_bytes(q_BTKGH, v_BKSH, num_steps) < key_bytes(k_BKHS, v_BKSH, num_steps):
            passes = pass_queries
        return passes(attend, (q_BTKGH, k_BKHS, v_BKSH), visibility, self.mesh_axes, num_steps)


def steps(window: Window, length: int, n: int, is_striped: bool) -> int:
    """Parts of `length` tokens that queries see keys of, from their own part backwards.

    Stripe i sees stripe i - d in positions d back, d + n back and so on, so a window of n positions
    or more reaches all stripes.
    """
    if window is None:
        return n
    if is_striped:
        return min(n, window_size(window))
    reached = [max(0, first_visible(i * length, window)) // length for i in range(n)]
    return 1 + max(i - first for i, first in enumerate(reached))


def key_bytes(k_BKHS: jax.Array, v_BKSH: jax.Array, num_steps: int) -> int:
    """What a device sends where keys and values go round (2411.01783, section 3.4)."""
    return (num_steps - 1) * (k_BKHS.nbytes + v_BKSH.nbytes)


def query_bytes(q_BTKGH: jax.Array, v_BKSH: jax.Array, num_steps: int) -> int:
    """What a device sends where queries and their float32 `(out, lse)` go round and come home.

    The published count has results in the queries' dtype, and no lse.
    """
    num_queries = math.prod(q_BTKGH.shape[:-1])
    results = num_queries * (v_BKSH.shape[-1] + 1) * FLOAT32_BYTES
    return (num_steps - 1) * (q_BTKGH.nbytes + results) + (results if num_steps > 1 else 0)


def pass_keys(
    attend: Attend,
    arrays: Arrays,
    visibility: Visibility,
    mesh_axes: MeshAxes,
    num_steps: int,
) -> Attended:
    """Keys and values go round. After s steps a device has those of the device s before it."""
    q_BTKGH, *keys_values = arrays
    n, me = jax.lax.axis_size(mesh_axes), jax.lax.axis_index(mesh_axes)

    def add(step: jax.Array | int, keys_values: list[jax.Array], attended: Attended) -> Attended:
        (k_BKHS, v_BKSH), seen = keys_values, _part(visibility, me, (me - step) % n, n)
        return merge([attended, attend(q_BTKGH, k_BKHS, v_BKSH, seen)])

    def turn(step: jax.Array, carry: tuple[list[jax.Array], Attended]):
        keys_values, attended = carry
        # sent before it is used: the next part is in flight meanwhile
        following = _sent(keys_values, mesh_axes, 1)
        return following, add(step, keys_values, attended)

    carry = keys_values, _nothing(*arrays)
    keys_values, attended = jax.lax.fori_loop(0, num_steps - 1, turn, carry)
    return _as_values(add(num_steps - 1, keys_values, attended), arrays)


def pass_queries(
    attend: Attend,
    arrays: Arrays,
    visibility: Visibility,
    mesh_axes: MeshAxes,
    num_steps: int,
) -> Attended:
    """Queries go round with what they have gathered, and come home in one step at the end.

    After s steps a device has the queries of the device s after it.
    """
    q_BTKGH, k_BKHS, v_BKSH = arrays
    n, me = jax.lax.axis_size(mesh_axes), jax.lax.axis_index(mesh_axes)

    def add(step: jax.Array | int, q_BTKGH: jax.Array, attended: Attended) -> Attended:
        seen = _part(visibility, (me + step) % n, me, n)
        return merge([attended, attend(q_BTKGH, k_BKHS, v_BKSH, seen)])

    def turn(step: jax.Array, carry: tuple[jax.Array, Attended]):
        q_BTKGH, attended = carry
        following = _sent(q_BTKGH, mesh_axes, -1)
        return following, _sent(add(step, q_BTKGH, attended), mesh_axes, -1)

    carry = q_BTKGH, _nothing(*arrays)
    q_BTKGH, attended = jax.lax.fori_loop(0, num_steps - 1, turn, carry)
    attended = add(num_steps - 1, q_BTKGH, attended)
    return _as_values(_sent(attended, mesh_axes, num_steps - 1), arrays)


def merge_shards(out_BTKGH: jax.Array, lse_BTKG: jax.Array, mesh_axes: MeshAxes) -> Attended:
    """`merge` over devices: a maximum of B * N numbers, and a sum of B * N * (H + 1)."""
    max_BTKG = jax.lax.pmax(lse_BTKG, mesh_axes)
    safe_max_BTKG = jnp.where(jnp.isneginf(max_BTKG), 0.0, max_BTKG)
    weight_BTKG1 = jnp.exp(lse_BTKG - safe_max_BTKG)[..., None]
    weighted = [weight_BTKG1 * out_BTKGH.astype(jnp.float32), weight_BTKG1]
    sum_BTKGH = jax.lax.psum(jnp.concatenate(weighted, axis=-1), mesh_axes)
    total_BTKG = sum_BTKGH[..., -1]
    is_seen_BTKG = total_BTKG > 0
    safe_total_BTKG = jnp.where(is_seen_BTKG, total_BTKG, 1.0)
    merged_BTKGH = (sum_BTKGH[..., :-1] / safe_total_BTKG[..., None]).astype(out_BTKGH.dtype)
    lse_BTKG = jnp.where(is_seen_BTKG, safe_max_BTKG + jnp.log(safe_total_BTKG), -jnp.inf)
    return merged_BTKGH, lse_BTKG


def _part(visibility: Visibility, of_queries: jax.Array, of_keys: jax.Array, n: int) -> Visibility:
    """What queries of one device see of the keys of another."""

    def cut(position_BT: jax.Array, device: jax.Array) -> jax.Array:
        T = position_BT.shape[1] // n
        return jax.lax.dynamic_slice_in_dim(position_BT, device * T, T, axis=1)

    query_BT = cut(visibility.query_position_BT, of_queries)
    key_BS = cut(visibility.key_position_BS, of_keys)
    return Visibility(query_BT, key_BS, visibility.window)


def _sent(arrays: Any, mesh_axes: MeshAxes, distance: int) -> Any:
    """Arrays of the device `distance` before this one.

    NOTE: `ppermute` numbers devices in the order of the mesh, `axis_index` in that of the names;
    the two must be the same, which is checked with the layout.
    """
    n = jax.lax.axis_size(mesh_axes)
    to = [(i, (i + distance) % n) for i in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, mesh_axes, to), arrays)


def _nothing(q_BTKGH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array) -> Attended:
    """Attention to no keys, in float32: partial sums are rounded once, at the end."""
    del k_BKHS
    shape = q_BTKGH.shape[:-1]
    return jnp.zeros((*shape, v_BKSH.shape[-1])), jnp.full(shape, -jnp.inf)


def _as_values(attended: Attended, arrays: Arrays) -> Attended:
    out_BTKGH, lse_BTKG = attended
    return out_BTKGH.astype(arrays[2].dtype), lse_BTKG
