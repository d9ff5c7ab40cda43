"""Attention as one primitive that returns `(out, lse)`, and the merge of partial results.

Masks are arrays that are computed from positions. The keys may be split into any parts: `merge` of
the partial results gives attention over all keys. Where a query sees no key of a part, the part has
`lse = -inf` and adds exactly zero, so it never changes a bit of the result. Knows nothing of layers
or meshes, nor how caches are written.

Source of the split: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory", section 3.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from ..cache.entry_codes import EntryCodes, score_codes, weigh_codes
from ..cache.state_spec import Entries
from ..cache.stripes import EMPTY_POSITION
from ..layer_config import PLAIN_SCORES, BothSides, Chunk, Scores, Window

Position = TypeVar("Position", jax.Array, int)
_MASKED_SCORE = -1e30


class Queries(NamedTuple):
    """Queries of a layer, and the sinks of their heads. Both are split over devices by head."""

    q_BTKGH: jax.Array
    sink_KG: jax.Array | None = None


class Attend(Protocol):
    """An attention implementation, which must equal `attend_dense` within tolerance.

    A kernel that does not compute `lse` may return NaN for it in graphs that do not use it.
    """

    def __call__(
        self,
        q_BTKGH: jax.Array,
        k_BKHS: jax.Array,
        v_BKSH: jax.Array,
        visibility: "Visibility",
        scores: Scores = ...,
    ) -> tuple[jax.Array, jax.Array]: ...


@dataclass(frozen=True)
class Visibility:
    """Positions that tell which keys each query sees; masks are computed from them on demand."""

    query_position_BT: jax.Array
    key_position_BS: jax.Array
    window: Window = None
    is_in_order: bool = False
    """Static: query t and key t are token t of one prompt, whose padding comes last. Masks may then
    be computed from indices, and padding may see padding."""

    def mask(self) -> jax.Array:
        """The mask `mask_BTS`, true where a query sees a key."""
        return visible(self.query_position_BT, self.key_position_BS, self.window)


def visible(query_position_BT: jax.Array, key_position_BS: jax.Array, window: Window) -> jax.Array:
    """`mask_BTS`: whether a key is a token, not after the query, and in the window of the query.

    In a window of both sides, keys may be after the query.
    """
    query_BT1, key_B1S = query_position_BT[:, :, None], key_position_BS[:, None, :]
    if isinstance(window, BothSides):
        mask_BTS = (key_B1S > EMPTY_POSITION) & (query_BT1 > EMPTY_POSITION)
        if window.reach is not None:
            mask_BTS &= abs(key_B1S - query_BT1) <= window.reach
        return mask_BTS
    mask_BTS = (key_B1S > EMPTY_POSITION) & (key_B1S <= query_BT1)
    if window is not None:
        mask_BTS &= key_B1S >= first_visible(query_BT1, window)
    return mask_BTS


def first_visible(position: Position, window: int | Chunk | BothSides) -> Position:
    """The first position in the window of a query at `position`; may be negative."""
    if isinstance(window, BothSides):
        return position * 0 if window.reach is None else position - window.reach
    if isinstance(window, Chunk):
        return position - position % window.size
    return position - window + 1


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, or `x` if `cap` is None."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def attend_dense(
    q_BTKGH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """Attend over all keys at once. The reference implementation; scores take T * S memory."""
    out_BTKGH, lse_BTKG = attend_masked(q_BTKGH, k_BKHS, v_BKSH, visibility.mask(), scores)
    return out_BTKGH.astype(q_BTKGH.dtype), lse_BTKG


def attend_masked(
    q_BTKGH: jax.Array,
    k_BKHS: Entries,
    v_BKSH: Entries,
    mask_BTS: jax.Array,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one softmax over the keys that a mask allows.

    Args:
      q_BTKGH: Queries.
      k_BKHS: Keys, which may be in codes (`entry_codes`).
      v_BKSH: Values, in codes if keys are. Their head size may differ from that of keys.
      mask_BTS: True where a query sees a key; T is 1 if all queries see the same keys.
      scores: Scale and cap of the scores.

    Returns:
      `out_BTKGH`, with the head size of values, and the log-sum-exp of the scores as `lse_BTKG`,
      both float32. Where a query sees no key, `out` is zero and `lse` is -inf.
    """
    B, T, K, G, H = q_BTKGH.shape
    # tokens and heads of a group are the rows of one product: XLA for CPU is slow at other forms
    scale = H**-0.5 if scores.scale is None else scores.scale
    q_BKAH = (q_BTKGH * scale).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores_BKAS = soft_cap(_scores(q_BKAH, k_BKHS), scores.cap)
    # one addition: selects before and after the exponential would be two more passes
    mask_BTS = jnp.where(mask_BTS, 0.0, _MASKED_SCORE)
    mask_BAS = mask_BTS if mask_BTS.shape[1] == 1 else jnp.tile(mask_BTS, (1, G, 1))
    scores_BKAS = scores_BKAS + mask_BAS[:, None]
    max_BKA1 = scores_BKAS.max(axis=-1, keepdims=True)
    weights_BKAS = jnp.exp(scores_BKAS - max_BKA1)
    sum_BKA1 = weights_BKAS.sum(axis=-1, keepdims=True)
    out_BKAH = _weighted_sums(weights_BKAS, v_BKSH) / sum_BKA1
    # a maximum that is not finite is kept, so that NaN and infinity reach the output
    is_empty_BKA1 = (max_BKA1 < _MASKED_SCORE / 2) & jnp.isfinite(max_BKA1)
    out_BKGTH = jnp.where(is_empty_BKA1, 0.0, out_BKAH).reshape(B, K, G, T, -1)
    lse_BKA1 = jnp.where(is_empty_BKA1, -jnp.inf, max_BKA1 + jnp.log(sum_BKA1))
    lse_BKGT = lse_BKA1.reshape(B, K, G, T)
    return out_BKGTH.transpose(0, 3, 1, 2, 4), lse_BKGT.transpose(0, 3, 1, 2)


