"""Flash attention of cuDNN for NVIDIA GPUs, through `jax.nn.dot_product_attention`.

Knows nothing of caches or meshes. Source of the conditions: the checks of jax 0.10.2 in
`jax/_src/cudnn/fused_attention_stablehlo.py`.
"""

import jax
import jax.numpy as jnp

from ..attention.attend import Visibility
from ..errors import UserError
from ..layer_config import PLAIN_SCORES, BothSides, Chunk, Scores
from .call import AttentionCall

HEAD_STEP, MAX_HEAD_DIM = 8, 128
"""Head sizes are multiples of the first, up to the second, on every GPU with the kernel (from
Ampere on)."""


def cudnn_refusal(call: AttentionCall) -> str | None:
    """The reason why the kernel cannot serve a call, or None if it can."""
    if not call.is_in_order:
        return "it takes whole prompts whose tokens lie in order on one device"
    if call.dtype.name not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, got {call.dtype.name}"
    if call.key_dim != call.value_dim:
        return f"it takes values and keys of one head size, got {call.value_dim} and {call.key_dim}"
    if call.key_dim % HEAD_STEP or call.key_dim > MAX_HEAD_DIM:
        return f"it takes heads of multiples of {HEAD_STEP} to {MAX_HEAD_DIM}, got {call.key_dim}"
    if call.scores.cap is not None:
        return "it does not cap scores"
    if call.has_sinks:
        return "its log-sum-exp is rounded as its results are, too coarse to weigh sinks against"
    if any(isinstance(window, Chunk) for window in call.windows):
        return "it has no mask of chunks"
    if call.sees_later:
        return "its masks let no query see later keys"
    return None


def attend_cudnn(
    q_BTKGH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_dense` does, with `lse` rounded to the dtype of queries.

    Padding sees padding, so its results differ.
    """
    assert visibility.is_in_order, "the mask is computed from indices"
    assert scores.cap is None and not isinstance(visibility.window, Chunk | BothSides)
    B, T, K, G, H = q_BTKGH.shape
    window = visibility.window
    try:
        out_BTNH, lse_BTN = jax.nn.dot_product_attention(
            q_BTKGH.reshape(B, T, K * G, H),
            k_BKHS.transpose(0, 3, 1, 2),
            v_BKSH.swapaxes(1, 2),
            scale=scores.scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
            return_residual=True,
        )
    except RuntimeError as error:  # jax raises it if it finds no cuDNN library
        raise UserError(
            f"attention kernel cudnn: expected cuDNN's library, as graphs are lowered for its "
            f"version, got: {error} Install the extra noria[gpu-compile] (without a GPU) or "
            f"noria[cuda12], or ask for the kernel xla."
        ) from error
    lse_BTKG = lse_BTN.reshape(B, T, K, G).astype(jnp.float32)
    return out_BTNH.reshape(B, T, K, G, H), lse_BTKG
