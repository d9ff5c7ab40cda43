"""The paged kernel of jax for TPU: a token's attention to its cache, as far as the cache is filled.

A head of a row, cut into pages that lie one after the other, is what the kernel takes for a
sequence; so a cache of slots is read without a copy, provided keys lie entry by entry in memory, as
values do. Knows nothing of meshes. Source: `jax.experimental.pallas.ops.tpu.paged_attention`.
"""

import jax
import jax.numpy as jnp

from ..attention import Visibility
from ..config import PLAIN_SCORES, Scores
from .call import AttentionCall

PAGES = (512, 256, 128)
"""Entries of a page, the largest that divides a cache."""
LANES = 128
"""Of a register: heads are multiples of it."""


def paged_refusal(call: AttentionCall) -> str | None:
    """Why the kernel cannot serve a call, or None."""
    if not call.sees_beginning:
        return "it takes single tokens that see a beginning of a cache on their device"
    if call.dtype != jnp.bfloat16:
        return f"it takes bfloat16, and rounds others to it, got {call.dtype.name}"
    if call.key_dim % LANES or call.key_dim != call.value_dim:
        sizes = f"got {call.key_dim} and {call.value_dim}"
        return f"it takes keys and values of one multiple of {LANES}, {sizes}"
    if (most := max(map(len, call.segments))) > 1:
        return f"it gives no log-sum-exp, to merge {most} segments of a cache by"
    if call.has_sinks:
        return "it gives no log-sum-exp, to weigh sinks against"
    lengths = sorted(length for segments in call.segments for length in segments)
    if any(length % PAGES[-1] for length in lengths):
        return f"it takes whole pages of {PAGES[-1]} entries, got caches of {lengths}"
    return None


def attend_paged(
    q_BTKGH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """As `attend_dense` for single tokens, with an `lse` of NaN."""
    # importing Pallas takes a tenth of a second, for which starts without this kernel need not wait
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    assert visibility.sees_beginning, "the mask is a number of entries"
    B, T, K, G, H = q_BTKGH.shape
    assert T == 1
    page = next(page for page in PAGES if k_BKHS.shape[3] % page == 0)
    num_visible_B = visibility.mask()[:, 0].sum(axis=1, dtype=jnp.int32)
    k_pages, v_pages = (x.reshape(1, -1, page, H) for x in (k_BKHS.swapaxes(2, 3), v_BKSH))
    scale = H**-0.5 if scores.scale is None else scores.scale
    # the compiler refuses products of narrow operands in float32; they are exact as they are
    with jax.default_matmul_precision("default"):
        out = paged_attention(
            (q_BTKGH * scale).reshape(B * K, G, H),
            k_pages,
            v_pages,
            jnp.repeat(num_visible_B, K),
            jnp.arange(k_pages.shape[1], dtype=jnp.int32).reshape(B * K, -1),
            attn_logits_soft_cap=scores.cap,
            pages_per_compute_block=1,
        )
    out_BTKGH = out.reshape(q_BTKGH.shape).astype(v_BKSH.dtype)
    return out_BTKGH, jnp.full(q_BTKGH.shape[:-1], jnp.nan)
