"""Sparse layers over a mesh: tokens are sent to the devices of their experts, and back.

If the mesh axes of `experts` also split the tokens, each device exchanges tokens with the other
devices along these axes: one all-to-all before the experts' products and one after them. If all
devices along these axes have the same tokens, nothing is exchanged: each device adds the results of
its own experts. The hidden size of experts is split over the mesh axes of `mlp` that `experts` does
not use, and results are summed over them as in a dense MLP. Weights stay where they are, unless a
phase gathers the weights of `mlp`.

Source: Lepikhin et al. 2020, "GShard" (2006.16668), section 3.3; for tensor parallelism inside
experts Rajbhandari et al. 2022, "DeepSpeed-MoE" (2201.05596), section 5.2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..modelzoo import axes
from ..modelzoo.moe.call import ExpertUse
from ..modelzoo.moe.experts import ExpertWeights
from ..modelzoo.moe.mix import ExpertShards, Mixture, MoeOutput
from ..modelzoo.moe.routing import Router
from ..modelzoo.weights.quantised_weight import map_arrays
from ..modelzoo.weights.weight_products import Axes
from .axis_rules import AxisRules
from .projection import MeshAxes, Projection, extra_axes, gather


@dataclass(frozen=True)
class ExpertExchange:
    """The collectives of one phase's sparse layers, and the partitions of their arrays."""

    rules: AxisRules
    stored: AxisRules
    """The rules by which the weights are stored."""

    @property
    def experts(self) -> MeshAxes:
        """Mesh axes over which the experts are split."""
        return self.rules[axes.EXPERTS]

    @property
    def exchanged(self) -> MeshAxes:
        """Mesh axes along which tokens are exchanged."""
        token_axes = self.rules[axes.RESIDUAL_BATCH] + self.rules[axes.RESIDUAL_LENGTH]
        return self.experts if set(self.experts) & set(token_axes) else ()

    @property
    def projection(self) -> Projection:
        """Collectives of a sparse layer as one product over E and F.

        The tokens are whole along embed while the experts run.
        """
        residual = self.rules.dimensions(axes.RESIDUAL)
        partial_sums = () if self.exchanged else self.experts
        weight = ((), partial_sums, self.rules[axes.EXPERT_MLP], ())
        return Projection.from_mesh_axes("BTD,DEFO->BTO", residual, weight, weight, residual)

    @property
    def tokens(self) -> tuple[MeshAxes, MeshAxes]:
        """Mesh axes of rows and of their tokens while the experts run."""
        projection, residual = self.projection, self.rules.dimensions(axes.RESIDUAL)
        batch, length = (
            tuple(axis for axis in residual[i] if axis not in projection.gather_x[i])
            + projection.cut_x[i]
            for i in (0, 1)
        )
        return batch, length

    def mix(
        self, mesh_map: Callable, mixture: Mixture, x_BTD: jax.Array, is_token_BT: jax.Array,
        router: Router, weights: ExpertWeights,
    ) -> MoeOutput:  # fmt: skip
        """Compute a sparse layer.

        Args:
          mesh_map: Maps a function over the shards of every device: `(body, in_specs, out_specs)`.
          mixture: The computation on one device.
          x_BTD: The residual stream.
          is_token_BT: False for padding.
          router: The router, whole on every device.
          weights: The experts' weights, split as stored.
        """
        projection, (batch, length) = self.projection, self.tokens

        def local(
            x_BTD: jax.Array, is_token_BT: jax.Array, router: Router, weights: ExpertWeights
        ) -> MoeOutput:
            x_BTD = projection.prepare_x(x_BTD)
            weights = self._prepare(weights)
            mixed = mixture(x_BTD, is_token_BT, router, weights, self._shards(weights))
            return mixed._replace(out_BTD=projection.reduce(mixed.out_BTD))

        router = router._replace(weight_DE=router.weight_DE[...])
        weights = ExpertWeights._make(None if x is None else x[...] for x in weights)
        residual, rows = self.rules.spec(axes.RESIDUAL), P(batch or None, length or None)
        use = ExpertUse._make(P(batch + length or None) for _ in ExpertUse._fields)
        weight_specs = _each(self.stored.spec, weights)
        router_specs = jax.tree.map(lambda _: P(), router)
        in_specs = (residual, rows, router_specs, weight_specs)
        body = mesh_map(local, in_specs, MoeOutput._make((residual, rows, use)))
        return body(x_BTD, is_token_BT, router, weights)

    def _prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Weights as this device uses them; one device of a sum adds the bias."""

        def missing(logical_axes: Axes) -> tuple[MeshAxes, ...]:
            stored, used = (r.dimensions(logical_axes) for r in (self.stored, self.rules))
            return tuple(map(extra_axes, stored, used))

        if any(map(any, map(missing, weights.axes))):
            weights = weights.select_layer()
        weights = jax.tree.map(gather, weights, _each(missing, weights))
        split = self.rules[axes.EXPERT_MLP]
        if weights.down_bias_ED is None or not split:
            return weights
        bias_ED = jnp.where(jax.lax.axis_index(split) == 0, weights.down_bias_ED, 0)
        return weights._replace(down_bias_ED=bias_ED)

    def _shards(self, weights: ExpertWeights) -> ExpertShards:
        first = jnp.int32(0)
        if self.experts:
            first = jax.lax.axis_index(self.experts) * weights.num_experts
        if not self.exchanged:
            return ExpertShards(first)
        exchange = partial(
            jax.lax.all_to_all,
            axis_name=self.exchanged,
            split_axis=0,
            concat_axis=0,
            tiled=True,
        )
        num_exchanging = math.prod(jax.lax.axis_size(axis) for axis in self.exchanged)
        return ExpertShards(first, num_exchanging, exchange)


def _each(from_axes: Callable[[Axes], Any], weights: ExpertWeights) -> Any:
    """Apply a function of logical axes to every array of the weights that the model has."""
    return ExpertWeights._make(
        None if x is None else map_arrays(lambda _, names: from_axes(names), x, logical_axes, "")
        for x, logical_axes in zip(weights, weights.axes, strict=True)
    )
