"""What a graph has to do, from shapes alone: operations and bytes of its parts on one device.

Products take two operations a weight and token (Pope et al. 2022, "Efficiently Scaling Transformer
Inference", 2211.05102, section 2), attention two an entry of a head and pair of query and key, for
scores and again for values. Memory is read for weights once a call, for keys and values once a
block of queries. Work is taken to be evenly shared between the devices whose mesh axes split it;
what a device sends is as `sharding.communication` says.

Knows nothing of hardware, seconds or grids; compiles nothing.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax.numpy as jnp

from ...modelzoo import axes
from ...modelzoo.attention import first_visible
from ...modelzoo.blockwise import block_sizes
from ...modelzoo.config import DecoderConfig, Window
from ...modelzoo.kv_cache import kept_entries
from ...modelzoo.moe.config import LOSSLESS
from ...modelzoo.operations import Axes
from ...sharding import communication
from ...sharding.axis_rules import AxisRules
from ...sharding.communication import sent_bytes
from ...sharding.explain import cache_bytes_per_device, explain
from ...sharding.layer_call import LayerCall
from ...sharding.layout import Layout
from ...sharding.projection import MeshAxes
from ..bucket_grid import BucketGrid, PrefillBucket
from ..definition import Definition

FLOAT32_BYTES = 4
ONE_DEVICE = Layout.from_table({"name": "one device", "mesh": {"data": 1}, "rules": {}})
KINDS = ("prefill", "chunk", "decode")
ACTIVATION_PASSES = 16
"""Times that a layer reads or writes the residual stream in norms, rotations, sums and gates: an
estimate, as compilers fuse some of them; a calibration corrects it."""


_Key = TypeVar("_Key")
Segments = Sequence[tuple[int, int]]
"""Rows and end of each piece of a cache; each begins where the last one ends."""
Sent = Mapping[tuple[str, MeshAxes], float]
"""Bytes to other devices, by kind of collective and mesh axes."""


@dataclass(frozen=True)
class Part:
    """Work of one kind in one call, on one device."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    """Read from and written to memory."""
    sent: Sent = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """Shape of one call of a graph; of decode, of one step of it."""

    phase: str
    rows: int
    tokens: int
    """Of a row: of the prompt or chunk, and 1 in decode."""
    span: int
    """Positions that a token may see: the tokens themselves in a whole prompt."""

    is_scored: bool = False
    """Whether every token gets logits, not the last of each row alone."""
    is_chunk: bool = False
    """Whether the span is of the cache, beside the tokens of a chunk."""
    segments: Segments = ()
    """Of decode, the pieces of the cache, where not every row has all of them."""

    @classmethod
    def of_bucket(cls, bucket: PrefillBucket, *, is_scored: bool = False) -> "Call":
        """A prefill call; of chunks, one whose pieces end their span."""
        is_chunk = bucket.chunk is not None
        return cls("prefill", bucket.batch, bucket.tokens, bucket.length, is_scored, is_chunk)

    @classmethod
    def of_step(cls, slots: int, span: int) -> "Call":
        """One decode step of slots that are all alike."""
        return cls("decode", slots, 1, span)

    @classmethod
    def of_decode(cls, grid: BucketGrid, span: int) -> "Call":
        """One step of a grid's decode call."""
        segments = grid.segments(span)
        return cls("decode", grid.decode_slots, 1, span, segments=segments[1:] and segments)

    @property
    def kind(self) -> str:
        """Of `KINDS`: calls whose time has the same causes."""
        return "chunk" if self.is_chunk else self.phase

    @property
    def num_tokens(self) -> int:
        return self.rows * self.tokens

    @property
    def num_logits(self) -> int:
        """Tokens that get logits."""
        return self.num_tokens if self.is_scored else self.rows


