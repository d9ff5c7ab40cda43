"""The key/value cache of the decode batch: plain pytrees, written and read by position.

The cache is cut along the sequence at the grid's spans into *segments*, each an array of its own: a
decode graph with span `s` takes the segments below `s` and nothing else, so a short span costs
neither a copy nor a read of the rest. Every entry stores its position (`EMPTY_POSITION` when it
holds no token) and masks come from those alone.

Keys lie with positions along the last axis and values with heads' entries there: the order in which
each is read as a matrix.

Knows nothing of slots' owners, buckets or meshes. Guarantees: `insert` rewrites a slot whole, so
nothing of its former owner, NaN included, can reach the next one; `append` writes in place inside a
loop when the buffers are donated, and writes nothing for a row whose position lies past the
segments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import axes
from .attention import EMPTY_POSITION, Attend, merge, visible
from .config import DecoderConfig
from .operations import ON_ONE_DEVICE, Operations


class KeysValues(NamedTuple):
    """Keys and values of one layer, one array a segment."""

    k_BKHS: tuple[jax.Array, ...]
    v_BKSH: tuple[jax.Array, ...]


class KVCache(NamedTuple):
    """All layers' keys and values, and the positions that they share."""

    layers: tuple[KeysValues, ...]
    position_BS: tuple[jax.Array, ...]

    def head(self, num_segments: int) -> "KVCache":
        """The first segments, as a decode graph of their span takes them."""
        layers = tuple(
            KeysValues(kv.k_BKHS[:num_segments], kv.v_BKSH[:num_segments]) for kv in self.layers
        )
        return KVCache(layers, self.position_BS[:num_segments])

    def with_head(self, head: "KVCache") -> "KVCache":
        """This cache with its first segments replaced by `head`."""
        n = len(head.position_BS)
        layers = tuple(
            KeysValues(new.k_BKHS + old.k_BKHS[n:], new.v_BKSH + old.v_BKSH[n:])
            for new, old in zip(head.layers, self.layers, strict=True)
        )
        return KVCache(layers, head.position_BS + self.position_BS[n:])


class PromptKeysValues(NamedTuple):
    """Keys and values a prefill made for one layer; entries past the true length are padding."""

    k_BKHT: jax.Array
    v_BKTH: jax.Array


def allocate(
    config: DecoderConfig,
    slots: int,
    spans: Sequence[int],
    dtype: jnp.dtype,
    num_heads: int | None = None,
) -> KVCache:
    """An empty cache of zeros: a NaN in a masked entry would poison its row, so never `empty`.

    `num_heads` are the key/value heads kept, where they are not the model's own ones.
    """
    lengths = [end - start for start, end in zip((0, *spans), spans, strict=False)]

    B, K, H = slots, num_heads or config.num_kv_heads, config.head_dim
    layers = tuple(
        KeysValues(
            tuple(jnp.zeros((B, K, H, S), dtype) for S in lengths),
            tuple(jnp.zeros((B, K, S, H), dtype) for S in lengths),
        )
        for _ in range(config.num_layers)
    )
    positions = tuple(jnp.full((slots, S), EMPTY_POSITION, jnp.int32) for S in lengths)
    return KVCache(layers, positions)


def insert(
    cache: KVCache,
    prompt: Sequence[PromptKeysValues],
    true_length_B: jax.Array,
    row: jax.Array,
    slot: jax.Array,
    source: Operations = ON_ONE_DEVICE,
    target: Operations = ON_ONE_DEVICE,
) -> KVCache:
    """Rewrite `slot` with row `row` of a prefill: its tokens, then zeros and empty positions.

    Between the true length and the prefill's own length the entries keep what padding made, under
    empty positions. `source` are the operations of the prefill, `target` those of the cache.
    """
    starts = _starts(cache.position_BS)

    def fill(segments: tuple[jax.Array, ...], new: jax.Array, axis: int) -> tuple[jax.Array, ...]:
        new = _match_heads(source.take_row(new, row, axes.CACHE), segments[0].shape[1])
        return tuple(
            target.put_row(old, _cut(new, start, old, axis), slot, axes.CACHE)
            for start, old in zip(starts, segments, strict=True)
        )

    layers = tuple(
        KeysValues(fill(kv.k_BKHS, new.k_BKHT, axis=3), fill(kv.v_BKSH, new.v_BKTH, axis=2))
        for kv, new in zip(cache.layers, prompt, strict=True)
    )
    positions = []
    for start, old_BS in zip(starts, cache.position_BS, strict=True):
        index_S = start + jnp.arange(old_BS.shape[1])
        new_S = jnp.where(index_S < true_length_B[row], index_S, EMPTY_POSITION)
        positions.append(target.put_row(old_BS, new_S[None], slot, axes.CACHE[:1]))
    return KVCache(layers, tuple(positions))


