"""The form in which the cache holds what a layer remembers of each token: arrays, axes and bytes.

A layer remembers *vectors*: a key and a value for each head, or one latent. A vector is stored as
it is, or as codes with scales (`entry_codes`): each form is one array for the vector, and one more
for its scales. All shapes and bytes of the cache follow from here, for devices that are there and
for predictions.

A new kind of memory is a subclass of `StateSpec` and a line in `state_spec`.

Knows nothing of slots' owners, spans, meshes or the contents of entries.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.dtypes import itemsize_bits
from jax.typing import DTypeLike

from .. import axes
from ..config import AS_PUBLISHED, Arrangement, head_copies
from ..layer_config import Attention, Window, window_size
from ..weights.weight_products import Axes
from .entry_codes import EntryCodes, encode
from .segments import blocks_shape

Entries = jax.Array | EntryCodes
"""Keys, values or latents."""
KeysAndValues = tuple[Entries, Entries]
"""`k_BKHS`, which may be in blocks, and `v_BKSH`, as attention reads them."""


def array_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of an array in the memory of a device, where two elements of int4 share a byte."""
    return -(-math.prod(shape) * itemsize_bits(jnp.dtype(dtype)) // 8)


def num_cache_entries(window: Window, longest: int, stripes: int = 1) -> int:
    """The number of cache entries of a layer per slot, where the longest span is `longest`."""
    if window is None:
        return longest
    return min(-(-window_size(window) // stripes) * stripes, longest)


@dataclass(frozen=True)
class StateArray:
    """One array of a layer's memory, with one segment for each piece of the cache."""

    axes: Axes
    """Logical axes: layers and slots first, then heads or parts if there are any."""
    heads: int | None
    """Key/value heads without copies, or parts; None without such an axis."""
    features: int | None
    """The features of an entry; None for scales, which have no axis of features."""
    dtype: jnp.dtype
    blocks: tuple[int, ...] = ()
    """The sizes that a block of keys may have (`segments`); if empty, entries are not in blocks."""

    @property
    def position_axis(self) -> int:
        """The axis of entries."""
        return self.axes.index(axes.CACHE_LENGTH)

    @property
    def feature_axis(self) -> int | None:
        """The axis of features: the last one or the last but one; None for scales."""
        if self.features is None:
            return None
        return 2 * len(self.axes) - 3 - self.position_axis

    @property
    def has_kv_heads(self) -> bool:
        """Whether the array has the key/value heads, which may have copies."""
        return axes.KV_HEADS in self.axes

    def num_heads(self, head_shards: int) -> int:
        """The heads, with the copies that let them divide over shards of query heads."""
        heads = self.heads or 1
        return heads * head_copies(heads, head_shards) if self.has_kv_heads else heads

    def shape(self, layers: int, slots: int, entries: int, head_shards: int = 1) -> tuple[int, ...]:
        """The shape of a segment."""
        heads = () if self.heads is None else (self.num_heads(head_shards),)
        entry_axes: tuple[int, ...] = (entries,)
        if self.features is not None:
            entry_axes = entries, self.features
            if self.position_axis > (self.feature_axis or 0):
                entry_axes = blocks_shape(self.features, entries, self.blocks)
        return (layers, slots, *heads, *entry_axes)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one entry of one head."""
        return array_bytes((self.features or 1,), self.dtype)


@dataclass(frozen=True)
class StateSpec:
    """The memory of layers with one kind of attention."""

    num_kv_heads: int
    features: int
    """The features of a vector, with those that pad it."""
    dtype: jnp.dtype
    """The dtype of entries, or of their scales if they are in codes."""
    codes: jnp.dtype | None
    """The dtype of codes; None for entries that are stored as they are."""
    splits: tuple[int, ...]
    """The features at which the parts after the first one begin; codes of each part have a scale of
    their own."""
    key_blocks: tuple[int, ...]
    window: Window
    slot_pages: int = 0
    """In a cache in pages, the pages that each slot has of its own, one slot after the other; 0 if
    rows take pages of a pool."""

    VECTORS: ClassVar[Mapping[str, Axes]]
    """The logical axes of each vector's array."""
    SCALES: ClassVar[Axes]
    """The logical axes of the scales of a vector."""

    @cached_property
    def arrays(self) -> Mapping[str, StateArray]:
        """The arrays by name: the vectors, and the scales of vectors in codes."""
        arrays = {}
        for name, names in self.VECTORS.items():
            heads = self.num_kv_heads if axes.KV_HEADS in names else None
            blocks = self.key_blocks if names == axes.CACHE_KEYS else ()
            arrays[name] = StateArray(names, heads, self.features, self.codes or self.dtype, blocks)
            if self.codes is not None:
                of_scales = StateArray(self.SCALES, heads or self.num_parts, None, self.dtype)
                arrays[f"{name}_scale"] = of_scales
        return arrays

    @property
    def num_parts(self) -> int:
        """The parts of a vector."""
        return len(self.splits) + 1

    def num_entries(self, longest: int, stripes: int = 1) -> int:
        """The entries of a slot, where the longest span is `longest`."""
        return num_cache_entries(self.window, longest, stripes)

    @cached_property
    def _vector_bytes(self) -> tuple[int, int]:
        """Bytes of an entry: of what each key/value head has, and of all else."""
        of_heads = [array.vector_bytes for array in self.arrays.values() if array.has_kv_heads]
        others = [array for array in self.arrays.values() if not array.has_kv_heads]
        return sum(of_heads), sum((array.heads or 1) * array.vector_bytes for array in others)

    def row_bytes(self, longest: int, head_shards: int = 1, stripes: int = 1) -> int:
        """Bytes of one slot of one layer on each device."""
        of_head, others = self._vector_bytes
        num_heads = self.num_kv_heads * head_copies(self.num_kv_heads, head_shards) // head_shards
        entries = -(-self.num_entries(longest, stripes) // stripes)
        return entries * (num_heads * of_head + others)

    def encode(self, new: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """New entries as the arrays hold them, without an axis of layers."""
        if self.codes is None:
            return dict(zip(self.VECTORS, new, strict=True))
        encoded = {}
        for (name, names), x in zip(self.VECTORS.items(), new, strict=True):
            feature_axis = self.arrays[name].feature_axis
            assert feature_axis is not None
            encoded[name], scales = encode(
                x, feature_axis - 1, self.codes, self.dtype, self.splits, self.features
            )
            has_heads = axes.KV_HEADS in names
            encoded[f"{name}_scale"] = scales[0] if has_heads else jnp.stack(scales, axis=1)
        return encoded

    def keys_values(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """The keys and values of a segment, which may have an axis of layers."""
        raise NotImplementedError

    def page_entries(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """The keys and values of pages, both with head features last."""
        keys, values = self.keys_values(arrays)
        return transposed(keys), values


class KeysValues(StateSpec):
    """A key and a value for each key/value head."""

    VECTORS: ClassVar = {"k": axes.CACHE_KEYS, "v": axes.CACHE_VALUES}
    SCALES = axes.CACHE_SCALES

    def keys_values(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """See `StateSpec`."""
        if self.codes is None:
            return arrays["k"], arrays["v"]
        scales = (jnp.expand_dims(arrays[f"{name}_scale"], -2) for name in self.VECTORS)
        keys, values = map(EntryCodes, (arrays["k"], arrays["v"]), scales)
        return keys, values


class PagedKeysValues(KeysValues):
    """A key and a value for each key/value head, where keys have head features last, as values."""

    VECTORS: ClassVar = {"k": axes.CACHE_VALUES, "v": axes.CACHE_VALUES}

    def encode(self, new: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """See `StateSpec`."""
        k_BKHT, v_BKTH = new
        return super().encode((k_BKHT.swapaxes(-1, -2), v_BKTH))

    def keys_values(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """See `StateSpec`."""
        keys, values = super().keys_values(arrays)
        return transposed(keys), values


class Latents(StateSpec):
    """A latent and its rotated key, side by side: the key and the value of all query heads."""

    VECTORS: ClassVar = {"latent": axes.CACHE_LATENTS}
    SCALES = axes.CACHE_LATENT_SCALES

    def keys_values(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """See `StateSpec`."""
        keys, values = latents_as_heads(arrays["latent"])
        if self.codes is None:
            return keys, values
        scale = jnp.expand_dims(arrays["latent_scale"], -3)
        return EntryCodes(keys, scale, self.splits), EntryCodes(values, scale, self.splits)

    def page_entries(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """See `StateSpec`. The keys are the values, so that a kernel reads a page once for both."""
        _, values = self.keys_values(arrays)
        return values, values


def transposed(keys: Entries) -> Entries:
    """Keys with head features and positions exchanged."""
    if isinstance(keys, EntryCodes):
        return replace(keys, codes=keys.codes.swapaxes(-1, -2))
    return keys.swapaxes(-1, -2)


def latents_as_heads(latent_BSH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Latents as keys and values of one head.

    The values include the rotated key, so the last features of the attention output are undefined.
    Values without them would be a copy of nearly the whole segment, which costs more.
    """
    return jnp.expand_dims(latent_BSH.swapaxes(-1, -2), -3), jnp.expand_dims(latent_BSH, -3)


@cache
def state_spec(
    attention: Attention,
    dtype: DTypeLike,
    arrangement: Arrangement = AS_PUBLISHED,
    chunk: int | None = None,
    *,
    in_pages: bool = False,
) -> StateSpec:
    """The memory of layers with this attention.

    Args:
      attention: The attention of the layers.
      dtype: The dtype of keys, values and latents, or of their scales if they are in codes.
      arrangement: The padding of heads, the blocks of keys, and the dtype of codes.
      chunk: The number of tokens of which all prompt chunks are multiples, if prompts come in
        chunks. Blocks of keys must divide it, as a chunk is written in whole blocks.
      in_pages: Whether entries are in pages. A layer with a window then keeps all entries.
    """
    kind = KeysValues if attention.latent is None else Latents
    codes = arrangement.cache_codes
    if in_pages:
        kind = PagedKeysValues if attention.latent is None else Latents
        arrangement = replace(arrangement, key_blocks=())
    blocks = tuple(size for size in arrangement.key_blocks if not (chunk or 0) % size)
    assert not (codes and blocks), "entries in codes are not in blocks"
    return kind(
        attention.num_kv_heads,
        arrangement.cache_dim(attention),
        jnp.dtype(dtype),
        None if codes is None else jnp.dtype(codes),
        attention.entry_splits,
        blocks,
        None if in_pages else attention.window,
    )
