"""Bytes of a model on each device under a layout, from shapes alone.

Knows nothing of devices or graphs, so it works for meshes of any size.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping

import jax
from jax.typing import DTypeLike

from ..modelzoo import axes
from ..modelzoo.cache.state_spec import array_bytes, state_spec
from ..modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from ..modelzoo.layer_config import Attention
from ..modelzoo.weights.weight_products import Axes
from .layout import Layout


def parameter_bytes_per_device(
    layout: Layout,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    logical_axes: Mapping[str, Axes],
) -> int:
    """Bytes of all parameters on one device.

    Args:
      layout: The mesh and its rules.
      abstract: Whole shape and dtype of each parameter, by name.
      logical_axes: Logical axes of each parameter, by name.
    """

    def num_bytes(name: str) -> int:
        split = (layout.mesh.num_shards(layout.rules[axis]) for axis in logical_axes[name] if axis)
        return array_bytes(abstract[name].shape, abstract[name].dtype) // math.prod(split)

    return sum(map(num_bytes, abstract))


def cache_bytes_per_device(
    config: DecoderConfig,
    layout: Layout,
    slots: int,
    length: int,
    dtype: DTypeLike,
    arrangement: Arrangement = AS_PUBLISHED,
) -> int:
    """Bytes of the decode cache on one device.

    Args:
      config: The model.
      layout: The mesh and its rules.
      slots: Slots of all devices; they divide over the mesh axes of attention's rows.
      length: Positions of each slot.
      dtype: Dtype of entries, or of their scales if they are in codes.
      arrangement: How the cache is padded, and the dtype of codes.
    """
    rules, shards = layout.phase("decode"), layout.mesh.num_shards
    over_heads, over_rows = shards(rules[axes.KV_HEADS]), shards(rules[axes.ATTENTION_BATCH])
    stripes = shards(rules[axes.CACHE_LENGTH])

    def row_bytes(attention: Attention) -> int:
        return state_spec(attention, dtype, arrangement).row_bytes(length, over_heads, stripes)

    kinds = config.attention_kinds.items()
    return (slots // over_rows) * sum(count * row_bytes(kind) for kind, count in kinds)


def entry_bytes_per_device(
    attention: Attention, layout: Layout, dtype: DTypeLike, arrangement: Arrangement = AS_PUBLISHED
) -> float:
    """Bytes of one entry of a page, in one layer, on one device on average.

    An entry is on some of the devices if the layout splits rows or entries.
    """
    rules, shards = layout.phase("decode"), layout.mesh.num_shards
    split = (*rules[axes.ATTENTION_BATCH], *rules[axes.CACHE_LENGTH])
    over_heads = shards(rules[axes.KV_HEADS])
    return state_spec(attention, dtype, arrangement).row_bytes(1, over_heads) / shards(split)


def max_context(
    config: DecoderConfig, layout: Layout, slots: int, cache_bytes: int, dtype: DTypeLike
) -> int:
    """Largest number of positions per slot that fits into `cache_bytes` on each device.

    The result is at most `config.max_position`: with sliding windows alone there would be no bound.
    """

    def needed_bytes(length: int) -> int:
        return cache_bytes_per_device(config, layout, slots, length, dtype)

    return bisect_right(range(1, config.max_position + 1), cache_bytes, key=needed_bytes)
