"""The blocks of the flash kernel: their sizes, the pairs that are read, and the cost of a call.

Does not know how the kernel attends to a block. Guarantees: both blocks of a pair in which
something is visible are read, whatever the order of positions.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..attention.attend import Visibility, first_visible
from ..axes import LANES
from ..cache.segments import EMPTY_POSITION
from ..layer_config import window_size

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
