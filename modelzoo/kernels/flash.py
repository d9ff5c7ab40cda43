"""A flash attention kernel for TPU, for chunks of prompts, with masks from positions.

Queries of several tokens and several heads of a group are the rows of one product, so a block of
keys and values is read once for all of them. Scores never leave the chip. Pairs of blocks in which
nothing is visible are neither read nor computed. Keys and values may stay in the cache: the kernel
reads the slots of its rows by number.

Knows nothing of layers or meshes. Guarantees: equals `attend_dense` up to the order of sums, `lse`
included; both blocks of a pair in which something is visible are read, whatever the order of
positions. Sources: Dao et al. 2022, "FlashAttention" (2205.14135), algorithm 1; Dao 2023,
"FlashAttention-2" (2307.08691), section 3.1, for the single division of results at the end.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..attention.attend import SlotReader, Visibility, first_visible, soft_cap
from ..axes import LANES
from ..cache.segments import EMPTY_POSITION
from ..layer_config import PLAIN_SCORES, Scores, window_size
from .call import AttentionCall

BLOCKS = (512, 256, LANES)
"""Tokens or cache entries of a block; the largest divisor is used."""
MAX_ROWS, MAX_NUMBERS = 2048, 2**20
"""The maximum queries of a block (tokens times heads), and the maximum number of elements in these
queries and their results."""


class Blocks(NamedTuple):
    """The heads of a group, tokens and cache entries of one product."""

    G: int
    T: int
    S: int


def block_sizes(shape: tuple[int, ...], value_dim: int, S: int) -> Blocks:
    """The sizes of blocks with the largest number of queries, for queries of a shape.

    Args:
      shape: The shape `[B, T, K, G, H]` of queries.
      value_dim: The head size of values.
      S: The number of cache entries.
    """
    _, T, _, G, H = shape
    max_rows = min(MAX_ROWS, MAX_NUMBERS // (H + value_dim))
    heads = [g for g in range(1, G + 1) if G % g == 0]
    sizes = [(g * t, g, t) for g in heads for t in BLOCKS if T % t == 0 and g * t <= max_rows]
    return Blocks(*max(sizes)[1:], next(s for s in BLOCKS if S % s == 0))


def pad_to_blocks(visibility: Visibility, num_entries: int) -> Visibility:
    """Pad key positions with empty ones, up to `num_entries`, to fill the last block."""
    S = visibility.key_position_BS.shape[1]
    missing = min(num_entries, -(-S // BLOCKS[0]) * BLOCKS[0]) - S
    key_position_BS = jnp.pad(
        visibility.key_position_BS, ((0, 0), (0, missing)), constant_values=EMPTY_POSITION
    )
    return replace(visibility, key_position_BS=key_position_BS)


def blocks_read(visibility: Visibility, block: Blocks) -> jax.Array:
    """`block_BIJ`: the key block that is on the chip at the step of query block i and key block j.

    It is j if queries of i may see a key of j. Otherwise it is the previous block that they see,
    which is on the chip already, or the first block that they will see. If they see no block, it is
    block 0.
    """
    first_BI, last_BI = (
        reduce(x.reshape(len(x), -1, block.T), axis=2)
        for x, reduce in zip(visible_positions(visibility), (jnp.min, jnp.max), strict=True)
    )
    key_BJS = visibility.key_position_BS.reshape(len(first_BI), -1, block.S)
    never = jnp.iinfo(jnp.int32).max
    lowest_BJ = jnp.where(key_BJS > EMPTY_POSITION, key_BJS, never).min(axis=2)
    is_early_BIJ = lowest_BJ[:, None] <= last_BI[..., None]
    is_seen_BIJ = is_early_BIJ & (key_BJS.max(axis=2)[:, None] >= first_BI[..., None])
    latest_BIJ = jnp.where(is_seen_BIJ, jnp.arange(key_BJS.shape[1])[None, None], -1)
    first_seen_BI1 = jnp.argmax(is_seen_BIJ, axis=2, keepdims=True)
    latest_BIJ = jax.lax.cummax(latest_BIJ, axis=2)
    return jnp.where(latest_BIJ < 0, first_seen_BI1, latest_BIJ).astype(jnp.int32)


def call_bytes(
    shape: tuple[int, ...], value_dim: int, num_keys: int, block: Blocks, dtype: jnp.dtype
) -> int:
    """The bytes that a call moves.

    Args:
      shape: The shape `[B, T, K, G, H]` of queries.
      value_dim: The head size of values.
      num_keys: The keys of one head that are read for one block of heads, summed over all blocks of
        queries.
      block: The sizes of blocks.
      dtype: The dtype of queries, keys and values.
    """
    B, T, K, G, H = shape
    results = B * T * K * G * jnp.dtype(jnp.float32).itemsize
    rows = B * T * K * G + num_keys * K * G // block.G
    return results + rows * (H + value_dim) * dtype.itemsize


def call_flops(shape: tuple[int, ...], value_dim: int, num_keys: int) -> int:
    """The floating point operations of a call whose queries see `num_keys` keys each."""
    return 2 * math.prod(shape[:-1]) * num_keys * (shape[-1] + value_dim)


def max_keys_seen(S: int, block: Blocks, visibility: Visibility) -> int:
    """The maximum number of keys that a block of queries sees; positions are not known here."""
    window = visibility.window
    return S if window is None else min(S, window_size(window) + block.T)


def visible_positions(visibility: Visibility) -> tuple[jax.Array, jax.Array]:
    """The first and the last position that each query sees."""
    last_BT = visibility.query_position_BT
    if visibility.window is None:
        return jnp.zeros_like(last_BT), last_BT
    return jnp.maximum(first_visible(last_BT, visibility.window), 0), last_BT


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
