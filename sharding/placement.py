"""Placement of a model on a mesh: shardings and memory layouts of all arrays, and the operations.

Knows nothing of graphs or files. The loader and the lowering both use this module, so they cannot
disagree. Without a layout every array is replicated on all devices of the mesh, and the operations
are the reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ..modelzoo import axes
from ..modelzoo.config import Arrangement, DecoderConfig
from ..modelzoo.cpu.objects import code_lanes, panel_columns
from ..modelzoo.operations import ON_ONE_DEVICE, Operations
from ..modelzoo.weights.weight_products import Axes
from .axis_rules import AxisRules
from .layout import Layout
from .sharded_operations import ShardedOperations

_TABLES = ("embedding.table", "head.table")
_MAKES_HEADS = (axes.EMBED_IN, axes.QUERY_HEADS, "", "")


def arrangement_of(
    layout: Layout | None,
    platform: str,
    config: DecoderConfig,
    scan_layers: bool = False,
    cache_codes: str | None = None,
) -> Arrangement:
    """Arrangement of weights and cache for a layout, a platform and a build."""
    # XLA for TPU pads narrow heads to whole rows of tiles in any case
    whole = Arrangement(
        scan_layers=scan_layers,
        head_multiple=axes.LANES if platform == "tpu" else 1,
        # on the CPU an int4 array has a byte for each code, and executables refuse such arrays
        packs_codes=platform != "cpu",
        cache_codes=cache_codes,
    )
    if layout is None:
        return whole
    rules, num_shards = layout.rules, layout.mesh.num_shards
    heads, vocab = num_shards(rules[axes.QUERY_HEADS]), num_shards(rules[axes.VOCAB])
    padded = -(-config.vocab_size // vocab) * vocab
    return replace(
        whole,
        head_shards=heads,
        padded_vocab=None if padded == config.vocab_size else padded,
    )


@dataclass(frozen=True)
class Placement:
    """A layout on the devices of a target, or these devices without a layout."""

    mesh: Mesh
    platform: str
    layout: Layout | None = None

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of arrays that come from the host or go there: replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def sharding(self, phase: str, logical_axes: Axes) -> NamedSharding:
        """Sharding of an array in a phase's graphs."""
        return NamedSharding(self.mesh, self._rules(phase).spec(logical_axes))

    def parameters(self, logical_axes: Mapping[str, Axes]) -> dict[str, Sharding]:
        """Sharding of each stored parameter."""
        stored = AxisRules({}) if self.layout is None else self.layout.rules
        return {
            name: NamedSharding(self.mesh, stored.spec(names))
            for name, names in logical_axes.items()
        }

    def format(
        self, parameter: str, logical_axes: Axes, shape: tuple[int, ...], sharding: Sharding
    ) -> Sharding | Format:
        """Sharding and memory layout of a parameter.

        XLA for TPU would transpose some parameters in every call, and keep the copies of all layers
        at the same time. So these parameters are stored in the order in which its products read
        them.
        """
        order = None
        if self.platform == "tpu":
            order = _memory_order(parameter, logical_axes, shape)
        return sharding if order is None else Format(MemoryLayout(major_to_minor=order), sharding)

    def state(self, logical_axes: Axes) -> Sharding | Format:
        """Sharding and memory layout of an array of the decode state.

        On TPU, the features of a head are the last axis of the memory layout, so that one native
        scatter writes an entry in place.
        """
        sharding = self.sharding("decode", logical_axes)
        if self.platform != "tpu" or logical_axes not in axes.CACHE_ENTRIES:
            return sharding
        order = tuple(range(len(logical_axes)))
        return Format(MemoryLayout(major_to_minor=order), sharding)

    def put_in_layout(
        self, parameters: Mapping[str, jax.Array], logical_axes: Mapping[str, Axes]
    ) -> dict[str, jax.Array]:
        """Put loaded parameters into the memory layout of the graphs; a no-op except on TPU."""
        return {
            name: jax.device_put(x, self.format(name, logical_axes[name], x.shape, x.sharding))
            for name, x in parameters.items()
        }

    def arrangement(
        self, config: DecoderConfig, scan_layers: bool = False, cache_codes: str | None = None
    ) -> Arrangement:
        """Arrangement of weights, layers and cache for this layout and the options of a build."""
        arranged = arrangement_of(self.layout, self.platform, config, scan_layers, cache_codes)
        if self.platform != "cpu" or self.layout is not None or self.mesh.size > 1:
            return arranged
        return replace(arranged, panel_columns=panel_columns(), code_lanes=code_lanes())

    @property
    def cache_head_shards(self) -> int:
        """Number of shards of the key/value heads of the decode cache."""
        return self._shards(self._rules("decode")[axes.KV_HEADS])

    @property
    def cache_stripes(self) -> int:
        """Number of stripes in which the entries of the decode cache are distributed."""
        return self._shards(self._rules("decode")[axes.CACHE_LENGTH])

    def has_whole(self, phase: str, logical_axis: str) -> bool:
        """Whether each device has all of an axis, in per-device (`shard_map`) code.

        Without a layout and with several devices, the partitioner decides, so the answer is False.
        """
        if self.layout is None:
            return self.mesh.size == 1
        return not self._rules(phase)[logical_axis]

    def operations(self, phase: str) -> Operations:
        """Operations of a phase's graphs."""
        if self.layout is None:
            return ON_ONE_DEVICE
        return ShardedOperations(self.mesh, self.layout.phase(phase), self.layout.rules)

    def _rules(self, phase: str) -> AxisRules:
        return AxisRules({}) if self.layout is None else self.layout.phase(phase)

    def _shards(self, mesh_axes: tuple[str, ...]) -> int:
        return 1 if self.layout is None else self.layout.mesh.num_shards(mesh_axes)


def _memory_order(
    parameter: str, logical_axes: Axes, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Axes of a parameter from major to minor, or None for the default order.

    A `[V, D]` table is stored row by row. The default order is transposed if D is not a multiple of
    128, and then every call would copy the table to gather rows. XLA reads a `[D, K, J, H]` weight
    with heads that fill tiles as matrices of D and H.
    """
    if parameter in _TABLES:
        return (0, 1)
    if logical_axes[-4:] == _MAKES_HEADS and not shape[-1] % axes.LANES:
        *layers, embed, kv_heads, head_groups, head = range(len(shape))
        return (*layers, kv_heads, head_groups, embed, head)
    return None
