"""A flash attention kernel for TPU, for chunks of prompts, with masks from positions.

Queries of several tokens and several heads of a group are the rows of one product, so a block of
keys and values is read once for all of them. Scores never leave the chip. Pairs of blocks in which
nothing is visible are neither read nor computed. Keys and values may stay in the cache: the kernel
reads the slots of its rows by number.

Knows nothing of layers or meshes. Guarantees: equals `attend_dense` up to the order of sums, `lse`
included. Sources: Dao et al. 2022, "FlashAttention" (2205.14135), algorithm 1; Dao 2023,
"FlashAttention-2" (2307.08691), section 3.1, for the single division of results at the end.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..attention.attend import SlotReader, Visibility, soft_cap
from ..axes import LANES
from ..layer_config import PLAIN_SCORES, Scores
from .call import AttentionCall
from .flash_blocks import (
    Blocks,
    block_sizes,
    blocks_read,
    call_bytes,
    call_flops,
    max_keys_seen,
    pad_to_blocks,
    visible_positions,
)

VMEM_BYTES = 32 * 2**20
"""The limit of on-chip memory for the kernel, twice the default."""
_MASKED_SCORE = -1e30


def flash_refusal(call: AttentionCall) -> str | None:
    """The reason why the kernel cannot serve a call, or None if it can."""
    if not call.segments:
        return "it takes chunks of prompts, on one device or under a layout"
    if call.has_codes:
        return "it takes no cache in codes (numbers.cache)"
    for length in (call.num_queries, *call.segments):
        if length % LANES:
            return f"it takes whole blocks of {LANES} tokens and entries, got {length}"
    return None


@SlotReader
def attend_flash(
    q_BTKGH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_dense` does; slots of a cache are read without a gather."""
    # imported late: only starts with this kernel spend the tenth of a second that Pallas takes
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    B, T, K, G, H = q_BTKGH.shape
    num_keys, value_dim = visibility.key_position_BS.shape[1], v_BKSH.shape[-1]
    visibility = pad_to_blocks(visibility, num_entries=k_BKHS.shape[-1])
    S = visibility.key_position_BS.shape[1]
    block = block_sizes(q_BTKGH.shape, value_dim, S)
    grid = B, K, G // block.G, T // block.T, S // block.S
    block_BIJ, seen = blocks_read(visibility, block), max_keys_seen(num_keys, block, visibility)
    # the memory layout of keys in a cache on TPU
    k_BKSH, row_B = k_BKHS.swapaxes(-1, -2), jnp.arange(B)
    if (slots := visibility.slots) is not None:
        num_slots = k_BKHS.shape[1]
        row_B = slots.layer * num_slots + jnp.clip(slots.slot_B, 0, num_slots - 1)
        # otherwise the compiler loads the rows of all slots to on-chip memory, if they fit
        k_BKSH, v_BKSH = (
            pltpu.with_memory_space_constraint(x.reshape(-1, *x.shape[2:]), pltpu.HBM)
            for x in (k_BKSH, v_BKSH)
        )

    out_BKGTH, lse_BKG1T = pl.pallas_call(
        partial(_attend_block, cap=scores.cap, grid=grid),
        grid_spec=_grid_spec(grid, block, H, value_dim),
        out_shape=[
            jax.ShapeDtypeStruct((B, K, G, T, value_dim), q_BTKGH.dtype),
            jax.ShapeDtypeStruct((B, K, G, 1, T), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=call_flops(q_BTKGH.shape, value_dim, seen),
            transcendentals=q_BTKGH.size // H * seen,
            bytes_accessed=call_bytes(
                q_BTKGH.shape, value_dim, B * T // block.T * seen, block, q_BTKGH.dtype
            ),
        ),
        name="flash",
    )(
        row_B,
        block_BIJ.ravel(),
        (q_BTKGH * (H**-0.5 if scores.scale is None else scores.scale)).transpose(0, 2, 3, 1, 4),
        jnp.stack(visible_positions(visibility), axis=-1),
        k_BKSH,
        v_BKSH,
        visibility.key_position_BS[:, None],
    )
    return out_BKGTH.transpose(0, 3, 1, 2, 4), lse_BKG1T[:, :, :, 0].transpose(0, 3, 1, 2)


def _grid_spec(grid: tuple[int, ...], block: Blocks, key_dim: int, value_dim: int) -> Any:
    """The blocks of each array that a step of the Pallas grid has on the chip.

    The prefetched scalars are the cache row of each batch row, and the table of blocks to read.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def keys(b: Any, k: Any, g: Any, i: Any, j: Any, row_B: Any, read: Any) -> tuple[Any, ...]:
        return row_B[b], k, read[_pair(grid, b, i, j)], 0

    def key_positions(b: Any, k: Any, g: Any, i: Any, j: Any, _: Any, read: Any) -> tuple[Any, ...]:
        return b, 0, read[_pair(grid, b, i, j)]

    def queries(b: Any, k: Any, g: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return b, k, g, i, 0

    heads = (None, None, block.G, block.T)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=grid,
        in_specs=[
            pl.BlockSpec((*heads, key_dim), queries),
            pl.BlockSpec((None, block.T, 2), lambda b, k, g, i, j, *_: (b, i, 0)),
            pl.BlockSpec((None, None, block.S, key_dim), keys),
            pl.BlockSpec((None, None, block.S, value_dim), keys),
            pl.BlockSpec((None, 1, block.S), key_positions),
        ],
        out_specs=[
            pl.BlockSpec((*heads, value_dim), queries),
            pl.BlockSpec(
                (None, None, block.G, 1, block.T), lambda b, k, g, i, j, *_: (b, k, g, 0, i)
            ),
        ],
        scratch_shapes=[
            pltpu.VMEM((block.G * block.T, size), jnp.float32) for size in (1, 1, value_dim)
        ],
    )


def _pair(grid: tuple[int, ...], b: Any, i: Any, j: Any) -> Any:
    """The index of a pair of blocks in the flat table of blocks to read."""
    return (b * grid[3] + i) * grid[4] + j


def _attend_block(
    row_B: Any, read: Any, q_GTH: Any, bound_T2: Any, k_SH: Any, v_SH: Any, position_1S: Any,
    out_GTH: Any, lse_G1T: Any, max_A1: Any, sum_A1: Any, sum_AH: Any, *,
    cap: float | None, grid: tuple[int, ...],
) -> None:  # fmt: skip
    """Add one block of keys to the running result of one block of queries."""
    from jax.experimental import pallas as pl

    b, i, j = (pl.program_id(axis) for axis in (0, 3, 4))
    G, T, H = q_GTH.shape

    @pl.when(j == 0)
    def _() -> None:
        max_A1[...] = jnp.full_like(max_A1, _MASKED_SCORE)
        sum_A1[...] = jnp.zeros_like(sum_A1)
        sum_AH[...] = jnp.zeros_like(sum_AH)

    @pl.when(read[_pair(grid, b, i, j)] == j)
    def _() -> None:
        first_T1, last_T1 = bound_T2[:, :1], bound_T2[:, 1:]
        mask_TS = (position_1S[...] >= first_T1) & (position_1S[...] <= last_T1)
        scores_AS = soft_cap(_product(q_GTH[...].reshape(G * T, H), k_SH[...], (1, 1)), cap)
        scores_GTS = jnp.where(mask_TS[None], scores_AS.reshape(G, T, -1), _MASKED_SCORE)
        scores_AS = scores_GTS.reshape(G * T, -1)
        old_A1 = max_A1[...]
        new_A1 = jnp.maximum(old_A1, scores_AS.max(axis=1, keepdims=True))
        weights_AS, decay_A1 = jnp.exp(scores_AS - new_A1), jnp.exp(old_A1 - new_A1)
        max_A1[...] = new_A1
        sum_A1[...] = decay_A1 * sum_A1[...] + weights_AS.sum(axis=1, keepdims=True)
        added_AH = _product(weights_AS.astype(v_SH.dtype), v_SH[...], (1, 0))
        sum_AH[...] = decay_A1 * sum_AH[...] + added_AH

    @pl.when(j == grid[-1] - 1)
    def _() -> None:
        is_empty_A1 = max_A1[...] < _MASKED_SCORE / 2
        out_AH = jnp.where(is_empty_A1, 0.0, sum_AH[...] / sum_A1[...])
        out_GTH[...] = out_AH.reshape(out_GTH.shape).astype(out_GTH.dtype)
        lse_A1 = jnp.where(is_empty_A1, -jnp.inf, max_A1[...] + jnp.log(sum_A1[...]))
        # registers hold vectors along lanes: transpose the column to get a row
        lse_1A = jnp.broadcast_to(lse_A1, (G * T, LANES)).T[:1]
        for g in range(G):
            lse_G1T[g] = lse_1A[:, g * T : (g + 1) * T]


def _product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The product over one axis of each, accumulated in float32, at full precision for float32."""
    precisions = jax.lax.Precision
    precision = precisions.HIGHEST if x.dtype == jnp.float32 else precisions.DEFAULT
    contracted = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(
        x, y, contracted, precision=precision, preferred_element_type=jnp.float32
    )
