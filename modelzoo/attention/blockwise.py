"""Attention block by block, with memory linear in the number of tokens.

A prompt of at most `MAX_IN_ORDER` tokens in order is split into blocks of queries. Each block
attends once: to the keys in its window up to its last query, or to all keys where all tokens are
seen. Windows with a limited reach on both sides, and all other calls, compute one pair of a query
block and a key block at a time and merge the partial results `(out, lse)`. Pairs in which nothing
is visible are skipped, so causal masks save half of the work, and windows save all pairs outside of
them. The skipped pairs follow from positions, so tokens may be in any order.

Knows nothing of caches, layers or meshes. Guarantees: equals `attend_dense` up to the order of
sums. Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory" (2112.05682),
section 3, with the merge of normalised parts.
"""

import jax
import jax.numpy as jnp

from ..cache.stripes import EMPTY_POSITION, pad_end
from ..layer_config import PLAIN_SCORES, BothSides, Scores, Window
from .attend import Visibility, attend_masked, first_visible, merge, visible

QUERY_BLOCK = 256
"""Maximum queries of a block."""
BLOCK_SCORES = QUERY_BLOCK * 512
"""Maximum scores of one head in a block: a block with fewer queries has more keys."""
IN_ORDER_BLOCK = 128
"""Maximum queries of a block where tokens are in order."""
MAX_IN_ORDER = 1024
"""Maximum tokens in order for which a block of queries attends once."""

Attended = tuple[jax.Array, jax.Array]


def attend_blockwise(
    q_BTKGH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
    *,
    query_block: int = QUERY_BLOCK,
    block_scores: int = BLOCK_SCORES,
) -> Attended:
    """Attend as `attend_dense` does, block by block.

    Static: `query_block`, the maximum queries of a block, and `block_scores`, its maximum scores of
    one head.
    """
    T, S = q_BTKGH.shape[1], v_BKSH.shape[2]
    if visibility.is_in_order and T <= MAX_IN_ORDER:
        if visibility.window == BothSides():
            is_token_BS = visibility.key_position_BS > EMPTY_POSITION
            return _attend_tokens(q_BTKGH, k_BKHS, v_BKSH, is_token_BS, scores)
        if not isinstance(visibility.window, BothSides) and T > IN_ORDER_BLOCK:
            return _attend_triangle(q_BTKGH, k_BKHS, v_BKSH, visibility.window, scores)
    block_T, block_S = block_sizes(T, S, query_block, block_scores)
    if block_T == T and block_S == S:
        out_BTKGH, lse_BTKG = attend_masked(q_BTKGH, k_BKHS, v_BKSH, visibility.mask(), scores)
        return out_BTKGH.astype(q_BTKGH.dtype), lse_BTKG
    queries = _Blocks(block_T, (q_BTKGH, 1), (visibility.query_position_BT, 1))
    keys = _Blocks(block_S, (k_BKHS, 3), (v_BKSH, 2), (visibility.key_position_BS, 1))

    def attend_block(i: jax.Array) -> Attended:
        block_BTKGH, query_position_BT = queries[i]

        def add_keys(j: jax.Array, attended: Attended) -> Attended:
            block_BKHS, block_BKSH, key_position_BS = keys[j]
            seen = Visibility(query_position_BT, key_position_BS, visibility.window)
            mask_BTS = seen.mask()

            def add() -> Attended:
                part = attend_masked(block_BTKGH, block_BKHS, block_BKSH, mask_BTS, scores)
                return merge([attended, part])

            return jax.lax.cond(mask_BTS.any(), add, lambda: attended)

        shape = (*block_BTKGH.shape[:-1], v_BKSH.shape[-1])
        nothing = jnp.zeros(shape), jnp.full(shape[:-1], -jnp.inf)
        out_BTKGH, lse_BTKG = jax.lax.fori_loop(0, keys.count, add_keys, nothing)
        return out_BTKGH.astype(q_BTKGH.dtype), lse_BTKG

    blocks = jax.lax.map(attend_block, jnp.arange(queries.count))
    return jax.tree.map(lambda x: _concatenate(x)[:, :T], blocks)


