"""Attention over tokens that are split over devices: a ring that merges partial results.

Queries, keys and values of a prompt lie in stripes on a ring of devices. Keys and values travel
around the ring, and the next stripe is in flight while the current one is used. For a whole prompt
they are never more bytes than queries and float32 results.

Every device knows the positions of all tokens, so only arrays with heads travel: each key/value
head once, however many queries read it. Keys and values that were computed from latents travel as
heads, because otherwise every device would compute them again. The caller handles sinks, after the
last merge.

Knows nothing of models or rules. Guarantees: the result equals `attend` over all keys, up to the
order of sums. Sources: Liu et al. 2023, "Ring Attention" (2310.01889), section 3; Brandon et al.
2023, "Striped Attention" (2311.09431), section 3.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..modelzoo.attention.attend import Attend, Visibility, merge
from ..modelzoo.layer_config import PLAIN_SCORES, BothSides, Scores, Window, window_size
from .projection import MeshAxes

Attended = tuple[jax.Array, jax.Array]


def attend_on_ring(
    attend: Attend,
    mesh_axes: MeshAxes,
    q_BTKGH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
) -> Attended:
    """Attention of this device's queries to the keys of all devices.

    `visibility` has the positions of all tokens.
    """
    n = jax.lax.axis_size(mesh_axes)
    query_BT = _cut(visibility.query_position_BT, jax.lax.axis_index(mesh_axes), n)

    def attend_part(keys_values: tuple[jax.Array, jax.Array], device: jax.Array) -> Attended:
        key_BS = _cut(visibility.key_position_BS, device, n)
        seen = Visibility(query_BT, key_BS, visibility.window)
        return attend(q_BTKGH, *keys_values, seen, scores)

    return merge_over_ring(
        attend_part, (k_BKHS, v_BKSH), mesh_axes, num_ring_steps(visibility.window, n)
    )


def num_ring_steps(window: Window, n: int) -> int:
    """Number of stripes whose keys a query sees, counted from its own stripe backwards.

    Stripe i sees stripe i - d at the positions d, d + n, ... back, so a window of n positions or
    more reaches all stripes.
    """
    if window is None or isinstance(window, BothSides):
        return n
    return min(n, window_size(window))


def merge_over_ring(
    attend_part: Callable[[Any, jax.Array], Attended],
    keys: Any,
    mesh_axes: MeshAxes,
    num_steps: int,
) -> Attended:
    """Merge `attend_part(keys, device)` over the devices of the ring, as their keys arrive.

    After s steps a device has the keys of the device s places before it.
    """
    n, me = jax.lax.axis_size(mesh_axes), jax.lax.axis_index(mesh_axes)

    def add(step: jax.Array | int, keys: Any, attended: Attended) -> Attended:
        return merge([attended, attend_part(keys, (me - step) % n)])

    def step_and_send(step: jax.Array, carry: tuple[Any, Attended]):
        keys, attended = carry
        # send before use, so that the next part is in flight meanwhile
        next_keys = _receive(keys, mesh_axes, 1)
        return next_keys, add(step, keys, attended)

    shapes = jax.eval_shape(attend_part, keys, me)
    # in float32: partial sums are rounded once, at the end
    nothing = jnp.zeros(shapes[0].shape), jnp.full(shapes[1].shape, -jnp.inf)
    keys, attended = jax.lax.fori_loop(0, num_steps - 1, step_and_send, (keys, nothing))
    return _rounded(add(num_steps - 1, keys, attended), shapes)


def merge_shards(out_BTKGH: jax.Array, lse_BTKG: jax.Array, mesh_axes: MeshAxes) -> Attended:
    """Merge attention to the entries of each device over all devices, as `merge` does on one.

    The maximum has B * T * N numbers, the sum B * T * N * (H + 1): no more for a longer context.
    Source: Dao et al. 2023, "Flash-Decoding".
    """
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


def _cut(x_BT: jax.Array, device: jax.Array, n: int) -> jax.Array:
    """The part of an array of all tokens that one of n devices has."""
    T = x_BT.shape[1] // n
    return jax.lax.dynamic_slice_in_dim(x_BT, device * T, T, axis=1)


def _receive(arrays: Any, mesh_axes: MeshAxes, distance: int) -> Any:
    """Arrays of the device `distance` places before this one.

    NOTE: `ppermute` numbers devices in the order of the mesh, `axis_index` in the order of the
    names; the two must be the same, which `legality` checks.
    """
    n = jax.lax.axis_size(mesh_axes)
    to = [(i, (i + distance) % n) for i in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, mesh_axes, to), arrays)


def _rounded(attended: Attended, shapes: Attended) -> Attended:
    out_BTKGH, lse_BTKG = attended
    return out_BTKGH.astype(shapes[0].dtype), lse_BTKG
