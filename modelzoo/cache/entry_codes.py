"""Rounding of cache entries to codes with scales, and products of attention with the codes.

The features of a key, or of a value, share one scale for each token and head. A latent has two, one
for the latent itself and one for the rotated key. So the codes of a token depend on nothing but the
token's own key, value or latent.

A product converts the codes alone, which XLA for TPU does within the product. Scales of keys
multiply the scores, and scales of values multiply the weights of the softmax.

Entries in int4 are rotated: their features are multiplied by a Hadamard matrix, which spreads a few
large features over all of them. Queries are rotated in the same way, so scores stay what they are,
and sums of values are rotated back. Source: QuaRot (2404.00456), section 4.

Two codes of int4 are in a byte. They are of the same token, so a write does not read the byte.

Features are in *blocks* of a vector of TPUs, each with the entries of a whole page. XLA for TPU
writes longer lines of bytes in another memory layout than programs have, and would copy the pool.

Knows nothing of pages, slots or layers.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import hadamard

from ..axes import LANES
from .stripes import pad_end

INT4 = "int4"
"""The codes of rotated entries, two in a byte. No array has this dtype: XLA for TPU would write it
in a loop over tokens, and XLA for the CPU does not take it."""
LARGEST_CODES = {"int8": 127.0, "float8_e4m3fn": 448.0, INT4: 7.0}
"""The largest code, by the name of the codes; the smallest one is its negative."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EntryCodes:
    """Keys, values or latents in codes, in the place of `k_BKHS` or `v_BKSH`."""

    codes: jax.Array
    """Codes, or bytes of two codes, with the axes of the entries, and blocks after heads."""
    scale_BKPS: jax.Array
    """Scales of the P parts of the features, in the dtype of entries that are not in codes."""
    splits: tuple[int, ...] = field(default=(), metadata={"static": True})
    """The features at which the parts after the first one begin."""
    halves: tuple[int, ...] = field(default=(), metadata={"static": True})
    """The halves of bytes that have the codes, one after the other along the features: 0 for the
    lower bits. Empty if the codes are not in bytes of two; the others are of rotated entries."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the entries."""
        pages, heads, blocks, entries, features = self.codes.shape
        return (pages, heads, entries, blocks * features * max(1, len(self.halves)))


def block_size(num_features: int) -> int:
    """The features of a block."""
    return num_features if num_features % LANES else LANES


def in_blocks(codes: jax.Array, num_features: int) -> jax.Array:
    """Codes, with entries and features last, in blocks, which are padded if they are several."""
    if block_size(num_features) == num_features:
        return jnp.expand_dims(codes, -3)
    codes = pad_end(codes, -1, num_features)
    return codes.reshape(*codes.shape[:-1], -1, block_size(num_features)).swapaxes(-2, -3)


