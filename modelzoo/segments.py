"""Segments of the cache along the sequence, and the cache entry of each token.

Entries are numbered over all segments. With n entries, the token at position p is in entry p mod n.
Knows nothing of layers or the contents of entries.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp

from .attention import EMPTY_POSITION

Segments = tuple[jax.Array, ...]


def segment_lengths(spans: Sequence[int], num_entries: int) -> list[int]:
    """The lengths of the segments of a layer with `num_entries`, split at the spans."""
    ends = [span for span in spans if span < num_entries]
    return [end - start for start, end in pairwise((0, *ends, num_entries))]


def segment_starts(lengths: Sequence[int]) -> list[int]:
    """The first entry of each segment, for segments of these lengths."""
    return [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]


def heads_last(ndim: int, position_axis: int) -> tuple[int, ...]:
    """The axis order that puts the head axis last in an array that ends with heads and positions.

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
