"""Sizes of a layer's arrays on one device, for one call under a layout, and their collectives.

Knows nothing of attention or programs: `communication` decides which arrays there are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..modelzoo import axes
from ..modelzoo.cache.state_spec import StateSpec, state_spec
from ..modelzoo.config import AS_PUBLISHED, DecoderConfig, head_copies
from ..modelzoo.layer_config import Attention
from ..modelzoo.products import LayerRecord, WeightProduct, record_layer
from .axis_rules import AxisRules
from .call import Call
from .expert_exchange import ExpertExchange
from .layout import Layout
from .projection import MeshAxes, Projection

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ExpectedCollective:
    """Collectives of one kind and size."""

    kind: str
    mesh_axes: tuple[str, ...]
    """Mesh axes, in the order of the mesh."""
    num_bytes: int
    times: int = 1


@dataclass(frozen=True)
class LayerShapes:
    """Sizes of a layer's arrays in a call."""

    config: DecoderConfig
    layout: Layout
    call: Call
    itemsize: int
    """Bytes of an element of activations, and of weights that are not in `element_bytes`."""
    layer: int = 0
    element_bytes: Mapping[str, float] = field(default_factory=dict)
    """Average bytes of an element of the weights listed here, by dotted path."""
    cache_codes: str | None = None
    """The dtype of cache entries in codes; None for entries of `itemsize`."""

    @property
    def attention(self) -> Attention:
        """The attention of the layer, which must have one."""
        attention = self.config.layers[self.layer].attention
        assert attention is not None
        return attention

    def state(self, *, is_cached: bool) -> StateSpec:
        """The memory of a cached token, or of a new one, which is not in codes."""
        arrangement = replace(AS_PUBLISHED, cache_codes=self.cache_codes if is_cached else None)
        # any dtype of this size
        return state_spec(self.attention, f"u{self.itemsize}", arrangement)

    def element_size(self, product: WeightProduct) -> float:
        """Average bytes of an element of the weight of a product of this layer."""
        return self.element_bytes.get(f"layers.{self.layer}.{product.parameter}", self.itemsize)

    @cached_property
    def record(self) -> LayerRecord:
        """Products of the layer with its weights, and the heads of its attention."""
        shards = self.layout.mesh.num_shards(self.layout.rules[axes.QUERY_HEADS])
        reads_cache = self.call.phase != "prefill"
        return record_layer(self.config, self.layer, shards, reads_cache=reads_cache)

    @cached_property
    def rules(self) -> AxisRules:
        """Rules of the call's phase."""
        return self.layout.phase(self.call.phase)

    @property
    def num_cache_heads(self) -> int:
        """Key/value heads in attention and in the cache, copies included."""
        return self.num_heads(self.rules[axes.KV_HEADS])

    def num_heads(self, mesh_axes: MeshAxes) -> int:
        """Key/value heads, with the copies that let them divide over mesh axes."""
        heads = self.attention.num_kv_heads
        return heads * head_copies(heads, self.layout.mesh.num_shards(mesh_axes))

    @property
    def exchange(self) -> ExpertExchange:
        """Token exchange of sparse layers."""
        return ExpertExchange(self.rules, self.layout.rules)

    def projection(self, product: WeightProduct) -> Projection:
        """Collectives of a product."""
        return Projection.from_rules(
            self.rules, self.layout.rules, product.equation, product.x, product.weight, product.out
        )

    def mesh_axes(self, product: WeightProduct) -> set[str]:
        """Mesh axes that divide the operations of a product among devices."""
        if axes.EXPERTS in product.weight:
            return {*self.exchange.experts, *self.exchange.projection.mesh_axes}
        return set(self.projection(product).mesh_axes)

    def local(
        self, sizes: Sequence[int], split: Sequence[MeshAxes], itemsize: float | None = None
    ) -> int:
        """Bytes on one device of an array whose dimensions are split over these mesh axes."""
        shards = math.prod(map(self.layout.mesh.num_shards, split))
        return int(math.prod(sizes) * (itemsize or self.itemsize) / shards)

    def send(
        self, kind: str, mesh_axes: MeshAxes, num_bytes: int, times: int = 1
    ) -> Iterator[ExpectedCollective]:
        """Yield a collective, or nothing if its group is a single device or `times` is 0."""
        if times and self.layout.mesh.num_shards(mesh_axes) > 1:
            in_order = tuple(axis for axis in self.layout.mesh.sizes if axis in mesh_axes)
            yield ExpectedCollective(kind, in_order, num_bytes, times)