class Work:
    """The work of one model's graphs under a layout."""

    def __init__(self, definition: Definition, dtype: str, layout: Layout | None = None):
        self.config = definition.config
        self.dtype = dtype
        self.layout = layout or ONE_DEVICE
        self._itemsize = jnp.dtype(dtype).itemsize
        heads = {axes.QUERY_HEADS: self.layout.phase("prefill")[axes.KV_HEADS]}
        self._heads_only = replace(
            self.layout, rules=AxisRules(heads), prefill={}, decode={}, name="heads alone"
        )
        """The layout as far as it splits heads of prompts."""
        shapes = {name: x.shape for name, x in definition.abstract_parameters(dtype).items()}
        logical_axes = definition.logical_axes()
        placed = explain(self.layout, shapes, logical_axes, dtype)
        self.parameter_bytes = sum(parameter.bytes_per_device for parameter in placed)
        """On each device."""
        sizes: dict[Axes, int] = {}
        for name, shape in shapes.items():
            axes_of = logical_axes[name]
            sizes[axes_of] = sizes.get(axes_of, 0) + math.prod(shape)
        self._known_exchanges: dict[LayerCall, Part] = {}
        self._weights = list(sizes.items())
        """Entries of all parameters with the same logical axes, which are split alike."""

    def parts(self, call: Call) -> tuple[Part, ...]:
        """What one call has to do."""
        found = [
            self._products(call),
            self._experts(call),
            self._attention(call),
            self._logits(call),
            self._activations(call),
            self._exchanges(call),
        ]
        return tuple(part for part in found if part is not None)

    def cache_bytes(self, slots: int, length: int) -> int:
        """Keys and values of slots that are all alike, on each device."""
        return cache_bytes_per_device(self.config, self.layout, slots, length, self.dtype)

    @property
    def entry_bytes(self) -> float:
        """Of an entry of a slot in one layer, on each device, on average."""
        slots, length = 1024, 1024
        entries = slots * length * self.config.num_layers
        return self.cache_bytes(slots, length) / entries

    def cache_bytes_of(self, segments: Segments) -> int:
        """Keys and values on each device, of a cache in pieces."""
        return sum(
            self.cache_bytes(slots, end) - self.cache_bytes(slots, start)
            for slots, start, end in _pieces(segments)
        )

    def grid_bytes(self, grid: BucketGrid) -> int:
        """Keys and values of a grid's slots on each device."""
        return self.cache_bytes_of(grid.segments(grid.max_length))

    def _products(self, call: Call) -> Part:
        """Every weight that all tokens pass through."""
        found = [
            self._product(call.num_tokens, size, axes_of, self._row_axes(call))
            for axes_of, size in self._weights
            if not {axes.EXPERTS, axes.VOCAB} & set(axes_of)
        ]
        return Part("products", sum(f for f, _ in found), sum(b for _, b in found))

    def _experts(self, call: Call) -> Part | None:
        """Weights of the experts that so many tokens choose, in lossless tiles."""
        moe = self.config.moe
        if moe is None:
            return None
        E, Z = moe.routing.num_experts, moe.routing.num_chosen
        choices = call.num_tokens * Z
        # choices spread evenly leave an expert without a token with this probability
        used = 1 - (1 - Z / E) ** call.num_tokens
        rows = choices + used * E * (LOSSLESS.tile(choices, E) - 1) / 2
        # tokens come to experts, so over the mesh axes of experts no weight is gathered for rows
        row_axes = self._row_axes(call) - self._mesh_axes((axes.EXPERTS,), self.layout.rules)
        found = [
            self._product(rows / E, size, axes_of, row_axes)
            for axes_of, size in self._weights
            if axes.EXPERTS in axes_of
        ]
        return Part("experts", sum(f for f, _ in found), used * sum(b for _, b in found))

    def _product(
        self, rows: float, size: int, axes_of: Iterable[str], row_axes: frozenset[str]
    ) -> tuple[float, float]:
        """Operations and bytes; over axes that split rows, weights are gathered first."""
        weight_axes = self._mesh_axes(axes_of, self.layout.rules)
        shards = self.layout.mesh.num_shards
        read = size / shards(weight_axes - row_axes)
        gathered = size / shards(weight_axes) if weight_axes & row_axes else 0
        return 2 * rows * size / shards(weight_axes | row_axes), (read + gathered) * self._itemsize

    def _attention(self, call: Call) -> Part:
        config, layout = self.config, self.layout
        rules = layout.phase(call.phase)
        length = axes.CACHE_LENGTH if call.phase == "decode" else axes.LENGTH
        split = (axes.ATTENTION_BATCH, axes.KV_HEADS, length)
        shards = layout.mesh.num_shards(self._mesh_axes(split, rules))
        pairs = sum(_pairs(call, window) for window in config.windows)
        flops = 2 * pairs * config.num_query_heads * _entries_of_a_pair(call, config)
        return Part("attention", flops / shards, self._kept_bytes(call))

    def _kept_bytes(self, call: Call) -> float:
        """Keys and values read, once a block of queries, and those that are written."""
        if call.phase == "decode":
            return self.cache_bytes_of(_segments(call))
        # as if one row were alone, then shared as the prompt's attention is
        rules, shards = self.layout.phase(call.phase), self.layout.mesh.num_shards
        split = (axes.ATTENTION_BATCH, axes.LENGTH)
        pieces = shards(self._mesh_axes(split, rules))
        alone = cache_bytes_per_device(self.config, self._heads_only, 1, call.span, self.dtype)
        of_span = call.rows * alone / pieces
        block, _ = block_sizes(call.tokens, call.span)
        blocks = math.ceil(call.tokens / block)
        seen = sum(_pairs(call, window) for window in self.config.windows)
        everything = call.num_tokens * call.span * self.config.num_layers
        return of_span * (blocks * seen / everything + call.tokens / call.span)

    def _logits(self, call: Call) -> Part:
        """The products with the vocabulary, and what they leave in memory."""
        config = self.config
        split = (axes.LOGIT_BATCH, axes.VOCAB)
        rules = self.layout.phase(call.phase)
        shards = self.layout.mesh.num_shards(self._mesh_axes(split, rules))
        table = config.embed * config.vocab_size
        weights = self.layout.mesh.num_shards(self.layout.rules[axes.VOCAB])
        made = call.num_logits * config.vocab_size * FLOAT32_BYTES
        num_bytes = table * self._itemsize / weights + 2 * made / shards
        return Part("logits", 2 * call.num_logits * table / shards, num_bytes)

    def _activations(self, call: Call) -> Part:
        config = self.config
        rules = self.layout.phase(call.phase)
        shards = self.layout.mesh.num_shards(self._mesh_axes(axes.RESIDUAL, rules))
        stream = call.num_tokens * config.embed * self._itemsize / shards
        return Part("activations", 0.0, ACTIVATION_PASSES * config.num_layers * stream)

    def _exchanges(self, call: Call) -> Part | None:
        """What layers send."""
        if self.layout.mesh.num_devices == 1:
            return None
        segments = (call.span,) if call.is_chunk else ()
        phase = "chunk" if call.is_chunk else call.phase
        of_layers = LayerCall(phase, call.rows, call.tokens, segments)
        # spans of decode send alike, and a search asks for many
        if of_layers not in self._known_exchanges:
            self._known_exchanges[of_layers] = Part("exchanges", sent=self._sent(of_layers))
        return self._known_exchanges[of_layers]

    def _sent(self, call: LayerCall) -> Sent:
        num_shards = self.layout.mesh.num_shards
        found = communication.expected(self.config, self.layout, call, self._itemsize)
        return summed(
            (
                (one.kind, one.mesh_axes),
                one.times * sent_bytes(one.kind, one.num_bytes, num_shards(one.mesh_axes)),
            )
            for one in found
        )

    def _row_axes(self, call: Call) -> frozenset[str]:
        split = (axes.BATCH,) if call.phase == "decode" else (axes.BATCH, axes.LENGTH)
        return self._mesh_axes(split, self.layout.phase(call.phase))

    @staticmethod
    def _mesh_axes(logical_axes: Iterable[str], rules: AxisRules) -> frozenset[str]:
        return frozenset(mesh for axis in logical_axes if axis for mesh in rules[axis])


