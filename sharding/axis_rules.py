"""Axis rules: the mesh axes over which each logical axis is split.

A rule names mesh axes from major to minor. A logical axis without a rule follows another axis
(`FOLLOWS`) or is replicated. Knows nothing of models or files.
"""

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
"""The leader of each axis that has one.

An axis without a rule is split like its leader. A rule for the axis must begin with the leader's
mesh axes.
"""


@dataclass(frozen=True)
class AxisRules:
    """A table of rules: mesh axes by logical axis, as written in the layout."""

    table: Mapping[str, tuple[str, ...]]

    def __getitem__(self, logical_axis: str) -> tuple[str, ...]:
        """Mesh axes of a logical axis, major to minor; an empty tuple for a replicated axis."""
        if logical_axis == axes.LOGIT_BATCH:
            return tuple(axis for axis in self[axes.BATCH] if axis not in self[axes.VOCAB])
        if logical_axis == axes.HEAD_BATCH:
            return self[axes.ATTENTION_BATCH][: -len(self.exchanged) or None]
        if logical_axis == axes.KV_HEADS:
            # the rule for KV_HEADS only says whether copies are wanted; the mesh axes follow from
            # the rules of the query heads
            return tuple(axis for axis in self[axes.QUERY_HEADS] if axis not in self.exchanged)
        if logical_axis == axes.EXPERT_MLP:
            return tuple(axis for axis in self[axes.MLP] if axis not in self[axes.EXPERTS])
        if logical_axis in self.table:
            return self.table[logical_axis]
        leader = FOLLOWS.get(logical_axis)
        return () if leader is None else self[leader]

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Mesh axes over which attention exchanges heads of the projections for rows."""
        heads = self[axes.QUERY_HEADS]
        return tuple(dropwhile(lambda axis: axis not in heads, self[axes.ATTENTION_BATCH]))

    def updated(self, table: Mapping[str, tuple[str, ...]]) -> "AxisRules":
        """Copy of these rules, overridden by the table of one phase."""
        return AxisRules({**self.table, **table})

    def dimensions(self, logical_axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of each dimension of an array with these logical axes."""
        return tuple(self[axis] if axis else () for axis in logical_axes)

    def spec(self, logical_axes: tuple[str, ...]) -> PartitionSpec:
        """Partition of an array with these logical axes."""
        return PartitionSpec(*(mesh_axes or None for mesh_axes in self.dimensions(logical_axes)))
