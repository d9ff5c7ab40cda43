"""The sparse MLP of a block: router, experts and shared expert."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from .. import axes
from ..layer_config import Experts
from ..layers import ACTIVATIONS, DenseMlp, constant, weight
from ..moe_config import ClampedUnit
from ..operations import Operations
from ..weights.product import einsum
from .call import ExpertCall
from .experts import (
    DOWN_AXES,
    DOWN_BIAS_AXES,
    GATE_UP_AXES,
    GATE_UP_BIAS_AXES,
    ExpertWeights,
    GatedUnit,
)
from .mix import Mixture
from .routing import Router


class SparseMlp(nnx.Module):
    """A mixture of experts in place of an MLP."""

    def __init__(self, rngs: nnx.Rngs, embed: int, options: Experts):
        moe = options.moe
        D, E, F = embed, moe.routing.num_experts, moe.mlp
        self.router = weight(rngs, (D, E), ("", ""))
        if moe.routing.has_bias:
            self.router_bias = constant(0.0, (E,), ("",))
        if moe.routing.has_choice_bias:
            # float32: scores may differ by less than a 16-bit dtype can resolve
            self.choice_bias = constant(0.0, (E,), ("",), dtype=jnp.float32)
        self.gate_up = weight(rngs, (E, 2, D, F), GATE_UP_AXES, inputs=(2,), is_sliced_once=True)
        self.down = weight(rngs, (E, F, D), DOWN_AXES, inputs=(1,), is_sliced_once=True)
        if moe.has_bias:
            self.gate_up_bias = constant(0.0, (E, 2, F), GATE_UP_BIAS_AXES)
            self.down_bias = constant(0.0, (E, D), DOWN_BIAS_AXES)
        if options.shared is not None:
            self.shared = DenseMlp(rngs, embed, options.shared)
        if moe.has_shared_gate:
            self.shared_gate = weight(rngs, (D,), ("",))
        self.options, self.moe = options, moe

    def __call__(self, x_BTD: jax.Array, operations: Operations, call: ExpertCall) -> jax.Array:
        unit = gated_unit(self.options)
        mixture = Mixture(self.moe.routing, call.dispatch, unit)
        router = Router(self.router, _value(self, "router_bias"), _value(self, "choice_bias"))
        gate_up_bias, down_bias = _value(self, "gate_up_bias"), _value(self, "down_bias")
        weights = ExpertWeights(self.gate_up, self.down, gate_up_bias, down_bias, call.layer)
        output = operations.mix_experts(mixture, x_BTD, call.is_token_BT, router, weights)
        call.add(jax.tree.map(lambda x: x[None], output.use), output.num_dropped_BT)
        if not self.moe.shared_mlp:
            return output.out_BTD
        return output.out_BTD + self._shared(x_BTD, operations)

    def _shared(self, x_BTD: jax.Array, operations: Operations) -> jax.Array:
        out_BTD = self.shared(x_BTD, operations)
        if not self.moe.has_shared_gate:
            return out_BTD
        gate_BT = operations.project(
            einsum("BTD,D->BT"), x_BTD, self.shared_gate, axes.RESIDUAL, axes.RESIDUAL[:2],
            jnp.float32,
        )  # fmt: skip
        return (out_BTD * jax.nn.sigmoid(gate_BT)[..., None]).astype(out_BTD.dtype)


def _value(module: nnx.Module, name: str) -> jax.Array | None:
    parameter = getattr(module, name, None)
    return None if parameter is None else parameter[...]


def gated_unit(options: Experts) -> GatedUnit:
    """The function from the outputs of gate and up of an expert to its hidden activations."""
    if options.moe.clamped is not None:
        return partial(_clamped_unit, unit=options.moe.clamped)
    activation: Callable[[jax.Array], jax.Array] = ACTIVATIONS[options.activation]
    return lambda gate, up: activation(gate) * up


def _clamped_unit(gate: jax.Array, up: jax.Array, unit: ClampedUnit) -> jax.Array:
    gate = jnp.minimum(gate, unit.limit)
    up = jnp.clip(up, -unit.limit, unit.limit)
    return (up + 1) * gate * jax.nn.sigmoid(gate * unit.alpha)
