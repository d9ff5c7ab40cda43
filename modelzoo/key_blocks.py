"""Keys of a cache in blocks of positions, stacked along the head axis.

XLA for CPU multiplies a few queries with a matrix of keys `[H, S]` about twice as fast if the
matrix is 32 or 64 positions wide (`benchmarks/key_blocks.md`). So the keys of one head in a segment
with S entries may be stored as `[O * H, size]`: O blocks of `size` positions. The last block may be
longer than the rest of the segment; its extra entries are unused. If one block holds the whole
segment, its keys are `[H, S]`.

Knows nothing of layers or slots, nor when blocks are used.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

CPU_BLOCKS = (64, 32)
"""Block sizes that are fast in XLA for CPU, the faster one first."""


def blocks_shape(head_dim: int, num_entries: int, sizes: Sequence[int]) -> tuple[int, int]:
    """The last two dimensions of the keys of a segment, in blocks of one of `sizes`.

    The chosen size has the fewest unused entries, and is the first such size. A segment that is
    shorter than all sizes is one block.
    """
    fitting = [size for size in sizes if size <= num_entries]
    size = min(fitting, key=lambda size: -num_entries % size, default=num_entries)
    return num_blocks(num_entries, size) * head_dim, size


def num_blocks(num_entries: int, size: int) -> int:
    """The number of blocks of a segment."""
    return -(-num_entries // size)


def split_blocks(k_KHS: jax.Array, size: int) -> jax.Array:
    """Keys `[..., H, S]` as blocks `[..., O * H, size]`, with zeros after the last position."""
    *leading, H, S = k_KHS.shape
    count = num_blocks(S, size)
    padding = [(0, 0)] * (k_KHS.ndim - 1) + [(0, count * size - S)]
    k_KHOS = jnp.pad(k_KHS, padding).reshape(*leading, H, count, size)
    return k_KHOS.swapaxes(-3, -2).reshape(*leading, count * H, size)


def join_blocks(k_KHS: jax.Array, num_entries: int) -> jax.Array:
    """Keys of a segment of `num_entries` as `[..., H, S]`: the inverse of `split_blocks`."""
    *leading, rows, size = k_KHS.shape
    count = num_blocks(num_entries, size)
    if count == 1:
        return k_KHS
    k_KOHS = k_KHS.reshape(*leading, count, rows // count, size)
    return k_KOHS.swapaxes(-3, -2).reshape(*leading, rows // count, count * size)[..., :num_entries]
