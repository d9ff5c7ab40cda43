"""The form in which pages hold what a layer remembers of each token: arrays, axes and bytes.

A layer remembers *vectors*: a key and a value for each head, or one latent. A vector is stored as
it is, or as codes with scales (`entry_codes`): each form is one array for the vector, and one more
for its scales. But two codes of int4 are in a byte, so a key and its value share an array of bytes,
as do both halves of a latent. All shapes and bytes of the cache follow from here, for devices that
are there and for predictions.

A new kind of memory is a subclass of `StateSpec` and a line in `state_spec`.

Knows nothing of pages' owners, meshes or the contents of entries.
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
from ..layer_config import Attention
from ..weights.weight_products import Axes
from .entry_codes import INT4, EntryCodes, block_size, encode, in_blocks, pair

Entries = jax.Array | EntryCodes
"""Keys, values or latents."""
KeysAndValues = tuple[Entries, Entries]
"""Keys and values of pages, each with head features last."""


def array_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of an array in the memory of a device, where two elements of int4 share a byte."""
    return -(-math.prod(shape) * itemsize_bits(jnp.dtype(dtype)) // 8)


@dataclass(frozen=True)
class StateArray:
    """One array of a layer's memory."""

    axes: Axes
    """Logical axes: layers and pages first, then heads or parts if there are any."""
    heads: int | None
    """Key/value heads without copies, or parts; None without such an axis."""
    features: int | None
    """The features of an entry, or of a block; None for scales, which have no axis of features."""
    dtype: jnp.dtype
    blocks: int | None = None
    """The blocks of features of codes; None without such an axis."""

    @property
    def position_axis(self) -> int:
        """The axis of entries."""
        return self.axes.index(axes.CACHE_LENGTH)

    @property
    def has_kv_heads(self) -> bool:
        """Whether the array has the key/value heads, which may have copies."""
        return axes.KV_HEADS in self.axes

    def num_heads(self, head_shards: int) -> int:
        """The heads, with the copies that let them divide over shards of query heads."""
        heads = self.heads or 1
        return heads * head_copies(heads, head_shards) if self.has_kv_heads else heads

    def shape(self, layers: int, pages: int, entries: int, head_shards: int = 1) -> tuple[int, ...]:
        """The shape of pages of so many entries."""
        heads = () if self.heads is None else (self.num_heads(head_shards),)
        blocks = () if self.blocks is None else (self.blocks,)
        features = () if self.features is None else (self.features,)
        return (layers, pages, *heads, *blocks, entries, *features)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one entry of one head."""
        return array_bytes(((self.blocks or 1) * (self.features or 1),), self.dtype)


@dataclass(frozen=True)
class StateSpec:
    """The memory of layers with one kind of attention."""

    num_kv_heads: int
    features: int
    """The features of a vector, with those that pad it."""
    dtype: jnp.dtype
    """The dtype of entries, or of their scales if they are in codes."""
    codes: str | None
    """The name of codes; None for entries that are stored as they are."""
    splits: tuple[int, ...]
    """The features at which the parts after the first one begin; codes of each part have a scale of
    their own."""
    slot_pages: int = 0
    """The pages that each slot has of its own, one slot after the other; 0 if rows take pages of a
    pool."""

    VECTORS: ClassVar[tuple[str, ...]]
    """The names of the vectors."""
    AXES: ClassVar[Axes]
    """The logical axes of a vector's array."""
    CODES: ClassVar[Axes]
    """The logical axes of the codes of a vector."""
    SCALES: ClassVar[Axes]
    """The logical axes of their scales."""

    @cached_property
    def arrays(self) -> Mapping[str, StateArray]:
        """The arrays by name: those of vectors, and the scales of vectors in codes."""
        if self.codes is None:
            return self.entries
        heads = self._heads or self.num_parts
        of_scales = StateArray(self.SCALES, heads, None, self.dtype)
        return {**self.entries, **{f"{name}_scale": of_scales for name in self.VECTORS}}

    @cached_property
    def entries(self) -> Mapping[str, StateArray]:
        """The arrays of vectors by name."""
        if self.codes is None:
            plain = StateArray(self.AXES, self._heads, self.features, self.dtype)
            return dict.fromkeys(self.VECTORS, plain)
        names, dtype = self.VECTORS, self.codes
        if self.codes == INT4:
            names, dtype = ("".join(names),), "int8"
        block = block_size(self._codes_size)
        size = self._heads, block, jnp.dtype(dtype), self._codes_size // block
        return dict.fromkeys(names, StateArray(self.CODES, *size))

    @property
    def _codes_size(self) -> int:
        """The codes, or bytes of two codes, of an entry of a head in one array."""
        return self.features * len(self.VECTORS) // 2 if self.codes == INT4 else self.features

    @property
    def _heads(self) -> int | None:
        """Key/value heads; None without such an axis."""
        return self.num_kv_heads if axes.KV_HEADS in self.AXES else None

    @property
    def num_parts(self) -> int:
        """The parts of a vector."""
        return len(self.splits) + 1

    def entry_bytes(self, head_shards: int = 1) -> int:
        """Bytes of an entry of one layer on a device that has one of the shards of heads."""
        num_heads = self.num_kv_heads * head_copies(self.num_kv_heads, head_shards) // head_shards
        return sum(
            (num_heads if array.has_kv_heads else array.heads or 1) * array.vector_bytes
            for array in self.arrays.values()
        )

    def encode(self, new: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """New vectors as the arrays hold them, without an axis of layers.

        Args:
          new: The vectors, with head features last.
        """
        if self.codes is None:
            return dict(zip(self.VECTORS, new, strict=True))
        codes, encoded = [], {}
        for name, x in zip(self.VECTORS, new, strict=True):
            of_vector, scales = encode(x, self.codes, self.dtype, self.splits, self.features)
            codes.append(of_vector)
            encoded[f"{name}_scale"] = scales[0] if self._heads else jnp.stack(scales, axis=1)
        if self.codes == INT4:
            lower, upper = codes if len(codes) == 2 else jnp.split(codes[0], 2, axis=-1)
            codes = [pair(lower, upper)]
        blocks = (in_blocks(x, self._codes_size) for x in codes)
        return encoded | dict(zip(self.entries, blocks, strict=True))

    def keys_values(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """The keys and values of pages, each with axes of pages and heads before its entries."""
        raise NotImplementedError


class KeysValues(StateSpec):
    """A key and a value for each key/value head."""

    VECTORS = "k", "v"
    AXES = axes.CACHE_HEADS
    CODES = axes.CACHE_CODES
    SCALES = axes.CACHE_SCALES

    def encode(self, new: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """See `StateSpec`. New keys have tokens last."""
        k_BKHT, v_BKTH = new
        return super().encode((k_BKHT.swapaxes(-1, -2), v_BKTH))

    def keys_values(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """See `StateSpec`."""
        if self.codes is None:
            return arrays["k"], arrays["v"]
        k_scale, v_scale = (jnp.expand_dims(arrays[f"{x}_scale"], -2) for x in self.VECTORS)
        if self.codes == INT4:
            codes = arrays["kv"]
            return EntryCodes(codes, k_scale, halves=(0,)), EntryCodes(codes, v_scale, halves=(1,))
        return EntryCodes(arrays["k"], k_scale), EntryCodes(arrays["v"], v_scale)


class Latents(StateSpec):
    """A latent and its rotated key, side by side: the key and the value of all query heads."""

    VECTORS = ("latent",)
    AXES = axes.CACHE_LATENTS
    CODES = axes.CACHE_LATENT_CODES
    SCALES = axes.CACHE_LATENT_SCALES

    def keys_values(self, arrays: Mapping[str, jax.Array]) -> KeysAndValues:
        """See `StateSpec`. The keys are the values, so that a kernel reads a page once for both.

        The values include the rotated key, so the last features of the attention output are
        undefined. Values without them would be a copy of nearly all entries.
        """
        if self.codes is None:
            latents: Entries = jnp.expand_dims(arrays["latent"], -3)
        else:
            codes = jnp.expand_dims(arrays["latent"], -4)
            scale = jnp.expand_dims(arrays["latent_scale"], -3)
            halves = (0, 1) if self.codes == INT4 else ()
            latents = EntryCodes(codes, scale, self.splits, halves)
        return latents, latents


def transposed(keys: Entries) -> Entries:
    """Keys with head features and positions exchanged."""
    if isinstance(keys, EntryCodes):
        return replace(keys, codes=keys.codes.swapaxes(-1, -2))
    return keys.swapaxes(-1, -2)


@cache
def state_spec(
    attention: Attention, dtype: DTypeLike, arrangement: Arrangement = AS_PUBLISHED
) -> StateSpec:
    """The memory of layers with this attention.

    Args:
      attention: The attention of the layers.
      dtype: The dtype of keys, values and latents, or of their scales if they are in codes.
      arrangement: The padding of heads, and the dtype of codes.
    """
    kind = KeysValues if attention.latent is None else Latents
    return kind(
        attention.num_kv_heads,
        arrangement.cache_dim(attention),
        jnp.dtype(dtype),
        arrangement.cache_codes,
        attention.entry_splits,
    )
