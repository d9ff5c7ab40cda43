"""Bytes of a model on each device under a layout, from shapes alone.

Knows nothing of devices or graphs, so it answers for meshes of any size.
"""

import math
from bisect import bisect_right

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..modelzoo import axes
from ..modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from ..modelzoo.kv_cache import num_cache_entries
from ..modelzoo.operations import Axes
from .axis_rules import kv_copies
from .layout import Layout


def parameter_bytes_per_device(
    layout: Layout,
    shapes: dict[str, tuple[int, ...]],
    logical_axes: dict[str, Axes],
    dtype: DTypeLike,
) -> int:
    """All parameters on one device."""

    def num_elements(name: str) -> int:
        split = (layout.mesh.num_shards(layout.rules[axis]) for axis in logical_axes[name] if axis)
        return math.prod(shapes[name]) // math.prod(split)

    return sum(map(num_elements, shapes)) * jnp.dtype(dtype).itemsize


def cache_bytes_per_device(
    config: DecoderConfig,
    layout: Layout,
    slots: int,
    length: int,
    dtype: DTypeLike,
    arrangement: Arrangement = AS_PUBLISHED,
) -> int:
    """Keys and values of the decode cache on one device; `slots` divide over attention's rows."""
    rules, shards = layout.phase("decode"), layout.mesh.num_shards
    over_heads, over_rows = shards(rules[axes.KV_HEADS]), shards(rules[axes.ATTENTION_BATCH])
    heads = config.num_kv_heads * kv_copies(config.num_kv_heads, over_heads) // over_heads
    stripes = shards(rules[axes.CACHE_LENGTH])
    entries = sum(num_cache_entries(window, length, stripes) for window in config.windows)
    # latents are keys and values in one, of one head, on every device that has the row
    of_entry = arrangement.cache_dim(config) * (2 * heads if config.latent is None else 1)
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
