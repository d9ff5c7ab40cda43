"""The places of tokens: stripes over devices, entries of the cache in segments, and key blocks.

*Stripes* split the tokens of a sequence over devices: token p is in stripe p mod n, at index
p // n. Each stripe has tokens from the whole sequence, so devices with one stripe each share the
work of causal attention evenly. A prefix of the sequence is a prefix of each stripe. With one
stripe, tokens are in their original order. Source: Brandon et al. 2023, "Striped Attention"
(2311.09431), section 3.

*Segments* split the cache along the sequence. Entries are numbered over all segments. With n
entries, the token at position p is in entry p mod n.

*Blocks* split the keys of one head in a segment. XLA for CPU multiplies a few queries with a matrix
of keys `[H, S]` about twice as fast if the matrix is 32 or 64 positions wide
(`benchmarks/key_blocks.md`). So the keys of a segment with S entries may be stored as
`[O * H, size]`: O blocks of `size` positions. The last block may be longer than the rest of the
segment; its extra entries are unused. If one block holds the whole segment, its keys are `[H, S]`.

Knows nothing of layers, slots, meshes or the contents of entries, nor when blocks are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)
Segments = tuple[jax.Array, ...]

EMPTY_POSITION = -1
"""Position of a cache entry that holds no token."""
ELSEWHERE = -1
"""The local index of a token that is in another stripe; writes at this index are dropped."""
CPU_BLOCKS = (64, 32)
"""Block sizes that are fast in XLA for CPU, the faster one first."""


@dataclass(frozen=True)
class Stripes:
    """An order of tokens, stripe after stripe: 6 tokens in 2 stripes are `[0, 2, 4, 1, 3, 5]`."""

    count: int = 1

    def permute(self, x: Array, axis: int) -> Array:
        """Reorder tokens along `axis` into stripes. `count` must divide the number of tokens."""
        return _transpose(x, axis, -1, self.count)

    def restore(self, x: Array, axis: int) -> Array:
        """Put tokens back in order: the inverse of `permute`."""
        return _transpose(x, axis, self.count, -1)


@partial(jax.tree_util.register_dataclass, data_fields=["index"], meta_fields=["count"])
@dataclass(frozen=True)
class Stripe:
    """One stripe out of `count`."""

    index: jax.Array | int = 0
    count: int = 1

    def num_tokens(self, length: jax.Array) -> jax.Array:
        """The number of tokens in this stripe among the first `length` tokens of a row."""
        return (length - self.index + self.count - 1) // self.count

    def position(self, local_index: jax.Array) -> jax.Array:
        """The position of the token at an index of this stripe."""
        return local_index * self.count + self.index

    def local_index(self, position: jax.Array) -> jax.Array:
        """The index of a token in this stripe, or `ELSEWHERE`."""
        is_here = position % self.count == self.index
        return jnp.where(is_here, position // self.count, ELSEWHERE)


IN_ORDER = Stripes()
ONE_STRIPE = Stripe()


def change_stripes(
    x: jax.Array, axis: int, current: Stripes, target: Stripes, fill: int
) -> jax.Array:
    """Reorder tokens from one number of stripes to another; `fill` pads them to whole stripes."""
    if current == target:
        return x
    x = current.restore(x, axis)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % target.count)
    return target.permute(jnp.pad(x, padding, constant_values=fill), axis)


def _transpose(x: Array, axis: int, major: int, minor: int) -> Array:
    split = x.reshape(*x.shape[:axis], major, minor, *x.shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(x.shape)


def segment_lengths(spans: Sequence[int], num_entries: int) -> list[int]:
    """The lengths of the segments of a layer with `num_entries`, split at the spans."""
    ends = [span for span in spans if span < num_entries]
    return [end - start for start, end in pairwise((0, *ends, num_entries))]


def segment_starts(lengths: Sequence[int]) -> list[int]:
    """The first entry of each segment, for segments of these lengths."""
    return [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]


def heads_last(ndim: int, position_axis: int) -> tuple[int, ...]:
    """The axis order that puts head features last in an array that ends with them and positions.

    `position_axis` is the last axis or the last but one.
    """
    *leading, second, last = range(ndim)
    return (*leading, second, last) if position_axis == second else (*leading, last, second)


def entry_positions(length: jax.Array | int, num_entries: int) -> jax.Array:
    """The position that each entry holds after `length` tokens, or `EMPTY_POSITION`.

    Entry e of n holds the largest position p below `length` with p mod n = e. For example, 4
    entries hold `[4, 5, 2, 3]` after 6 tokens and `[0, 1, 2, empty]` after 3 tokens.
    """
    last = length - 1
    position_S = last - (last - jnp.arange(num_entries)) % num_entries
    return jnp.where(position_S < 0, EMPTY_POSITION, position_S)


def arrange_at_entries(
    new: jax.Array, start: jax.Array | int, count: jax.Array, size: int, axis: int
) -> jax.Array:
    """Arrange the last tokens of a chunk by cache entry, in an array of `size` entries.

    Args:
      new: The tokens of the chunk along `axis`.
      start: The position of the first token.
      count: The number of tokens; the rest of `new` is padding.
      size: The number of entries.
      axis: The axis of tokens.

    Returns:
      An array with each of the last tokens at its entry. Other entries are undefined.
    """
    missing = size - new.shape[axis]
    if missing >= 0:
        padding = [(0, 0)] * new.ndim
        padding[axis] = (0, missing)
        return jnp.roll(jnp.pad(new, padding), start % size, axis=axis)
    first = jnp.maximum(count - size, 0)
    latest = jax.lax.dynamic_slice_in_dim(new, first, size, axis=axis)
    return jnp.roll(latest, (start + first) % size, axis=axis)


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
