"""Sparse layers over a mesh: tokens go to the devices that hold their experts, and come back.

Where the mesh axes of `experts` split the tokens, too, each device exchanges tokens with the others
along them: one all-to-all before the experts' products and one after. Where all devices along them
have the same tokens, each adds what its own experts make, and nothing is exchanged. The hidden size
of experts is split over the mesh axes of `mlp` that `experts` leaves, and summed over as in a dense
MLP. Weights stay where they are, unless a phase gathers those of `mlp`.

Source: Lepikhin et al. 2020, "GShard" (2006.16668), section 3.3, and for tensor parallelism inside
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
from ..modelzoo.moe.experts import ExpertWeights
from ..modelzoo.moe.mix import ExpertShards, Mixture, MoeOutput
from ..modelzoo.moe.routing import Router
from ..modelzoo.moe.use import ExpertUse
from ..modelzoo.operations import Axes
from .axis_rules import AxisRules
from .projection import MeshAxes, Projection, beyond, gather


@dataclass(frozen=True)
class ExpertExchange:
    """The collectives of one phase's sparse layers, and where their arrays lie."""

    rules: AxisRules
    stored: AxisRules
    """The rules that the weights lie by."""

    @property
    def experts(self) -> MeshAxes:
        """Mesh axes that share the experts out."""
        return self.rules[axes.EXPERTS]

    @property
    def exchanged(self) -> MeshAxes:
        """Mesh axes along which tokens are exchanged."""
        of_tokens = self.rules[axes.RESIDUAL_BATCH] + self.rules[axes.RESIDUAL_LENGTH]
        return self.experts if set(self.experts) & set(of_tokens) else ()

    @property
    def projection(self) -> Projection:
        """A sparse layer as a product: of tokens that are whole along embed, over E and F."""
        residual = self.rules.dimensions(axes.RESIDUAL)
        partial_sums = () if self.exchanged else self.experts
        weight = ((), partial_sums, self.rules[axes.EXPERT_MLP], ())
        return Projection.of("BTD,DEFO->BTO", residual, weight, weight, residual)

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
        """The mixture of a sparse layer; `mesh_map` runs a function on every device's shards."""
        projection, (batch, length) = self.projection, self.tokens

        def local(
            x_BTD: jax.Array, is_token_BT: jax.Array, router: Router, weights: ExpertWeights
        ) -> MoeOutput:
            x_BTD = projection.bring_x(x_BTD)
            weights = self._bring(weights)
            mixed = mixture(x_BTD, is_token_BT, router, weights, self._shards(weights))
            return mixed._replace(out_BTD=projection.reduce(mixed.out_BTD))

        router = router._replace(weight_DE=router.weight_DE[...])
        weights = ExpertWeights._make(None if x is None else x[...] for x in weights)
        residual, rows = self.rules.spec(axes.RESIDUAL), P(batch or None, length or None)
        use = ExpertUse._make(P(batch + length or None) for _ in ExpertUse._fields)
        of_weights = _each(self.stored.spec, weights)
        of_router = jax.tree.map(lambda _: P(), router)
        in_specs = (residual, rows, of_router, of_weights)
        body = mesh_map(local, in_specs, MoeOutput._make((residual, rows, use)))
        return body(x_BTD, is_token_BT, router, weights)

    def _bring(self, weights: ExpertWeights) -> ExpertWeights:
        """Weights as this device uses them; what is added to a sum, on one device of it alone."""

        def missing(logical_axes: Axes) -> tuple[MeshAxes, ...]:
            stored, used = (r.dimensions(logical_axes) for r in (self.stored, self.rules))
            return tuple(map(beyond, stored, used))

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


def _each(of_axes: Callable[[Axes], Any], weights: ExpertWeights) -> Any:
    """Something of the logical axes of every weight that the model has."""
    pairs = zip(weights, weights.axes, strict=True)
    return ExpertWeights._make(None if x is None else of_axes(a) for x, a in pairs)
