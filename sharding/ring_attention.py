"""Attention over tokens that are split over devices: partial results of the one primitive, merged.

A prompt's queries, keys and values lie in stripes on a ring of devices. Keys and values go round,
the next stripe in flight while one is attended to: of a whole prompt they are never more to send
than queries and float32 results.

Positions are data: those of all tokens are on every device, so only what has heads travels, once a
key/value head however many queries read it. Keys and values that were made from latents travel as
heads, too: they would be made anew on every device otherwise. Sinks are the caller's, after the
last merge.

Knows nothing of models or rules. Guarantees: equals `attend` over all keys, up to the order of
sums. Sources: Liu et al. 2023, "Ring Attention" (2310.01889), section 3; Brandon et al. 2023,
"Striped Attention" (2311.09431), section 3.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..modelzoo.attention import Attend, Visibility, merge
from ..modelzoo.config import PLAIN_SCORES, Scores, Window, window_size
from .projection import MeshAxes

FLOAT32_BYTES = 4
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
    """Attention of the queries here to the keys everywhere; positions are of all tokens."""
    n = jax.lax.axis_size(mesh_axes)
    query_BT = own_part(visibility.query_position_BT, mesh_axes)

    def attend_part(keys_values: tuple[jax.Array, jax.Array], device: jax.Array) -> Attended:
        key_BS = _cut(visibility.key_position_BS, device, n)
        seen = Visibility(query_BT, key_BS, visibility.window)
        return attend(q_BTKGH, *keys_values, seen, scores)

    return merge_round(attend_part, (k_BKHS, v_BKSH), mesh_axes, steps(visibility.window, n))


def steps(window: Window, n: int) -> int:
    """Stripes that queries see keys of, from their own stripe backwards.

    Stripe i sees stripe i - d in positions d back, d + n back and so on, so a window of n positions
    or more reaches all stripes.
    """
    return n if window is None else min(n, window_size(window))


def merge_round(
    attend_part: Callable[[Any, jax.Array], Attended],
    keys: Any,
    mesh_axes: MeshAxes,
    num_steps: int,
) -> Attended:
    """`attend_part(keys, device)` of the keys of each device, merged as they come round.

    After s steps a device has those of the device s before it.
    """
    n, me = jax.lax.axis_size(mesh_axes), jax.lax.axis_index(mesh_axes)

    def add(step: jax.Array | int, keys: Any, attended: Attended) -> Attended:
        return merge([attended, attend_part(keys, (me - step) % n)])

    def turn(step: jax.Array, carry: tuple[Any, Attended]):
        keys, attended = carry
        # sent before it is used: the next part is in flight meanwhile
        following = _sent(keys, mesh_axes, 1)
        return following, add(step, keys, attended)

    made = jax.eval_shape(attend_part, keys, me)
    keys, attended = jax.lax.fori_loop(0, num_steps - 1, turn, (keys, _nothing(made)))
    return _rounded(add(num_steps - 1, keys, attended), made)


def own_part(x_BT: jax.Array, mesh_axes: MeshAxes) -> jax.Array:
    """This device's part of what is of all tokens."""
    return _cut(x_BT, jax.lax.axis_index(mesh_axes), jax.lax.axis_size(mesh_axes))


def _cut(x_BT: jax.Array, device: jax.Array, n: int) -> jax.Array:
    T = x_BT.shape[1] // n
    return jax.lax.dynamic_slice_in_dim(x_BT, device * T, T, axis=1)


def _sent(arrays: Any, mesh_axes: MeshAxes, distance: int) -> Any:
    """Arrays of the device `distance` before this one.

    NOTE: `ppermute` numbers devices in the order of the mesh, `axis_index` in that of the names;
    the two must be the same, which is checked with the layout.
    """
    n = jax.lax.axis_size(mesh_axes)
    to = [(i, (i + distance) % n) for i in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, mesh_axes, to), arrays)


def _nothing(made: Attended) -> Attended:
    """Attention to no keys, in float32: partial sums are rounded once, at the end."""
    out_BTKGH, lse_BTKG = made
    return jnp.zeros(out_BTKGH.shape), jnp.full(lse_BTKG.shape, -jnp.inf)


def _rounded(attended: Attended, made: Attended) -> Attended:
    out_BTKGH, lse_BTKG = attended
    return out_BTKGH.astype(made[0].dtype), lse_BTKG
