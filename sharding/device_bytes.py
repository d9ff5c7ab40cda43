"""Bytes of a model on each device under a layout, from shapes alone.

Knows nothing of devices or graphs, so it works for meshes of any size.
"""

import math
from collections.abc import Mapping

import jax
from jax.typing import DTypeLike

from ..modelzoo import axes
from ..modelzoo.cache.state_spec import array_bytes, state_spec
from ..modelzoo.config import AS_PUBLISHED, Arrangement
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


def entry_bytes_per_device(
    attention: Attention, layout: Layout, dtype: DTypeLike, arrangement: Arrangement = AS_PUBLISHED
) -> float:
    """Bytes of one entry of the cache, in one layer, on one device on average.

    An entry is on some of the devices if the layout splits rows or entries.

    Args:
      attention: The attention of the layer.
      layout: The mesh and its rules.
      dtype: Dtype of entries, or of their scales if they are in codes.
      arrangement: How the cache is padded, and the dtype of codes.
    """
    rules, shards = layout.phase("decode"), layout.mesh.num_shards
    split = (*rules[axes.ATTENTION_BATCH], *rules[axes.CACHE_LENGTH])
    over_heads = shards(rules[axes.KV_HEADS])
    return state_spec(attention, dtype, arrangement).entry_bytes(over_heads) / shards(split)
