"""Rotary position embeddings: frequencies at trace time, rotations from positions at run time.

Layers may scale queries by a factor that grows with the position. Frequencies are
float64 numpy arrays until the last step, so a graph has them as one small constant. A rotated pair
is one feature of each half of the rotated features of a head ("rotate half", the order of Hugging
Face checkpoints). Knows nothing of caches or masks.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .rope_config import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    NoRope,
    RopeConfig,
    YarnScaling,
)


class Rotation(NamedTuple):
    """Cosines and sines of the angles of each token, for the h rotated pairs of a head."""

    cos_BT1h: jax.Array
    sin_BT1h: jax.Array
    norm_epsilon: float | None = None
    """The epsilon of `RopeConfig`."""
    growth_BT11: jax.Array | None = None
    """The factor of each token's queries; None means no scaling."""


class QueryGrowth(NamedTuple):
    """Scaling of queries by position alone, in layers without rotation."""

    growth_BT11: jax.Array | None
    """The factor of each token's queries; None means no scaling."""


PositionCode = Rotation | QueryGrowth
"""The effect of positions on queries and keys, in layers with the same rotation."""


def position_code(
    position_BT: jax.Array | np.ndarray, rope: RopeConfig | NoRope, head_dim: int
) -> PositionCode:
    """The position code of tokens at these positions, for all layers with this rotation.

    Positions that are a numpy array become a constant of the graph.
    """
    if isinstance(rope, RopeConfig):
        code = rotation(position_BT, rope, head_dim)
        growth_BT11 = _growth(position_BT, 0, rope.growth, rope.growth_interval)
        return code._replace(growth_BT11=growth_BT11)
    return QueryGrowth(_growth(position_BT, 1, rope.scale, rope.interval))


def _growth(
    position_BT: jax.Array | np.ndarray, offset: int, scale: float, interval: int
) -> jax.Array | None:
    """The factors on queries that grow with the number of whole intervals before a position."""
    if not scale:
        return None
    xp = np if isinstance(position_BT, np.ndarray) else jnp
    num_intervals_BT = xp.floor((position_BT.astype(xp.float32) + offset) / interval)
    factor_BT = 1 + scale * xp.log1p(num_intervals_BT)
    return jnp.asarray(factor_BT, jnp.float32)[..., None, None]


def encode(q_BTNH: jax.Array, k_BTKH: jax.Array, code: PositionCode) -> tuple[jax.Array, jax.Array]:
    """Apply a position code to queries and keys."""
    if isinstance(code, Rotation):
        q_BTNH, k_BTKH = rotate(q_BTNH, code), rotate(k_BTKH, code)
    if code.growth_BT11 is not None:
        q_BTNH = (q_BTNH.astype(jnp.float32) * code.growth_BT11).astype(q_BTNH.dtype)
    return q_BTNH, k_BTKH


def rotation(position_BT: jax.Array | np.ndarray, rope: RopeConfig, head_dim: int) -> Rotation:
    """The rotation of tokens at these positions, for all layers and heads.

    XLA would fuse the trigonometry into every layer and head, and so repeat it. With positions as a
    numpy array it is a constant of the graph. On the CPU it runs in a loop, over rows or over two
    halves of a row, which XLA does not fuse into layers: there, repeating the trigonometry takes
    4 % of a decode step or of a prefill call. Elsewhere a loop costs more. There, a barrier keeps
    the rotations of several tokens in several rows out of layers.
    """
    frequency_h, factor = frequencies(rope, head_dim)
    xp = np if isinstance(position_BT, np.ndarray) else jnp

    def cos_and_sin(position: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
        broadcast = np.expand_dims(frequency_h, tuple(range(position.ndim + 1)))
        angle = position[..., None, None].astype(xp.float32) * broadcast
        cos, sin = xp.cos(angle) * factor, xp.sin(angle) * factor
        return jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)

    if xp is np:
        cos_BT1h, sin_BT1h = cos_and_sin(position_BT)
    elif min(position_BT.shape) > 1:
        cos_BT1h, sin_BT1h = jax.lax.platform_dependent(
            position_BT,
            cpu=partial(jax.lax.map, cos_and_sin),
            default=lambda x: jax.lax.optimization_barrier(cos_and_sin(x)),
        )
    else:
        # a loop with one iteration would be no loop in the compiled program
        half = max(1, position_BT.size // 2)
        in_halves = partial(jax.lax.map, cos_and_sin, batch_size=half)
        cos_M1h, sin_M1h = jax.lax.platform_dependent(
            position_BT.ravel(), cpu=in_halves, default=cos_and_sin
        )
        cos_BT1h, sin_BT1h = (x.reshape(*position_BT.shape, 1, -1) for x in (cos_M1h, sin_M1h))
    return Rotation(cos_BT1h, sin_BT1h, rope.norm_epsilon)


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate heads in float32, and return them in the dtype of `x_BTNH`.

    Features past the rotated pairs are not changed. With `norm_epsilon`, the whole head is normed.
    """
    rotated_BTNH = _rotate_pairs(x_BTNH.astype(jnp.float32), rotation.cos_BT1h, rotation.sin_BT1h)
    if rotation.norm_epsilon is not None:
        mean_square = jnp.mean(rotated_BTNH * rotated_BTNH, axis=-1, keepdims=True)
        rotated_BTNH = rotated_BTNH * jax.lax.rsqrt(mean_square + rotation.norm_epsilon)
    return rotated_BTNH.astype(x_BTNH.dtype)


def _rotate_pairs(x_BTNH: jax.Array, cos_BT1h: jax.Array, sin_BT1h: jax.Array) -> jax.Array:
    h = cos_BT1h.shape[-1]
    first, second, rest = jnp.split(x_BTNH, [h, 2 * h], axis=-1)
    rotated = (first * cos_BT1h - second * sin_BT1h, second * cos_BT1h + first * sin_BT1h)
    return jnp.concatenate([*rotated, rest], axis=-1)


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position for each rotated pair, and the factor on cosines and sines."""
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
    """Scale frequencies as Llama 3.1 does.

    Source: meta-llama/llama-models, models/llama3/model.py, `apply_scaling`.
    """
    wavelength = 2 * np.pi / frequency
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # the ramp may be a step: Llama 4 publishes the same factor twice
    smooth = (scaling.original_max_position / wavelength - low) / max(high - low, 1e-6)
    # past the ends of the ramp, the clip gives the stretched or the original frequency
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn(frequency: np.ndarray, scaling: YarnScaling, theta: float, head_dim: int) -> np.ndarray:
    """Scale frequencies as YaRN does (arXiv 2309.00071, section 3.2 and equations 17 to 23)."""

    def dimension_of(rotations: float) -> float:
        # the pair that makes this number of rotations over the original context
        context = scaling.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    interpolated = np.clip(ramp, 0.0, 1.0)
    return interpolated * frequency / scaling.factor + (1 - interpolated) * frequency
