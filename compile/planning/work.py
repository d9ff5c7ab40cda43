"""The work of a graph, from shapes alone: operations and bytes of its parts on one device.

Products take two operations for each weight and token (Pope et al. 2022, "Efficiently Scaling
Transformer Inference", 2211.05102, section 2). Attention takes two operations for each element of a
head and each pair of query and key, for scores and again for values. Weights are read once in a
call, keys and values once for each block of queries, or in chunks for each piece. The work is
divided evenly among the devices whose mesh axes split it. Communication comes from
`sharding.communication`.

Knows nothing of hardware, seconds or grids; compiles nothing.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from ...modelzoo import axes
from ...modelzoo.attention.blockwise import block_sizes
from ...modelzoo.layer_config import Attention, window_size
from ...modelzoo.layer_groups import block_layers
from ...modelzoo.moe_config import LOSSLESS
from ...modelzoo.products import WeightProduct, record_logits
from ...sharding import communication
from ...sharding.axis_rules import AxisRules
from ...sharding.call import Call
from ...sharding.communication import sent_bytes
from ...sharding.device_bytes import entry_bytes_per_device, parameter_bytes_per_device
from ...sharding.layer_shapes import LayerShapes
from ...sharding.layout import Layout
from ...sharding.projection import MeshAxes
from ..abstract_model import AbstractModel
from ..grids.bucket_grid import BucketGrid
from .attention_pairs import num_pairs, read_entries

FLOAT32_BYTES = 4
ONE_DEVICE = Layout.from_table({"name": "one device", "mesh": {"data": 1}, "rules": {}})
WORKING_EMBEDDINGS, WORKING_HIDDEN, WORKING_LAYERS = 6, 2, 2
"""Estimated number of arrays that a call holds at one time: of the size of the tokens' embeddings,
and of the widest arrays within a layer; and the number of layers whose gathered weights it holds.
Of ten prefill programs of Llama 3.1 8B and 70B compiled for v5e, the estimate is 0.92 to 1.54
times the temporaries, and 2.3 times with tokens split between projections (`sequence-parallel`)."""
ACTIVATION_PASSES = 16
"""Estimated number of times that a layer reads or writes the residual stream, in norms, rotations,
sums and gates. Compilers fuse some of them; a calibration corrects the estimate."""


_Key = TypeVar("_Key")
Sent = Mapping[tuple[str, MeshAxes], float]
"""Bytes sent to other devices, by kind of collective and mesh axes."""


@dataclass(frozen=True)
class Part:
    """Work of one kind in one call, on one device."""

    name: str
    flops: float = 0.0
    int8_flops: float = 0.0
    """The operations among them that are in products of int8."""
    bytes: float = 0.0
    """Bytes read from and written to main memory."""
    weight_bytes: float = 0.0
    """The bytes of the weights of products among them."""
    rows: float = 1.0
    """Rows of activations in its products."""
    elements: float = 0.0
    """Scores or logits that it computes."""
    sent: Sent = field(default_factory=dict)


class _WeightsWork(NamedTuple):
    """Work of products with weights: operations for one row of activations, and bytes."""

    flops: float
    int8_flops: float
    bytes: float

    def part(self, name: str, num_rows: int, num_shards: int) -> Part:
        """The work of some rows, split into shards, for which the weights are read once."""
        flops, int8_flops = num_rows * self.flops, num_rows * self.int8_flops
        return Part(name, flops, int8_flops, self.bytes, self.bytes, num_rows / num_shards)


@dataclass(frozen=True)
class NeededBytes:
    """Minimum bytes that one call moves on one device, however it is computed."""

    weights: float
    """Every weight of a product, read once; without embedding tables in which rows are looked up.
    """
    experts: float
    """The experts that the tokens choose if routing is uniform."""
    cache: float
    """The entries of the pages that rows read; for whole prompts, the entries that they write."""
    logits: float
    """Logits, written once and read once."""

    @property
    def total(self) -> float:
        return self.weights + self.experts + self.cache + self.logits


class Work:
    """The work of one model's graphs under a layout."""

    def __init__(
        self,
        model: AbstractModel,
        dtype: str,
        layout: Layout | None = None,
        cache_dtype: DTypeLike | None = None,
    ):
        """Create the work under a layout, or on one device.

        The cache has the weights' dtype by default.
        """
        self.model, self.config = model, model.config
        self.dtype = dtype
        self.cache_dtype = jnp.dtype(cache_dtype or dtype)
        self.layout = layout or ONE_DEVICE
        self._itemsize = jnp.dtype(dtype).itemsize
        heads = {axes.QUERY_HEADS: self.layout.phase("prefill")[axes.KV_HEADS]}
        self._heads_only = replace(
            self.layout, rules=AxisRules(heads), prefill={}, decode={}, name="heads alone"
        )
        """The layout, reduced to its split of the heads of prompts."""
        self.parameter_bytes = parameter_bytes_per_device(
            self.layout, model.abstract_parameters(dtype), model.logical_axes()
        )
        """Bytes of the parameters on each device."""
        self._weight_bytes = model.element_bytes(dtype)
        self._integer_products = model.integer_products()
        self._known_exchanges: dict[tuple[str, int, int, int], Part] = {}
        self._known_weights: dict[tuple[str, bool], _WeightsWork] = {}

    @property
    def num_program_layers(self) -> int:
        """Number of layers that a program defines; in a loop, the layers of one iteration."""
        return len(block_layers(self.config, self.model.arrangement))

    def parts(self, call: Call) -> tuple[Part, ...]:
        """The parts of one call."""
        weights = self._weights_work(call, of_experts=False)
        parts = [
            weights.part("products", call.num_tokens, self._row_shards(call)),
            self._experts(call),
            self._attention(call),
            self._logits(call) if call.num_logits else None,
            self._activations(call),
            self._exchanges(call),
        ]
        return tuple(part for part in parts if part is not None)

    def needed(self, call: Call) -> NeededBytes:
        """Minimum bytes that one call moves."""
        experts = self._experts(call)
        head_bytes = self._head_work(call).bytes
        return NeededBytes(
            weights=self._weights_work(call, of_experts=False).bytes + head_bytes,
            experts=0.0 if experts is None else experts.bytes,
            cache=self._entry_bytes(call),
            logits=self._logits_bytes(call),
        )

    @property
    def entry_bytes(self) -> float:
        """Average bytes of a cache entry in one layer, on each device."""
        return self._of_all_layers(self._page_entry_bytes) / self.config.num_layers

    def working_bytes(self, call: Call) -> float:
        """Estimated bytes that a prefill call needs beside weights and cache, on each device."""
        kinds = self.config.layers
        shapes = (self._shapes(call, kinds.index(kind)) for kind in dict.fromkeys(kinds))
        in_layer = max(map(self._working_elements, shapes))
        embeddings = call.num_tokens / self._row_shards(call) * self.config.embed
        return (WORKING_EMBEDDINGS * embeddings + in_layer) * self._itemsize

    def _working_elements(self, shapes: LayerShapes) -> float:
        """Elements of the widest arrays and of gathered weights that a layer holds."""
        hidden = gathered = 0.0
        moe, record = self.config.moe, shapes.record
        for product in (*record.products, *record.expert_products):
            used, stored = self._shards_of(shapes, product)
            is_expert = axes.EXPERTS in product.weight
            if stored > used and not is_expert:
                gathered += product.num_weights / used
            if axes.EMBED not in product.out:
                size = math.prod(product.sizes[label] for label in product.labels.out)
                if is_expert and moe is not None:
                    size *= moe.routing.num_chosen
                split = chain(*shapes.rules.dimensions(product.out))
                hidden = max(hidden, size / self.layout.mesh.num_shards(split))
        return WORKING_HIDDEN * shapes.call.num_tokens * hidden + WORKING_LAYERS * gathered

    def grid_bytes(self, grid: BucketGrid) -> int:
        """Bytes of the cache of a grid on each device."""
        if grid.pages is None or grid.page is None:
            return 0
        of_pool, of_slot = self.bytes_of_pages(grid.page, grid.window_pages)
        return math.ceil(grid.pages * of_pool + grid.decode_slots * of_slot)

    def page_bytes(self, entries: int) -> int:
        """Bytes of so many entries of pages on each device: every layer has them, also those with
        windows."""
        return math.ceil(entries * self._of_all_layers(self._page_entry_bytes))

    def bytes_of_pages(
        self, page: int, of_window: Callable[[int], int | None]
    ) -> tuple[float, float]:
        """Bytes of a page of the pool, and of the pages that a slot has of its own, on each device.

        Args:
          page: The entries of a page.
          of_window: See `PageCounts`.
        """
        of_pool = of_slot = 0.0
        for kind, count in self.config.attention_kinds.items():
            num_bytes = count * page * self._page_entry_bytes(kind)
            own = None if kind.window is None else of_window(window_size(kind.window))
            if own is None:
                of_pool += num_bytes
            else:
                of_slot += own * num_bytes
        return of_pool, of_slot

    def num_pages(self, max_bytes: float, page: int) -> float:
        """The number of pages, not rounded, that take at most so many bytes on each device."""
        return max(0.0, max_bytes / self.page_bytes(page))

    def _of_all_layers(self, of_layer: Callable[[Attention], float]) -> float:
        """The sum over all layers with attention."""
        return sum(count * of_layer(kind) for kind, count in self.config.attention_kinds.items())

    def _page_entry_bytes(self, attention: Attention) -> float:
        """Bytes of an entry of a page in one layer, on each device."""
        arrangement = self.model.arrangement
        return entry_bytes_per_device(attention, self.layout, self.cache_dtype, arrangement)

    def _row_shards(self, call: Call) -> int:
        """Number of shards into which the rows of products are split."""
        split = (axes.BATCH,) if call.phase == "decode" else (axes.BATCH, axes.LENGTH)
        return self._num_shards(split, self.layout.phase(call.phase))

    def _experts(self, call: Call) -> Part | None:
        """Products with the experts that the tokens choose, in lossless tiles."""
        moe = self.config.moe
        if moe is None:
            return None
        E, Z = moe.routing.num_experts, moe.routing.num_chosen
        choices = call.num_tokens * Z
        # the share of experts with a token, if choices are uniform
        used = 1 - (1 - Z / E) ** call.num_tokens
        rows = choices + used * E * (LOSSLESS.tile(choices, E) - 1) / 2
        work = self._weights_work(call, of_experts=True)
        num_bytes = used * work.bytes
        return Part(
            "experts",
            rows / E * work.flops,
            bytes=num_bytes,
            weight_bytes=num_bytes,
            rows=rows / (used * E),
        )

    def _weights_work(self, call: Call, *, of_experts: bool) -> "_WeightsWork":
        """Work of the products of all layers with their weights."""
        phase = call.phase
        if (phase, of_experts) not in self._known_weights:
            flops = int8_flops = num_bytes = 0.0
            kinds = self.config.layers
            for kind in dict.fromkeys(kinds):
                shapes = self._shapes(call, kinds.index(kind))
                layers = [layer for layer, other in enumerate(kinds) if other == kind]
                record = shapes.record
                for product in record.expert_products if of_experts else record.products:
                    row_flops, num_weights = self._product_work(shapes, product)
                    names = [f"layers.{layer}.{product.parameter}" for layer in layers]
                    num_integer = len(self._integer_products.intersection(names))
                    flops += len(layers) * row_flops
                    int8_flops += num_integer * row_flops
                    num_bytes += num_weights * sum(map(self._weight_bytes.__getitem__, names))
            work = _WeightsWork(flops, int8_flops, num_bytes)
            self._known_weights[phase, of_experts] = work
        return self._known_weights[phase, of_experts]

    def _product_work(self, shapes: LayerShapes, product: WeightProduct) -> tuple[float, float]:
        """Operations of one row, and elements of the weight that are read.

        The weight may have to be gathered first.
        """
        num_shards, size = self.layout.mesh.num_shards, product.num_weights
        used, stored = self._shards_of(shapes, product)
        read = size / used + (size / stored if stored > used else 0)
        return 2 * size / num_shards(shapes.mesh_axes(product)), read

    def _shards_of(self, shapes: LayerShapes, product: WeightProduct) -> tuple[int, int]:
        """The shards of a weight in a product, and as it is stored."""
        used, stored = (
            self.layout.mesh.num_shards(chain(*rules.dimensions(product.weight)))
            for rules in (shapes.rules, self.layout.rules)
        )
        return used, stored

    def _shapes(self, call: Call, layer: int = 0) -> LayerShapes:
        return LayerShapes(self.config, self.layout, call, self._itemsize, layer)

    def _attention(self, call: Call) -> Part:
        config, layout = self.config, self.layout
        # the devices that have the entries of a row attend to them
        by_cache = call.entries is not None
        rules = layout.phase("decode" if by_cache else call.phase)
        length = axes.CACHE_LENGTH if by_cache else axes.LENGTH
        shards = self._num_shards((axes.ATTENTION_BATCH, axes.KV_HEADS, length), rules)
        scores = flops = 0.0
        for kind, count in config.attention_kinds.items():
            layer = next(i for i, x in enumerate(config.layers) if x.attention == kind)
            pairs = count * num_pairs(call, kind.window)
            of_kind = pairs * kind.num_query_heads / shards
            scores += of_kind
            flops += 2 * of_kind * sum(self._shapes(call, layer).record.head_dims)
        return Part("attention", flops, bytes=self._kept_bytes(call), elements=scores)

    def _kept_bytes(self, call: Call) -> float:
        """Bytes of keys and values that are written, or read for each block of queries."""
        entry_bytes = self._entry_bytes(call)
        if call.phase == "decode":
            return entry_bytes
        if call.entries is not None:
            # all pieces are written, then each reads its row's pages
            return self.page_bytes(call.num_tokens) + entry_bytes
        block, _ = block_sizes(call.tokens, call.span)
        blocks = math.ceil(call.tokens / block)
        seen = self._of_all_layers(lambda kind: num_pairs(call, kind.window))
        everything = call.num_tokens * call.span * len(self.config.attentions)
        return entry_bytes * (blocks * seen / everything + call.tokens / call.span)

    def _entry_bytes(self, call: Call) -> float:
        """Bytes of the keys and values that rows read, or of all tokens of whole prompts."""
        if call.entries is not None:
            return self._of_all_layers(
                lambda kind: read_entries(call, kind.window) * self._page_entry_bytes(kind)
            )
        # as on a device with a part of the heads, divided as the prompt's attention is
        rules = self.layout.phase(call.phase)
        pieces = self._num_shards((axes.ATTENTION_BATCH, axes.LENGTH), rules)
        options = self._heads_only, self.cache_dtype, self.model.arrangement
        of_token = self._of_all_layers(lambda kind: entry_bytes_per_device(kind, *options))
        return call.num_tokens * of_token / pieces

    def _logits(self, call: Call) -> Part:
        """The product with the vocabulary, and the logits that it writes."""
        part = self._head_work(call).part("logits", call.num_logits, self._row_shards(call))
        logits_bytes = self._logits_bytes(call)
        elements = logits_bytes / (2 * FLOAT32_BYTES)
        return replace(part, bytes=part.bytes + logits_bytes, elements=elements)

    def _head_work(self, call: Call) -> "_WeightsWork":
        """Work of the product with the vocabulary."""
        product = record_logits(self.config)
        flops, num_weights = self._product_work(self._shapes(call), product)
        num_bytes = num_weights * self._weight_bytes[product.parameter]
        is_integer = product.parameter in self._integer_products
        return _WeightsWork(flops, flops * is_integer, num_bytes)

    def _logits_bytes(self, call: Call) -> float:
        """Bytes of logits that are written once and read once."""
        num_bytes = call.num_logits * self.config.vocab_size * FLOAT32_BYTES
        projection = self._shapes(call).projection(record_logits(self.config))
        return 2 * num_bytes / self.layout.mesh.num_shards(chain(*projection.partial_split))

    def _activations(self, call: Call) -> Part:
        config = self.config
        shards = self._num_shards(axes.RESIDUAL, self.layout.phase(call.phase))
        stream = call.num_tokens * config.embed * self._itemsize / shards
        num_bytes = ACTIVATION_PASSES * config.num_layers * stream
        return Part("activations", bytes=num_bytes)

    def _exchanges(self, call: Call) -> Part | None:
        """Collectives of all layers."""
        if self.layout.mesh.num_devices == 1:
            return None
        # all calls of a graph send the same, and a search asks for many
        key = call.phase, call.rows, call.tokens, call.span if call.phase == "chunk" else 0
        if key not in self._known_exchanges:
            self._known_exchanges[key] = Part("exchanges", sent=self._sent(call))
        return self._known_exchanges[key]

    def _sent(self, call: Call) -> Sent:
        num_shards = self.layout.mesh.num_shards
        collectives = communication.predict_collectives(
            self.config,
            self.layout,
            call,
            self._itemsize,
            self._weight_bytes,
            self.model.arrangement.cache_codes,
        )
        return sum_by_key(
            (
                (collective.kind, collective.mesh_axes),
                collective.times
                * sent_bytes(
                    collective.kind, collective.num_bytes, num_shards(collective.mesh_axes)
                ),
            )
            for collective in collectives
        )

    def _num_shards(self, logical_axes: Iterable[str], rules: AxisRules) -> int:
        """Number of shards into which an array with these axes is split."""
        mesh_axes = {mesh for axis in logical_axes if axis for mesh in rules[axis]}
        return self.layout.mesh.num_shards(mesh_axes)


def sum_by_key(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """Sum the numbers of each key."""
    total: dict[_Key, float] = {}
    for key, number in pairs:
        total[key] = total.get(key, 0.0) + number
    return total


def sent_by_axes(tables: Iterable[Sent]) -> dict[str, float]:
    """Bytes of all kinds of collectives, by mesh axes joined by `+`."""
    return sum_by_key(
        ("+".join(mesh_axes), num_bytes)
        for table in tables
        for (_, mesh_axes), num_bytes in table.items()
    )
