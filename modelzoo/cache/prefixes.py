"""Prefixes that several rows begin with: each is kept once, and read once for all its rows.

The prefixes have a cache of their own, with one row for each prefix. The rows of a decode batch are
cut into as many groups of consecutive rows as there are prefixes, and all rows of group r begin
with prefix r. In the attention of a layer, one product multiplies all queries of a group with the
keys of its prefix. The result is merged with that of the rows' own entries. Source of the idea:
Juravsky et al. 2024, "Hydragen" (2402.05099), section 3; Zhu et al. 2024, "RelayAttention"
(2402.14808), section 4.

A row counts its own tokens, entries and lengths from the end of its prefix. Only positions that the
model sees, in rotations and masks, are counted from the start of the prefix.

Knows nothing of owners of prefixes, buckets or meshes. Guarantees: entries of a prefix at or after
its length are never visible, so a prefix may replace a longer one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..weights.weight_products import Axes
from .kv_cache import KVCache, Positions
from .segments import Segments


class Prefixes(NamedTuple):
    """The prefixes of all groups of slots; a prefix of length 0 is empty."""

    cache: KVCache
    tokens_BS: jax.Array
    """Token ids of each prefix; those after its length are undefined."""
    length_B: jax.Array
    """The number of tokens of each prefix."""

    def map(self, visit: Callable[[Segments, Axes], Segments]) -> "Prefixes":
        """Apply `visit` to the segments and the logical axes of every array.

        An array outside the cache counts as one segment.
        """
        tokens_BS, length_B = (
            visit((x,), axes.LOGITS[:1])[0] for x in (self.tokens_BS, self.length_B)
        )
        return Prefixes(self.cache.map(visit), tokens_BS, length_B)

    def positions(self) -> Positions:
        """The positions of all entries that belong to their prefix."""
        return self.cache.positions.below(self.length_B)

    def by_slot(self, x_B: jax.Array, num_slots: int) -> jax.Array:
        """Repeat the entry of each prefix for the slots of its group."""
        return jnp.repeat(x_B, num_slots // len(x_B), axis=0)
