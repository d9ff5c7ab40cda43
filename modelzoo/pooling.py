"""Pooling: one vector for each text, from its final hidden states.

All of it is computed in float32. Knows nothing of caches, meshes or texts. Guarantees: padding does
not change a bit of a vector, whatever its values are.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .layers import constant, gelu
from .pooling_config import Pooling, Projection

_ACTIVATIONS = {
    "none": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": gelu,
}
SMALLEST_LENGTH = 1e-12
"""A vector is divided by its length, or by this number if the length is smaller."""


class Dense(nnx.Module):
    """A dense layer over pooled vectors, with an activation and a layer norm if there is one.

    Its weights have no inputs as metadata, so that no rule rounds them to codes.
    """

    def __init__(self, rngs: nnx.Rngs, num_inputs: int, projection: Projection):
        shape = (num_inputs, projection.size)
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * num_inputs**-0.5
        self.weight = nnx.Param(value, logical_axes=("", ""))
        if projection.has_bias:
            self.bias = constant(0.0, shape[1:], ("",))
        if projection.norm_epsilon is not None:
            self.norm_scale = constant(1.0, shape[1:], ("",))
            if projection.has_norm_bias:
                self.norm_bias = constant(0.0, shape[1:], ("",))
        self.projection = projection

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        projection = self.projection
        y_BD = jnp.einsum("BI,ID->BD", x_BD, _float32(self.weight))
        if projection.has_bias:
            y_BD = y_BD + _float32(self.bias)[None]
        y_BD = _ACTIVATIONS[projection.activation](y_BD)
        if projection.norm_epsilon is None:
            return y_BD
        y_BD = y_BD - y_BD.mean(axis=-1, keepdims=True)
        variance_B1 = jnp.mean(y_BD * y_BD, axis=-1, keepdims=True)
        scale_1D = _float32(self.norm_scale)[None]
        y_BD = y_BD * jax.lax.rsqrt(variance_B1 + projection.norm_epsilon) * scale_1D
        return y_BD + _float32(self.norm_bias)[None] if projection.has_norm_bias else y_BD


class Pooler(nnx.Module):
    """Pools the states of each row, and applies the dense layers of the configuration."""

    def __init__(self, rngs: nnx.Rngs, embed: int, pooling: Pooling):
        sizes = [embed, *(projection.size for projection in pooling.projections)]
        self.dense = nnx.List(
            Dense(rngs, size, projection)
            for size, projection in zip(sizes, pooling.projections, strict=False)
        )
        self.pooling = pooling

    def __call__(
        self, x_BTD: jax.Array, position_1T: jax.Array | np.ndarray, count_B: jax.Array
    ) -> jax.Array:
        """Return the float32 vectors `y_BD`.

        Args:
          x_BTD: The final hidden states.
          position_1T: The position of each state in its text.
          count_B: The number of tokens of each text, 0 for rows without one.
        """
        y_BD = _pool(self.pooling.kind, x_BTD.astype(jnp.float32), position_1T, count_B)
        for dense in self.dense:
            y_BD = dense(y_BD)
        if self.pooling.normalises:
            length_B1 = jnp.sqrt(jnp.sum(y_BD * y_BD, axis=-1, keepdims=True))
            y_BD = y_BD / jnp.maximum(length_B1, SMALLEST_LENGTH)
        return y_BD


def _pool(
    kind: str, x_BTD: jax.Array, position_1T: jax.Array | np.ndarray, count_B: jax.Array
) -> jax.Array:
    if kind in ("first", "last"):
        chosen_B = jnp.zeros_like(count_B) if kind == "first" else count_B - 1
        # a sum with one non-zero term, because a gather along tokens would gather all of them
        is_chosen_BT = position_1T == chosen_B[:, None]
        return jnp.where(is_chosen_BT[..., None], x_BTD, 0.0).sum(axis=1)
    is_token_BT1 = (position_1T < count_B[:, None])[..., None]
    if kind == "max":
        return jnp.where(is_token_BT1, x_BTD, -jnp.inf).max(axis=1)
    sum_BD = jnp.where(is_token_BT1, x_BTD, 0.0).sum(axis=1)
    return sum_BD / jnp.maximum(count_B, 1)[:, None].astype(jnp.float32)


def _float32(parameter: nnx.Param) -> jax.Array:
    return parameter[...].astype(jnp.float32)
