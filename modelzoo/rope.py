"""Rotary position embeddings: frequencies at trace time, rotation from positions given as data.

Layers that do not rotate may have queries that grow with their positions instead. Knows nothing of
caches or masks. Frequencies are float64 numpy until the last step, so a graph holds them as one
small constant. The two halves of a head are rotated against each other ("rotate half", the order of
Hugging Face checkpoints).
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import FactorScaling, LinearScaling, Llama3Scaling, NoRope, RopeConfig, YarnScaling


class Rotation(NamedTuple):
    """Cosines and sines of each token's angles, `h = H / 2` pairs to a head."""

    cos_BT1h: jax.Array
    sin_BT1h: jax.Array
    norm_epsilon: float | None = None
    """As in `RopeConfig`."""


class QueryGrowth(NamedTuple):
    """What queries grow by where nothing rotates; None means that they stay as they are."""

    factor_BT11: jax.Array | None


PositionCode = Rotation | QueryGrowth
"""What positions do to queries and keys of one kind of layer."""


def position_code(
    position_BT: jax.Array | np.ndarray, rope: RopeConfig | NoRope, head_dim: int
) -> PositionCode:
    """What these positions do, for all layers and heads of that kind."""
    if isinstance(rope, RopeConfig):
        return rotation(position_BT, rope, head_dim)
    if not rope.scale:
        return QueryGrowth(None)
    xp = np if isinstance(position_BT, np.ndarray) else jnp
    num_intervals_BT = xp.floor((position_BT.astype(xp.float32) + 1) / rope.interval)
    factor_BT = 1 + rope.scale * xp.log1p(num_intervals_BT)
    return QueryGrowth(jnp.asarray(factor_BT, jnp.float32)[..., None, None])


def encode(q_BTNH: jax.Array, k_BTKH: jax.Array, by: PositionCode) -> tuple[jax.Array, jax.Array]:
    """Queries and keys after what their positions do to them."""
    if isinstance(by, Rotation):
        return rotate(q_BTNH, by), rotate(k_BTKH, by)
    if by.factor_BT11 is not None:
        q_BTNH = (q_BTNH.astype(jnp.float32) * by.factor_BT11).astype(q_BTNH.dtype)
    return q_BTNH, k_BTKH


def rotation(position_BT: jax.Array | np.ndarray, rope: RopeConfig, head_dim: int) -> Rotation:
    """The rotation of tokens at these positions, for all layers and heads.

    XLA would repeat the trigonometry inside every layer and head. Positions that are known now, as
    numpy, make it a constant of the graph; of rows of several tokens it is done in a loop, into
    which nothing else is fused. For single tokens that is done on the CPU alone, in two turns: it
    is 4 % of a decode step there otherwise, and elsewhere less than a loop costs.
    """
    frequency_h, factor = frequencies(rope, head_dim)
    xp = np if isinstance(position_BT, np.ndarray) else jnp

    def sides(position: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
        by_axes = np.expand_dims(frequency_h, tuple(range(position.ndim + 1)))
        angle = position[..., None, None].astype(xp.float32) * by_axes
        cos, sin = xp.cos(angle) * factor, xp.sin(angle) * factor
        return jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)

    if xp is np:
        cos_BT1h, sin_BT1h = sides(position_BT)
    elif position_BT.shape[1] > 1:
        cos_BT1h, sin_BT1h = jax.lax.map(sides, position_BT)
    else:
        in_halves = partial(jax.lax.map, sides, batch_size=-(-len(position_BT) // 2))
        cos_BT1h, sin_BT1h = jax.lax.platform_dependent(position_BT, cpu=in_halves, default=sides)
    return Rotation(cos_BT1h, sin_BT1h, rope.norm_epsilon)


def rotate(x_BTNH: jax.Array, by: Rotation) -> jax.Array:
    """Rotate heads by their tokens' angles; computed in float32, returned in `x`'s dtype.

    Entries beyond those that have angles stay as they are. Where heads are normed, whole heads are.
    """
    turned_BTNH = _turn(x_BTNH.astype(jnp.float32), by.cos_BT1h, by.sin_BT1h)
    if by.norm_epsilon is not None:
        mean_square = jnp.mean(turned_BTNH * turned_BTNH, axis=-1, keepdims=True)
        turned_BTNH = turned_BTNH * jax.lax.rsqrt(mean_square + by.norm_epsilon)
    return turned_BTNH.astype(x_BTNH.dtype)


def _turn(x_BTNH: jax.Array, cos_BT1h: jax.Array, sin_BT1h: jax.Array) -> jax.Array:
    h = cos_BT1h.shape[-1]
    first, second, rest = jnp.split(x_BTNH, [h, 2 * h], axis=-1)
    turned = (first * cos_BT1h - second * sin_BT1h, second * cos_BT1h + first * sin_BT1h)
    return jnp.concatenate([*turned, rest], axis=-1)


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position of each rotated pair of a head, and the factor on cosine and sine."""
    head_dim = rope.rotated or head_dim
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequency = rope.theta**-exponent
    factor = 1.0
    match rope.scaling:
        case None:
            pass
        case LinearScaling():
            frequency = frequency / rope.scaling.factor
        case Llama3Scaling():
            frequency = _llama3(frequency, rope.scaling)
        case FactorScaling():
            frequency = frequency / np.asarray(rope.scaling.factors, np.float64)
            factor = rope.scaling.attention_factor
        case YarnScaling():
            frequency = _yarn(frequency, rope.scaling, rope.theta, head_dim)
            factor = rope.scaling.attention_factor
            if factor is None:
                factor = 0.1 * math.log(rope.scaling.factor) + 1.0
    return frequency.astype(np.float32), factor


def _llama3(frequency: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Source: meta-llama/llama-models, models/llama3/model.py, `apply_scaling`."""
    wavelength = 2 * np.pi / frequency
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # the ramp may be a step: Llama 4 publishes the same factor twice
    smooth = (scaling.original_max_position / wavelength - low) / max(high - low, 1e-6)
    # beyond either border of the ramp the clip gives the pure stretched or pure original frequency
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn(frequency: np.ndarray, scaling: YarnScaling, theta: float, head_dim: int) -> np.ndarray:
    """Source: YaRN, arXiv 2309.00071, section 3.2 and equations 17 to 23."""

    def dimension_of(rotations: float) -> float:
        # the pair that turns `rotations` times over the original context
        context = scaling.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    interpolated = np.clip(ramp, 0.0, 1.0)
    return interpolated * frequency / scaling.factor + (1 - interpolated) * frequency
