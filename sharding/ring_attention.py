"""Attention over tokens that are split over devices: partial results of the one primitive, merged.

A prompt's queries, keys and values lie in equal parts on a ring of devices. Keys and values go
round, the next part in flight while one is attended to; or, where that is less to send, queries and
their partial results go round and keys stay. Where devices have neighbouring tokens and no query of
a layer sees past the device before, only what it sees of that is sent.

Positions are data: those of all tokens are on every device, so only what has heads travels, once a
key/value head however many queries read it. Keys and values that were made from latents travel as
heads, too: they would be made anew on every device otherwise. Sinks are the caller's, after the
last merge.

Knows nothing of models or rules. Guarantees: equals `attend` over all keys, up to the order of
sums. Sources: Liu et al. 2023, "Ring Attention" (2310.01889), section 3; Yang et al. 2024, "Context
Parallelism for Scalable Million-Token Inference" (2411.01783), section 3.4, for queries that go
round.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..modelzoo.attention import Attend, Visibility, first_visible, merge
from ..modelzoo.config import PLAIN_SCORES, Chunk, Scores, Window, window_size
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
        attend, arrays = partial(attend, scores=scores), (q_BTKGH, k_BKHS, v_BKSH)
        window, num_steps = visibility.window, steps(visibility.window, T, n, self.is_striped)
        if window is not None and num_steps == 2 and not self.is_striped:
            length = reach(window, T, n)
            return pass_tails(attend, arrays, visibility, self.mesh_axes, length)
        passes = pass_keys
        if query_bytes(q_BTKGH, v_BKSH, num_steps) < key_bytes(k_BKHS, v_BKSH, num_steps):
            passes = pass_queries
        return passes(attend, arrays, visibility, self.mesh_axes, num_steps)


def steps(window: Window, length: int, n: int, is_striped: bool) -> int:
    """Parts of `length` tokens that queries see keys of, from their own part backwards.

    Stripe i sees stripe i - d in positions d back, d + n back and so on, so a window of n positions
    or more reaches all stripes.
    """
    if window is None:
        return n
    if is_striped:
        return min(n, window_size(window))
    return 1 + -(-reach(window, length, n) // length)


def reach(window: int | Chunk, length: int, n: int) -> int:
    """How many tokens before those of its device a query sees, where devices have neighbours."""
    starts = [i * length for i in range(n)]
    return max(start - max(0, first_visible(start, window)) for start in starts)


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
    """Keys and values go round."""
    q_BTKGH, k_BKHS, v_BKSH = arrays
    n, me = jax.lax.axis_size(mesh_axes), jax.lax.axis_index(mesh_axes)

    def attend_part(keys_values: tuple[jax.Array, jax.Array], device: jax.Array) -> Attended:
        k_BKHS, v_BKSH = keys_values
        return attend(q_BTKGH, k_BKHS, v_BKSH, _part(visibility, me, device, n))

    return merge_round(attend_part, (k_BKHS, v_BKSH), mesh_axes, num_steps)


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


def pass_tails(
    attend: Attend,
    arrays: Arrays,
    visibility: Visibility,
    mesh_axes: MeshAxes,
    length: int,
) -> Attended:
    """The last keys and values of each device go on to the next, whose queries see no further."""
    q_BTKGH, k_BKHS, v_BKSH = arrays
    n, me = jax.lax.axis_size(mesh_axes), jax.lax.axis_index(mesh_axes)
    tails = k_BKHS[..., -length:], v_BKSH[..., -length:, :]
    k_tail_BKHS, v_tail_BKSH = _sent(tails, mesh_axes, 1)
    before = _part(visibility, me, (me - 1) % n, n)
    of_tail = replace(before, key_position_BS=before.key_position_BS[:, -length:])
    own = attend(q_BTKGH, k_BKHS, v_BKSH, _part(visibility, me, me, n))
    return merge([own, attend(q_BTKGH, k_tail_BKHS, v_tail_BKSH, of_tail)])


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

    def attend_part(q_BTKGH: jax.Array, device: jax.Array) -> Attended:
        return attend(q_BTKGH, k_BKHS, v_BKSH, _part(visibility, device, me, n))

    def add(step: jax.Array | int, q_BTKGH: jax.Array, attended: Attended) -> Attended:
        return merge([attended, attend_part(q_BTKGH, (me + step) % n)])

    def turn(step: jax.Array, carry: tuple[jax.Array, Attended]):
        q_BTKGH, attended = carry
        following = _sent(q_BTKGH, mesh_axes, -1)
        return following, _sent(add(step, q_BTKGH, attended), mesh_axes, -1)

    made = jax.eval_shape(attend_part, q_BTKGH, me)
    q_BTKGH, attended = jax.lax.fori_loop(0, num_steps - 1, turn, (q_BTKGH, _nothing(made)))
    attended = add(num_steps - 1, q_BTKGH, attended)
    return _rounded(_sent(attended, mesh_axes, num_steps - 1), made)


def own_part(x_BT: jax.Array, mesh_axes: MeshAxes) -> jax.Array:
    """This device's part of what is of all tokens."""
    return _cut(x_BT, jax.lax.axis_index(mesh_axes), jax.lax.axis_size(mesh_axes))


def _cut(x_BT: jax.Array, device: jax.Array, n: int) -> jax.Array:
    T = x_BT.shape[1] // n
    return jax.lax.dynamic_slice_in_dim(x_BT, device * T, T, axis=1)


def _part(visibility: Visibility, of_queries: jax.Array, of_keys: jax.Array, n: int) -> Visibility:
    """What queries of one device see of the keys of another."""
    query_BT = _cut(visibility.query_position_BT, of_queries, n)
    key_BS = _cut(visibility.key_position_BS, of_keys, n)
    return Visibility(query_BT, key_BS, visibility.window)


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