def encode(
    x: jax.Array, codes: str, scales: jnp.dtype, splits: tuple[int, ...], num_features: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Round entries to codes.

    The scale of a part is its largest magnitude over the largest code, rounded to the dtype of
    scales. A code is the value divided by the rounded scale, rounded to the nearest code.

    Args:
      x: The entries, with their features last.
      codes: The name of codes, a key of `LARGEST_CODES`.
      scales: The dtype of scales.
      splits: The features at which the parts after the first one begin.
      num_features: The features of the cache. Entries that are rotated are padded to them first, as
        attention rotates queries of this size.

    Returns:
      The codes, those of int4 as int8, and the scales of each part, without the axis of features.
      If a value is not finite, neither is its scale.
    """
    largest, rounded, scale_of_parts = LARGEST_CODES[codes], [], []
    if codes == INT4:
        x = rotate(pad_end(x, -1, num_features), splits)
    for start, stop in pairwise((0, *splits, x.shape[-1])):
        part = jax.lax.slice_in_dim(x, start, stop, axis=-1).astype(jnp.float32)
        # times the reciprocal: in some programs, XLA replaces a division by a constant with this
        scale = (jnp.abs(part).max(axis=-1) * (1 / largest)).astype(scales)
        divisor = jnp.where(scale > 0, scale, 1).astype(jnp.float32)
        part = jnp.clip(part / divisor[..., None], -largest, largest)
        rounded.append(part if codes == "float8_e4m3fn" else jnp.rint(part))
        scale_of_parts.append(scale)
    dtype = jnp.int8 if codes == INT4 else jnp.dtype(codes)
    return jnp.concatenate(rounded, axis=-1).astype(dtype), scale_of_parts


def pair(lower: jax.Array, upper: jax.Array) -> jax.Array:
    """Bytes of two codes of int4 each."""
    return (lower & 15) | (upper << 4)


def numbers(
    codes: jax.Array, halves: tuple[int, ...], dtype: jnp.dtype, axis: int = -1
) -> jax.Array:
    """Codes as numbers of another dtype, from the halves of bytes if they are in bytes of two.

    Args:
      codes: The codes or bytes.
      halves: See `EntryCodes`.
      dtype: The dtype of the numbers.
      axis: The axis of features.
    """
    if not halves:
        return codes.astype(dtype)
    wide = codes.astype(jnp.int32)
    both = (wide << 28) >> 28, wide >> 4
    return jnp.concatenate([both[half].astype(dtype) for half in halves], axis)


def score_codes(q_BKAH: jax.Array, keys: EntryCodes) -> jax.Array:
    """Products of queries and keys in codes, in float32."""
    scale_BKPS = keys.scale_BKPS.astype(jnp.float32)
    B, K, A, H = q_BKAH.shape
    # one row of queries for each part: XLA for TPU copies the whole cache to cut keys in parts
    part_H = np.searchsorted(keys.splits, np.arange(H), side="right")
    is_part_PH = np.arange(len(keys.splits) + 1)[:, None] == part_H
    if keys.halves:
        q_BKAH = rotate(q_BKAH, keys.splits)
    q_BKPAH = jnp.where(is_part_PH[None, None, :, None], q_BKAH[:, :, None], 0)
    dtype = keys.scale_BKPS.dtype
    # blocks, and features in each of them
    k_BKHS = keys.codes.reshape(B, K, -1, keys.codes.shape[-1])
    k_BKHS = numbers(k_BKHS, keys.halves, dtype, axis=2)
    scores_BKAS = _product(q_BKPAH.reshape(B, K, -1, H).astype(dtype), k_BKHS)
    scores_BKPAS = scores_BKAS.reshape(B, K, -1, A, scores_BKAS.shape[-1])
    return (scores_BKPAS * scale_BKPS[:, :, :, None]).sum(axis=2)


def weigh_codes(weights_BKAS: jax.Array, values: EntryCodes) -> jax.Array:
    """Sums of values in codes with float32 weights, in float32; all features have one scale."""
    scale_BK1S = values.scale_BKPS[:, :, :1]
    weights_BKAS = weights_BKAS * scale_BK1S.astype(jnp.float32)
    dtype = scale_BK1S.dtype
    B, K, _, S, _ = values.codes.shape
    v_BKSH = values.codes.swapaxes(2, 3).reshape(B, K, S, -1)
    v_BKSH = numbers(v_BKSH, values.halves, dtype)
    out_BKAH = _product(weights_BKAS.astype(dtype), v_BKSH)
    return rotate(out_BKAH, values.splits) if values.halves else out_BKAH


def rotate(x: jax.Array, splits: tuple[int, ...]) -> jax.Array:
    """Multiply features by a Hadamard matrix, in float32; a second time undoes it.

    Features are the last axis. The matrix has blocks of the largest power of two that divides the
    features of every part.
    """
    block = math.gcd(x.shape[-1], *splits)
    block &= -block
    blocks = x.reshape(*x.shape[:-1], -1, block)
    rotated = _product(blocks, jnp.asarray(hadamard(block), x.dtype)) * block**-0.5
    return rotated.reshape(x.shape)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)
