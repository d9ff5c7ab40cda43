"""What a layout means for one model, from shapes alone: bytes on each device, and what is repeated.

Knows nothing of devices or graphs, so it answers for meshes of any size.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ..modelzoo import axes
from ..modelzoo.config import DecoderConfig
from ..modelzoo.kv_cache import kept_entries
from ..modelzoo.operations import Axes
from .axis_rules import kv_copies
from .layout import Layout


@dataclass(frozen=True)
class PlacedParameter:
    """One parameter as a layout places it."""

    name: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    bytes_per_device: int
    replicated_share: float
    """Of the copies that the devices hold together: 0 where every element is held once."""

    def __str__(self) -> str:
        """One line; a dimension split over mesh axes reads `1536/tensor`."""
        split = [*self.spec, *[None] * (len(self.shape) - len(self.spec))]
        shape = " ".join(_dimension(*both) for both in zip(self.shape, split, strict=True))
        return (
            f"{self.name:40} {shape:>36} {self.bytes_per_device:>16,} B "
            f"{self.replicated_share:4.0%} replicated"
        )


def _dimension(size: int, mesh_axes: str | tuple[str, ...] | None) -> str:
    if not mesh_axes:
        return str(size)
    names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
    return f"{size}/{'+'.join(names)}"


def explain(
    layout: Layout,
    shapes: dict[str, tuple[int, ...]],
    logical_axes: dict[str, Axes],
    dtype: DTypeLike,
) -> list[PlacedParameter]:
    """Every parameter with its partition, bytes per device and replicated share."""
    placed = []
    for name, shape in shapes.items():
        spec = layout.rules.spec(logical_axes[name])
        mesh_axes = [axis for axis in logical_axes[name] if axis]
        shards = math.prod(layout.mesh.num_shards(layout.rules[axis]) for axis in mesh_axes)
        num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize // shards
        share = 1 - shards / layout.mesh.num_devices
        placed.append(PlacedParameter(name, shape, spec, num_bytes, share))
    return placed


def cache_bytes_per_device(
    config: DecoderConfig, layout: Layout, slots: int, length: int, dtype: DTypeLike
) -> int:
    """Keys and values of the decode cache on one device; `slots` divide over attention's rows."""
    rules, shards = layout.phase("decode"), layout.mesh.num_shards
    over_heads, over_rows = shards(rules[axes.KV_HEADS]), shards(rules[axes.ATTENTION_BATCH])
    heads = config.num_kv_heads * kv_copies(config.num_kv_heads, over_heads) // over_heads
    stripes = shards(rules[axes.CACHE_LENGTH])
    entries = sum(kept_entries(window, length, stripes) for window in config.windows)
    # latents are keys and values in one, of one head, on every device that has the row
    of_entry = config.kept_dim * (2 * heads if config.latent is None else 1)
    return (slots // over_rows) * -(-entries // stripes) * of_entry * jnp.dtype(dtype).itemsize


def max_context(
    config: DecoderConfig, layout: Layout, slots: int, cache_bytes: int, dtype: DTypeLike
) -> int:
    """Positions of every slot that fit into so many bytes of cache on each device.

    At most as many as the model was published for: windows alone would leave it without a bound.
    """

    def needed(length: int) -> int:
        return cache_bytes_per_device(config, layout, slots, length, dtype)

    return bisect_right(range(1, config.max_position + 1), cache_bytes, key=needed)