def _match_heads(new: jax.Array, num_heads: int) -> jax.Array:
    """Heads in copies as single ones or the other way round: phases may keep them differently."""
    K = new.shape[1]
    if num_heads < K:
        return new[:, :: K // num_heads]
    return jnp.repeat(new, num_heads // K, axis=1) if num_heads > K else new


def append_position(
    position_BS: tuple[jax.Array, ...], position_B: jax.Array
) -> tuple[jax.Array, ...]:
    """Mark the entry of each row's next token as holding it."""
    return tuple(
        _write(segment_BS, position_B[:, None], position_B - start, axis=0)
        for start, segment_BS in zip(_starts(position_BS), position_BS, strict=True)
    )


def append(kv: KeysValues, new: PromptKeysValues, position_B: jax.Array) -> KeysValues:
    """Write one token's key and value per row at its position."""
    starts = _starts(kv.v_BKSH, axis=2)

    def write(segments: tuple[jax.Array, ...], new: jax.Array, axis: int) -> tuple[jax.Array, ...]:
        return tuple(
            _write(segment, new, position_B - start, axis)
            for start, segment in zip(starts, segments, strict=True)
        )

    return KeysValues(write(kv.k_BKHS, new.k_BKHT, axis=2), write(kv.v_BKSH, new.v_BKTH, axis=1))


def attend_cached(
    attend: Attend,
    q_BTKGH: jax.Array,
    kv: KeysValues,
    query_position_BT: jax.Array,
    key_position_BS: tuple[jax.Array, ...],
    window: int | None,
) -> jax.Array:
    """Attend to every segment and merge: `out_BTKGH`."""
    parts = [
        attend(q_BTKGH, k_BKHS, v_BKSH, visible(query_position_BT, position_BS, window))
        for k_BKHS, v_BKSH, position_BS in zip(kv.k_BKHS, kv.v_BKSH, key_position_BS, strict=True)
    ]
    out_BTKGH, _ = merge(parts)
    return out_BTKGH


def _starts(segments: tuple[jax.Array, ...], axis: int = 1) -> list[int]:
    starts, end = [], 0
    for segment in segments:
        starts.append(end)
        end += segment.shape[axis]
    return starts


def _cut(new: jax.Array, start: int, segment: jax.Array, axis: int) -> jax.Array:
    """The part of a prompt that falls into a segment, filled up with zeros along `axis`."""
    S, T = segment.shape[axis], new.shape[axis]
    part = jax.lax.slice_in_dim(new, min(start, T), min(start + S, T), axis=axis)
    padding = [(0, 0)] * part.ndim
    padding[axis] = (0, S - part.shape[axis])
    return jnp.pad(part, padding).astype(segment.dtype)


def _write(segment: jax.Array, new: jax.Array, index_B: jax.Array, axis: int) -> jax.Array:
    """Write one entry per row at `index_B` of the row's `axis`; an index outside writes nothing.

    NOTE: on TPU this form alone stays in place inside a loop. Reading the old entry to write it
    back, or indexing with `.at`, copies the cache; a select over the segment rewrites it.
    """
    size = segment.shape[axis + 1]
    is_inside_B = (index_B >= 0) & (index_B < size)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(segment.ndim - 1)),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(axis,),
    )

    def write_row(row: jax.Array, entry: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.scatter(
            row,
            index[None],
            entry.astype(row.dtype),
            dimensions,
            indices_are_sorted=True,
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    # past the end, and therefore dropped
    return jax.vmap(write_row)(segment, new, jnp.where(is_inside_B, index_B, size))