def summed(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """Numbers of the same key together."""
    total: dict[_Key, float] = {}
    for key, number in pairs:
        total[key] = total.get(key, 0.0) + number
    return total


def sent_by_axes(tables: Iterable[Sent]) -> dict[str, float]:
    """Bytes of all kinds together, by mesh axes joined by `+`."""
    return summed(
        ("+".join(mesh_axes), num_bytes)
        for table in tables
        for (_, mesh_axes), num_bytes in table.items()
    )


def _segments(call: Call) -> Segments:
    return call.segments or [(call.rows, call.span)]


def _pieces(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """Rows, start and end of each piece of a cache."""
    start = 0
    for rows, end in segments:
        yield rows, start, end
        start = end


def _pairs(call: Call, window: Window) -> int:
    """Pairs of query and key that attention computes in one layer: whole blocks."""
    if call.phase == "decode":
        return sum(
            rows * (kept_entries(window, end) - kept_entries(window, start))
            for rows, start, end in _pieces(_segments(call))
        )
    block_T, block_S = block_sizes(call.tokens, call.span)
    first = call.span - call.tokens
    pairs = 0
    for start in range(first, call.span, block_T):
        seen_from = 0 if window is None else max(0, first_visible(start, window))
        last = min(start + block_T, call.span) - 1
        num_blocks = last // block_S - seen_from // block_S + 1
        pairs += block_T * min(num_blocks * block_S, call.span)
    return call.rows * pairs


def _entries_of_a_pair(call: Call, config: DecoderConfig) -> int:
    """Entries of a query's head, and of what it takes from values."""
    latent = config.latent
    if latent is None:
        return 2 * config.head_dim
    if call.phase == "decode":
        return latent.kept_dim + latent.rank
    return latent.head_dim + latent.value_dim
