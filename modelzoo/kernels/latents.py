"""Decode from latents in codes, in blocks of rows, for XLA's compiler for TPU.

Latents are the keys and the values of all heads. XLA multiplies them twice, and reads them from
main memory for each product. Here both products of a block of rows use one copy of its codes, which
is small enough that the compiler keeps it on the chip. So latents are read once.

It does not serve latents in float: for v5p, the compiler writes their copies to main memory.

Knows nothing of layers or meshes. Guarantees: each row is computed as `attend_dense` does.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from ..attention.attend import Visibility, attend_masked
from ..cache.entry_codes import EntryCodes
from ..layer_config import PLAIN_SCORES, Scores
from .call import AttentionCall

BLOCK_BYTES = 8 * 2**20
"""Maximum bytes of the codes of a block, unless that takes too many blocks."""
MAX_BLOCKS = 16
"""Maximum number of blocks, all of which are in the program."""


def latents_refusal(call: AttentionCall) -> str | None:
    """The reason why the kernel cannot serve a call, or None if it can."""
    if not call.reads_latents:
        return "it takes models with latent attention"
    if not call.has_codes:
        return "it takes a cache in codes (numbers.cache)"
    return None


def attend_latents(
    q_BTKGH: jax.Array,
    k_BKHS: EntryCodes,
    v_BKSH: EntryCodes,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_dense` does, to keys and values that are the same latents in codes.

    Static: `block_bytes`, the maximum bytes of the codes of a block.
    """
    mask_BTS, B = visibility.mask(), len(q_BTKGH)
    size = B // _num_blocks(B, v_BKSH.codes.nbytes, block_bytes)
    parts = []
    for start in range(0, B, size):
        rows = slice(start, start + size)
        # without the barrier, each product would slice the whole array
        codes_BKSH = jax.lax.optimization_barrier(v_BKSH.codes[rows])
        scale_BKPS = v_BKSH.scale_BKPS[rows]
        keys = replace(k_BKHS, codes=codes_BKSH.swapaxes(2, 3), scale_BKPS=scale_BKPS)
        values = replace(v_BKSH, codes=codes_BKSH, scale_BKPS=scale_BKPS)
        parts.append(attend_masked(q_BTKGH[rows], keys, values, mask_BTS[rows], scores))
    out_BTKGH, lse_BTKG = map(jnp.concatenate, zip(*parts, strict=True))
    return out_BTKGH.astype(q_BTKGH.dtype), lse_BTKG


def _num_blocks(num_rows: int, num_bytes: int, block_bytes: int) -> int:
    """The number of blocks. All have the same number of rows, as a row's bits may depend on it.

    There are at least two blocks if possible, as XLA ignores a copy of a whole array.
    """
    counts = [n for n in range(2, min(num_rows, MAX_BLOCKS) + 1) if num_rows % n == 0] or [1]
    return next((n for n in counts if num_bytes <= n * block_bytes), counts[-1])
