"""Keys of a cache in blocks of positions, one below the other in place of one wide matrix.

XLA for CPU multiplies a few queries with a matrix of keys `[H, S]` about twice as fast where that
is 32 or 64 positions wide (`benchmarks/key_blocks.md`). So a head of a segment with S entries may
have its keys as `[O * H, size]`: O blocks of `size` positions. The last block may have room for
more entries than the segment has; nothing is kept there. Where one block holds the segment, its
keys are `[H, S]`.

Knows nothing of layers, slots or what decides for blocks.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

CPU_BLOCKS = (64, 32)
"""The sizes of blocks that XLA for CPU is fast at, the better one first."""


def blocks_shape(head_dim: int, num_entries: int, sizes: Sequence[int]) -> tuple[int, int]:
    """The last two dimensions of a segment's keys, in blocks of one of `sizes`.

    It is the size that leaves the least room, of equal ones the first. A segment shorter than all
    sizes is one block of its own size.
    """
    fitting = [size for size in sizes if size <= num_entries]
    size = min(fitting, key=lambda size: -num_entries % size, default=num_entries)
    return num_blocks(num_entries, size) * head_dim, size


def num_blocks(num_entries: int, size: int) -> int:
    """Blocks of a segment."""
    return -(-num_entries // size)


def in_blocks(k_KHS: jax.Array, size: int) -> jax.Array:
    """Keys `[..., H, S]` in blocks, `[..., O * H, size]`, with zeros after the last position."""
    *leading, H, S = k_KHS.shape
    count = num_blocks(S, size)
    padding = [(0, 0)] * (k_KHS.ndim - 1) + [(0, count * size - S)]
    k_KHOS = jnp.pad(k_KHS, padding).reshape(*leading, H, count, size)
    return k_KHOS.swapaxes(-3, -2).reshape(*leading, count * H, size)


def joined(k_KHS: jax.Array, num_entries: int) -> jax.Array:
    """Keys of a segment with so many entries out of their blocks, as `[..., H, S]`."""
    *leading, rows, size = k_KHS.shape
    count = num_blocks(num_entries, size)
    if count == 1:
        return k_KHS
    k_KOHS = k_KHS.reshape(*leading, count, rows // count, size)
    return k_KOHS.swapaxes(-3, -2).reshape(*leading, rows // count, count * size)[..., :num_entries]
