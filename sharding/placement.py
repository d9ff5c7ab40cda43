"""Where everything of one model lies on a mesh: parameters, cache, host inputs, and the operations.

Knows nothing of graphs or files. Loader and lowering ask here, so they cannot disagree. Without a
layout everything lies whole on every device of the mesh, and the operations are the reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from ..modelzoo import axes
from ..modelzoo.config import Arrangement, DecoderConfig
from ..modelzoo.key_blocks import CPU_BLOCKS
from ..modelzoo.operations import ON_ONE_DEVICE, Axes, Operations
from ..modelzoo.segments import heads_last
from .axis_rules import AxisRules, kv_copies
from .layout import Layout
from .sharded_operations import ShardedOperations

_TABLES = ("embedding.table", "head.table")
_MAKES_HEADS = (axes.EMBED_IN, axes.QUERY_HEADS, "", "")
_CACHES = (axes.CACHE_KEYS, axes.CACHE_VALUES, axes.CACHE_LATENTS)


def arrangement_of(
    layout: Layout | None, platform: str, config: DecoderConfig, scan_layers: bool = False
) -> Arrangement:
    """How a layout, a platform and a build want weights and cache arranged."""
    # XLA for TPU gives narrow heads whole rows of tiles in any case
    whole = Arrangement(
        scan_layers=scan_layers,
        head_multiple=axes.LANES if platform == "tpu" else 1,
        key_blocks=CPU_BLOCKS if platform == "cpu" else (),
    )
    if layout is None:
        return whole
    rules, num_shards = layout.rules, layout.mesh.num_shards
    if num_shards(layout.phase("decode")[axes.CACHE_LENGTH]) > 1:
        whole = replace(whole, key_blocks=())
    heads, vocab = num_shards(rules[axes.QUERY_HEADS]), num_shards(rules[axes.VOCAB])
    padded = -(-config.vocab_size // vocab) * vocab
    return replace(
        whole,
        kv_copies=kv_copies(config.num_kv_heads, heads),
        padded_vocab=None if padded == config.vocab_size else padded,
    )


def cache_dtype(platform: str, dtype: DTypeLike) -> jnp.dtype:
    """The dtype of cache entries under weights of `dtype`.

    On the CPU it is float32: XLA for CPU writes an entry into a bfloat16 array by converting all of
    the array to float32 and back.
    """
    return jnp.dtype(jnp.float32 if platform == "cpu" else dtype)


@dataclass(frozen=True)
class Placement:
    """A layout on the devices of a target, or no layout."""

    mesh: Mesh
    platform: str
    layout: Layout | None = None

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device: what comes from the host and goes there."""
        return NamedSharding(self.mesh, PartitionSpec())

    def sharding(self, phase: str, logical_axes: Axes) -> NamedSharding:
        """Where an array of a phase's graphs lies."""
        return NamedSharding(self.mesh, self._rules(phase).spec(logical_axes))

    def parameters(self, logical_axes: Mapping[str, Axes]) -> dict[str, Sharding]:
        """Where each parameter lies."""
        stored = AxisRules({}) if self.layout is None else self.layout.rules
        return {
            name: NamedSharding(self.mesh, stored.spec(names))
            for name, names in logical_axes.items()
        }

    def format(
        self, parameter: str, logical_axes: Axes, shape: tuple[int, ...], sharding: Sharding
    ) -> Sharding | Format:
        """The place and the memory layout of a parameter.

        XLA for TPU would lay some out anew in every call, and keep copies of all layers' meanwhile,
        so they are asked for as its products read them.
        """
        order = None
        if self.platform == "tpu":
            order = _memory_order(parameter, logical_axes, shape)
        return sharding if order is None else Format(MemoryLayout(major_to_minor=order), sharding)

    def state(self, logical_axes: Axes) -> Sharding | Format:
        """The place and memory layout of an array of the decode state.

        On TPU a cache has the heads of an entry along the last axis: an entry is then written in
        place by one native scatter.
        """
        sharding = self.sharding("decode", logical_axes)
        if self.platform != "tpu" or logical_axes not in _CACHES:
            return sharding
        order = heads_last(len(logical_axes), logical_axes.index(axes.CACHE_LENGTH))
        return Format(MemoryLayout(major_to_minor=order), sharding)

    def place(
        self, parameters: Mapping[str, jax.Array], logical_axes: Mapping[str, Axes]
    ) -> dict[str, jax.Array]:
        """Bring loaded parameters into the memory layout that graphs expect; off TPU a no-op."""
        return {
            name: jax.device_put(x, self.format(name, logical_axes[name], x.shape, x.sharding))
            for name, x in parameters.items()
        }

    def arrangement(self, config: DecoderConfig, scan_layers: bool = False) -> Arrangement:
        """How this layout wants the weights of a model arranged, and a build its layers."""
        return arrangement_of(self.layout, self.platform, config, scan_layers)

    def cache_dtype(self, dtype: DTypeLike) -> jnp.dtype:
        """The dtype of cache entries under weights of `dtype`; see `cache_dtype`."""
        return cache_dtype(self.platform, dtype)

    def num_cache_heads(self, config: DecoderConfig) -> int:
        """Key/value heads that the decode cache keeps, copies included."""
        shards = self._shards(self._rules("decode")[axes.KV_HEADS])
        return config.num_kv_heads * kv_copies(config.num_kv_heads, shards)

    @property
    def cache_stripes(self) -> int:
        """Pieces that the entries of the decode cache are dealt into."""
        return self._shards(self._rules("decode")[axes.CACHE_LENGTH])

    def has_whole(self, phase: str, logical_axis: str) -> bool:
        """Whether each device has all of an axis, in code of its own.

        Without a layout a partitioner decides what each of several devices does.
        """
        if self.layout is None:
            return self.mesh.size == 1
        return not self._rules(phase)[logical_axis]

    def operations(self, phase: str, config: DecoderConfig) -> Operations:
        """The operations of a phase's graphs."""
        if self.layout is None:
            return ON_ONE_DEVICE
        layout = self.layout
        return ShardedOperations(
            self.mesh,
            layout.phase(phase),
            layout.rules,
            config.num_kv_heads,
        )

    def _rules(self, phase: str) -> AxisRules:
        return AxisRules({}) if self.layout is None else self.layout.phase(phase)

    def _shards(self, mesh_axes: tuple[str, ...]) -> int:
        return 1 if self.layout is None else self.layout.mesh.num_shards(mesh_axes)


def _memory_order(
    parameter: str, logical_axes: Axes, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The axes of a parameter from major to minor, where its default is not wanted.

    A `[V, D]` table lies row by row: by default it is transposed when D is not a multiple of 128,
    and every call would copy it to gather rows. Of `[D, K, J, H]`, which makes heads that fill
    tiles, XLA reads matrices of D and H.
    """
    if parameter in _TABLES:
        return (0, 1)
    if logical_axes[-4:] == _MAKES_HEADS and not shape[-1] % axes.LANES:
        *layers, embed, kv_heads, of_head, head = range(len(shape))
        return (*layers, kv_heads, of_head, embed, head)
    return None
