"""A layer in a call under a layout: what its arrays take on one device, and what is sent of them.

Knows nothing of attention or programs: `communication` says which arrays there are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..modelzoo import axes
from ..modelzoo.config import DecoderConfig
from ..modelzoo.products import LayerRecord, WeightProduct, record_layer
from .axis_rules import AxisRules, kv_copies
from .call import Call
from .expert_exchange import ExpertExchange
from .layout import Layout
from .projection import MeshAxes, Projection

FLOAT32_BYTES = INT32_BYTES = 4


@dataclass(frozen=True)
class Expected:
    """Collectives of one kind and size."""

    kind: str
    mesh_axes: tuple[str, ...]
    """In the order of the mesh."""
    num_bytes: int
    times: int = 1


@dataclass(frozen=True)
class LayerShapes:
    """Sizes of a layer's arrays in a call."""

    config: DecoderConfig
    layout: Layout
    call: Call
    itemsize: int
    """Of weights and activations."""
    layer: int = 0

    @cached_property
    def record(self) -> LayerRecord:
        """What the layer does."""
        copies = self._copies(self.layout.rules[axes.QUERY_HEADS])
        reads_cache = self.call.phase != "prefill"
        return record_layer(self.config, self.layer, copies, reads_cache=reads_cache)

    @cached_property
    def rules(self) -> AxisRules:
        """Those of the phase."""
        return self.layout.phase(self.call.phase)

    @property
    def kept_heads(self) -> int:
        """Key/value heads in attention and of the cache, copies included."""
        return self.config.num_kv_heads * self._copies(self.rules[axes.KV_HEADS])

    @property
    def exchange(self) -> ExpertExchange:
        """What sparse layers send."""
        return ExpertExchange(self.rules, self.layout.rules)

    def projection(self, product: WeightProduct) -> Projection:
        """The collectives of a product."""
        of_product = product.equation, product.x, product.weight, product.out
        return Projection.under(self.rules, self.layout.rules, *of_product)

    def mesh_axes(self, product: WeightProduct) -> set[str]:
        """All that share the operations of a product out."""
        if axes.EXPERTS in product.weight:
            return {*self.exchange.experts, *self.exchange.projection.mesh_axes}
        return set(self.projection(product).mesh_axes)

    def local(
        self, sizes: Sequence[int], split: Sequence[MeshAxes], itemsize: int | None = None
    ) -> int:
        """Bytes on one device of an array whose dimensions are split over these mesh axes."""
        shards = math.prod(map(self.layout.mesh.num_shards, split))
        return math.prod(sizes) * (itemsize or self.itemsize) // shards

    def send(
        self, kind: str, mesh_axes: MeshAxes, num_bytes: int, times: int = 1
    ) -> Iterator[Expected]:
        """A collective, unless a device would be alone in it."""
        if times and self.layout.mesh.num_shards(mesh_axes) > 1:
            in_order = tuple(axis for axis in self.layout.mesh.sizes if axis in mesh_axes)
            yield Expected(kind, in_order, num_bytes, times)

    def _copies(self, mesh_axes: MeshAxes) -> int:
        return kv_copies(self.config.num_kv_heads, self.layout.mesh.num_shards(mesh_axes))
