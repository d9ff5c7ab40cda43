"""Axis rules: which mesh axes each logical axis lies over.

A rule names mesh axes major to minor; an axis without a rule follows another one (`FOLLOWS`) or is
whole on every device. Knows nothing of models or files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import dropwhile

from jax.sharding import PartitionSpec

from ..modelzoo import axes

FOLLOWS = {
    axes.ATTENTION_BATCH: axes.BATCH,
    axes.RESIDUAL_BATCH: axes.BATCH,
    axes.RESIDUAL_LENGTH: axes.LENGTH,
}
"""Leaders: an axis without a rule lies as its leader; a rule for it begins with the leader's."""


def kv_copies(num_kv_heads: int, num_shards: int) -> int:
    """Copies of each key/value head, so that every shard of the query heads has its own ones."""
    return math.lcm(num_kv_heads, num_shards) // num_kv_heads


@dataclass(frozen=True)
class AxisRules:
    """Mesh axes by logical axis, as written."""

    table: Mapping[str, tuple[str, ...]]

    def __getitem__(self, logical_axis: str) -> tuple[str, ...]:
        """Mesh axes of a logical axis, major to minor; none for an axis that is not split."""
        if logical_axis == axes.LOGIT_BATCH:
            return tuple(axis for axis in self[axes.BATCH] if axis not in self[axes.VOCAB])
        if logical_axis == axes.HEAD_BATCH:
            return self[axes.ATTENTION_BATCH][: -len(self.exchanged) or None]
        if logical_axis == axes.KV_HEADS:
            # a rule for it says whether copies are wanted; where they lie follows from the others
            return tuple(axis for axis in self[axes.QUERY_HEADS] if axis not in self.exchanged)
        if logical_axis == axes.EXPERT_MLP:
            return tuple(axis for axis in self[axes.MLP] if axis not in self[axes.EXPERTS])
        if logical_axis in self.table:
            return self.table[logical_axis]
        leader = FOLLOWS.get(logical_axis)
        return () if leader is None else self[leader]

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Mesh axes over which the rows of attention are had for heads of the projections."""
        heads = self[axes.QUERY_HEADS]
        return tuple(dropwhile(lambda axis: axis not in heads, self[axes.ATTENTION_BATCH]))

    def updated(self, table: Mapping[str, tuple[str, ...]]) -> "AxisRules":
        """These rules with those of one phase on top."""
        return AxisRules({**self.table, **table})

    def dimensions(self, logical_axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of each dimension of an array with these logical axes."""
        return tuple(self[axis] if axis else () for axis in logical_axes)

    def spec(self, logical_axes: tuple[str, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(mesh_axes or None for mesh_axes in self.dimensions(logical_axes)))