def _attend_triangle(
    q_BTKGH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, window: Window, scores: Scores
) -> Attended:
    """Attend with tokens in order: each block of queries attends to the keys up to its last query.

    Masks are computed from indices.
    """
    T = q_BTKGH.shape[1]
    position_1T = jnp.arange(T)[None]
    parts = []
    for first in range(0, T, IN_ORDER_BLOCK):
        queries = slice(first, min(first + IN_ORDER_BLOCK, T))
        first_key = 0 if window is None else max(0, first_visible(first, window))
        keys = slice(first_key, queries.stop)
        mask_1TS = visible(position_1T[:, queries], position_1T[:, keys], window)
        parts.append(
            attend_masked(
                q_BTKGH[:, queries], k_BKHS[..., keys], v_BKSH[:, :, keys], mask_1TS, scores
            )
        )
    out_BTKGH, lse_BTKG = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return out_BTKGH.astype(q_BTKGH.dtype), lse_BTKG


def _attend_tokens(
    q_BTKGH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, is_token_BS: jax.Array, scores: Scores
) -> Attended:
    """Attend to all tokens, in blocks of queries if there are more than `QUERY_BLOCK`."""
    T, mask_B1S = q_BTKGH.shape[1], is_token_BS[:, None]

    def attend(q_BTKGH: jax.Array) -> Attended:
        out_BTKGH, lse_BTKG = attend_masked(q_BTKGH, k_BKHS, v_BKSH, mask_B1S, scores)
        return out_BTKGH.astype(q_BTKGH.dtype), lse_BTKG

    if T <= QUERY_BLOCK:
        return attend(q_BTKGH)
    # one block after the other, as scores of all blocks take more memory than those of one
    queries = _Blocks(block_size(T, IN_ORDER_BLOCK), (q_BTKGH, 1))
    blocks = jax.lax.map(lambda i: attend(*queries[i]), jnp.arange(queries.count))
    return jax.tree.map(lambda x: _concatenate(x)[:, :T], blocks)


def block_sizes(
    num_queries: int,
    num_keys: int,
    query_block: int = QUERY_BLOCK,
    block_scores: int = BLOCK_SCORES,
) -> tuple[int, int]:
    """The number of queries and of keys of a block."""
    block_T = block_size(num_queries, query_block)
    return block_T, block_size(num_keys, max(1, block_scores // block_T))


def block_size(length: int, max_size: int) -> int:
    """The block size for `length` items, at most `max_size`.

    It is a divisor of `length` if that needs at most twice the minimum number of blocks; otherwise
    it is the size of the minimum number of equal blocks.
    """
    min_blocks = -(-length // max_size)
    divisors = (length // n for n in range(min_blocks, 2 * min_blocks + 1) if length % n == 0)
    return next(divisors, -(-length // min_blocks))


class _Blocks:
    """Arrays split into blocks along one axis of each, padded to whole blocks.

    Padding is zeros, and `EMPTY_POSITION` in arrays of positions, which have two axes.
    """

    def __init__(self, size: int, *arrays: tuple[jax.Array, int]):
        length = arrays[0][0].shape[arrays[0][1]]
        self._size = size
        self._axes = [axis for _, axis in arrays]
        self.count = -(-length // size)
        self._arrays = [
            pad_end(x, axis, self.count * size, EMPTY_POSITION if x.ndim == 2 else 0)
            for x, axis in arrays
        ]

    def __getitem__(self, index: jax.Array) -> list[jax.Array]:
        """The block `index` of each array."""
        return [
            jax.lax.dynamic_slice_in_dim(x, index * self._size, self._size, axis)
            for x, axis in zip(self._arrays, self._axes, strict=True)
        ]


def _concatenate(blocks: jax.Array) -> jax.Array:
    """Concatenate blocks of queries `[blocks, B, block_T, ...]` to one array `[B, T, ...]`."""
    blocks = blocks.swapaxes(0, 1)
    return blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])