def _weighted_sums(weights_BKAS: jax.Array, v_BKSH: Entries) -> jax.Array:
    """Sums of values with float32 weights."""
    if isinstance(v_BKSH, EntryCodes):
        return weigh_codes(weights_BKAS, v_BKSH)
    return _product(weights_BKAS.astype(v_BKSH.dtype), v_BKSH)


def _scores(q_BKAH: jax.Array, k_BKHS: Entries) -> jax.Array:
    """Products of queries and keys, which may be in codes."""
    if isinstance(k_BKHS, EntryCodes):
        return score_codes(q_BKAH, k_BKHS)
    return _product(q_BKAH, k_BKHS)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Batched matrix product with float32 accumulation and result."""
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def merge(parts: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Merge `(out, lse)` over disjoint sets of keys into `(out, lse)` over their union."""
    if len(parts) == 1:
        return parts[0]
    max_BTKG = parts[0][1]
    for _, lse_BTKG in parts[1:]:
        max_BTKG = jnp.maximum(max_BTKG, lse_BTKG)
    safe_max_BTKG = jnp.where(jnp.isneginf(max_BTKG), 0.0, max_BTKG)
    total_BTKG = jnp.zeros_like(max_BTKG)
    out_BTKGH = jnp.zeros(parts[0][0].shape, jnp.float32)
    for part_BTKGH, lse_BTKG in parts:
        weight_BTKG = jnp.exp(lse_BTKG - safe_max_BTKG)
        total_BTKG = total_BTKG + weight_BTKG
        out_BTKGH = out_BTKGH + weight_BTKG[..., None] * part_BTKGH.astype(jnp.float32)
    safe_total_BTKG = jnp.where(total_BTKG > 0, total_BTKG, 1.0)
    out_BTKGH = (out_BTKGH / safe_total_BTKG[..., None]).astype(parts[0][0].dtype)
    lse_BTKG = jnp.where(total_BTKG > 0, safe_max_BTKG + jnp.log(safe_total_BTKG), -jnp.inf)
    return out_BTKGH, lse_BTKG


def with_sinks(out_BTKGH: jax.Array, lse_BTKG: jax.Array, sink_KG: jax.Array | None) -> jax.Array:
    """Apply attention sinks: one extra key per head with the sink as score and zero as value.

    The sink adds exp(sink) to the sum of exponentials exp(lse). Every weight, and so `out`, is
    multiplied by exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink). Where nothing is visible,
    `out` stays zero. Apply it once, to the result over all keys. Source: "gpt-oss" (2508.10925),
    section 2.2.
    """
    if sink_KG is None:
        return out_BTKGH
    share_BTKG = jax.nn.sigmoid(lse_BTKG - sink_KG.astype(jnp.float32)[None, None])
    return (out_BTKGH * share_BTKG[..., None]).astype(out_BTKGH.dtype)
