"""One call of a layer under a layout: what its arrays take on one device, and what is sent of them.

Knows nothing of products, attention or programs: `communication` says which arrays there are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..modelzoo import axes
from ..modelzoo.config import DecoderConfig
from .axis_rules import AxisRules, kv_copies
from .layout import Layout
from .projection import MeshAxes

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
class LayerCall:
    """Shape of a call, the same for all layers."""

    phase: str
    """`prefill`, `decode` or `chunk`."""
    rows: int
    tokens: int
    """Of a row: its length in prefill, 1 in decode."""
    segments: tuple[int, ...] = ()
    """Entries of the cache that a chunk reads, by segment."""


@dataclass(frozen=True)
class LayerShapes:
    """Sizes of a layer's arrays in a call."""

    config: DecoderConfig
    layout: Layout
    call: LayerCall
    itemsize: int
    """Of weights and activations."""

    @cached_property
    def rules(self) -> AxisRules:
        """Those of the phase."""
        return self.layout.phase(self.call.phase)

    @property
    def stored_heads(self) -> int:
        """Key/value heads of the projections, copies included."""
        return self._with_copies(self.layout.rules[axes.QUERY_HEADS])

    @property
    def kept_heads(self) -> int:
        """Key/value heads in attention and of the cache, copies included."""
        return self._with_copies(self.rules[axes.KV_HEADS])

    @property
    def head_dims(self) -> tuple[int, int]:
        """Entries of a head of queries and keys, and of values, as attention has them."""
        config = self.config
        if config.latent is None:
            return config.head_dim, config.head_dim
        if self.call.phase == "prefill":
            return config.head_dim, config.latent.value_dim
        return config.kept_dim, config.kept_dim

    @cached_property
    def sizes(self) -> dict[str, int]:
        """By dimension letter (`modelzoo.axes`), over all devices."""
        config, heads = self.config, self.stored_heads
        G = config.num_query_heads // heads if config.latent is None else 1
        return {
            "B": self.call.rows,
            "T": self.call.tokens,
            "D": config.embed,
            "F": config.mlp,
            "P": 2,
            "N": config.num_query_heads,
            "K": heads,
            "G": G,
            "J": G + 2,
            "H": config.head_dim,
        }

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

    def _with_copies(self, mesh_axes: MeshAxes) -> int:
        heads = self.config.num_kv_heads
        return heads * kv_copies(heads, self.layout.mesh.num_shards(mesh_axes))
