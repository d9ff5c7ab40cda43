"""Segments of the cache along the sequence, and the entry at which a token lies.

Entries are counted over all segments; of n entries, token p lies at p mod n. A segment that all
slots share has one row. Knows nothing of layers or what the entries hold.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp

from .attention import EMPTY_POSITION

Segments = tuple[jax.Array, ...]


def segment_lengths(spans: Sequence[int], kept: int) -> list[int]:
    """Entries of each segment of a layer that keeps so many."""
    ends = [span for span in spans if span < kept]
    return [end - start for start, end in pairwise((0, *ends, kept))]


def segment_starts(lengths: Sequence[int]) -> list[int]:
    """The first entry of each segment of so many entries, counted over all of them."""
    return [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]


def split_shared(segments: Segments, row_axis: int) -> tuple[Segments, Segments]:
    """The first segments that all slots share, and the segments with rows of slots.

    A shared segment has one row where a later segment has more. A last segment of one row is the
    first slot's own.
    """
    num_rows = [x.shape[row_axis] for x in segments]
    num_shared = num_rows.index(max(num_rows)) if num_rows else 0
    return segments[:num_shared], segments[num_shared:]


def heads_last(ndim: int, position_axis: int) -> tuple[int, ...]:
    """The axes of an array that ends with those of heads' entries and of positions, heads last."""
    *leading, second, last = range(ndim)
    return (*leading, second, last) if position_axis == second else (*leading, last, second)


def entry_positions(length: jax.Array | int, num_entries: int) -> jax.Array:
    """The position in each entry after `length` tokens: the latest that lies there, or empty.

    Entry e of n has the largest p below the length with p mod n = e. Of 4 entries after 6 tokens
    `[4, 5, 2, 3]`, after 3 tokens `[0, 1, 2, empty]`.
    """
    last = length - 1
    position_S = last - (last - jnp.arange(num_entries)) % num_entries
    return jnp.where(position_S < 0, EMPTY_POSITION, position_S)


def arrange_at_entries(
    new: jax.Array, start: jax.Array | int, count: jax.Array, size: int, axis: int
) -> jax.Array:
    """Of `count` tokens from position `start` on the latest, each at its entry of `size`.

    What lies at the other entries means nothing.
    """
    missing = size - new.shape[axis]
    if missing >= 0:
        padding = [(0, 0)] * new.ndim
        padding[axis] = (0, missing)
        return jnp.roll(jnp.pad(new, padding), start % size, axis=axis)
    first = jnp.maximum(count - size, 0)
    latest = jax.lax.dynamic_slice_in_dim(new, first, size, axis=axis)
    return jnp.roll(latest, (start + first) % size, axis=axis)
