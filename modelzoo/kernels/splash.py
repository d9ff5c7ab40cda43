"""The splash attention kernel of jax for TPU, for whole prompts, with masks from indices.

Blocks in which nothing is visible are neither read nor computed, and scores never leave the chip.
Knows nothing of caches or meshes. Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..attention.attend import Visibility
from ..layer_config import PLAIN_SCORES, BothSides, Chunk, Scores, Window
from .call import AttentionCall

BLOCKS = (512, 256, 128)
"""Tokens of a block; the largest divisor of the prompt is used. A register has 128 lanes."""
MAX_BLOCKS = 256
"""The maximum blocks of a prompt: a small memory holds a table with an entry for each pair."""


def splash_refusal(call: AttentionCall) -> str | None:
    """The reason why the kernel cannot serve a call, or None if it can."""
    if not call.is_in_order:
        return "it takes whole prompts whose tokens lie in order on one device"
    if call.sees_later:
        return "its masks let no query see later keys"
    if call.num_queries % BLOCKS[-1]:
        return f"it takes whole blocks of {BLOCKS[-1]} tokens, got {call.num_queries} tokens"
    if call.num_queries // prompt_block_size(call.num_queries) > MAX_BLOCKS:
        max_tokens = MAX_BLOCKS * prompt_block_size(call.num_queries)
        return f"its table of blocks ends at {max_tokens} tokens, got {call.num_queries} tokens"
    return None


def attend_splash(
    q_BTKGH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
    *,
    needs_lse: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_dense` does. Padding sees padding, so its results differ.

    Static: `needs_lse`. Without it `lse` is NaN; the kernel would write it 128 times.
    """
    assert visibility.is_in_order, "the mask is computed from indices"
    B, T, K, G, H = q_BTKGH.shape
    # rows become heads: under vmap the kernel does not run in the interpreter
    kernel = _kernel(visibility.window, T, B * K * G, scores.cap, needs_lse)
    scale = H**-0.5 if scores.scale is None else scores.scale
    q_BKGTH = (q_BTKGH * scale).transpose(0, 2, 3, 1, 4)
    k_BKTH = k_BKHS.swapaxes(2, 3)
    heads = [x.reshape(-1, T, x.shape[-1]) for x in (q_BKGTH, k_BKTH, v_BKSH)]
    # the compiler refuses float32 precision for 16-bit operands, whose products are exact anyway
    precision = "float32" if q_BTKGH.dtype == jnp.float32 else "default"
    with jax.default_matmul_precision(precision):
        attended = kernel(*heads)
    has_lse = isinstance(attended, tuple)
    out, lse = (attended[0], attended[1][0]) if has_lse else (attended, jnp.float32(jnp.nan))
    out_BTKGH = out.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4)
    lse_BKGT = jnp.broadcast_to(lse, (B * K * G, T)).reshape(B, K, G, T)
    return out_BTKGH, lse_BKGT.transpose(0, 3, 1, 2)


def _kernel(
    window: Window, T: int, num_heads: int, cap: float | None, needs_lse: bool
) -> Callable[..., Any]:
    # imported late: only starts with this kernel spend the tenth of a second that Pallas takes
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    match window:
        case None:
            mask = masks.CausalMask((T, T))
        case Chunk(size):
            mask = masks.ChunkedCausalMask((T, T), size)
        case BothSides():
            raise AssertionError("splash_refusal refuses it")
        case size:
            mask = masks.LocalMask((T, T), (size - 1, 0), offset=0)
    block = prompt_block_size(T)
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        # keys have tokens along the last axis
        block_sizes=splash.BlockSizes(block, block, block, k_layout=splash.QKVLayout.SEQ_MINOR),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=needs_lse,
        attn_logits_soft_cap=cap,
    )


def prompt_block_size(T: int) -> int:
    """The tokens of a block, for a prompt of T tokens."""
    return next(block for block in BLOCKS if T % block == 0)
