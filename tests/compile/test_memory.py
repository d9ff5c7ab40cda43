"""Graphs work in place: little memory beside their arguments, no copy of weights or cache.

XLA reports the memory of the same graphs that jobs run, in the embedded model's shape. Graphs for
TPU are compiled without a TPU. Sampling from a large vocabulary takes most of that compiler's time,
so tests that read sizes and no copies have a small one there.
"""

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from alike import changed

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import GraphSpec, compile_graph, plan_graphs
from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

SLOTS, VOCAB, SMALL_VOCAB = 64, 49152, 4096
GRID = BucketGrid(max_length=512, prefill=((512, 1),), decode_slots=SLOTS, row_tokens=1)
"""Whole prompts, so that layers with windows have pages of each slot."""
ONE_CHIP, TPU = "tpu:v5e:1x1", "tpu:v5e:2x4"


Windows = tuple[int | None, ...]
WHOLE: Windows = (None,) * 8
RINGS: Windows = (96, None) * 4
"""Windows of eight layers: a copy of their cache exceeds the bound of a graph's temporaries."""
DEEP_WHOLE: Windows = (None,) * 30
DEEP_RINGS: Windows = (96, None) * 15
ALONE_OR_WITH_RINGS, DEEP_ALONE_OR_WITH_RINGS = (
    [pytest.param(whole, id="whole", marks=pytest.mark.slow), pytest.param(rings, id="rings")]
    for whole, rings in ((WHOLE, RINGS), (DEEP_WHOLE, DEEP_RINGS))
)
"""Windows with `--slow`, and those of every run, in which each second layer is whole."""


def decode_graph(target: str, dtype: str, *given: Any, **options: Any) -> GraphSpec:
    return graph_of(GraphKey("decode"), target, dtype, *given, **options)


def graph_of(
    key: GraphKey,
    target: str,
    dtype: str,
    windows: Windows = WHOLE,
    grid: BucketGrid = GRID,
    scan_layers: bool = False,
    layout: Layout | None = None,
    **heads: object,
) -> GraphSpec:
    config = DecoderConfig.alike(
        vocab_size=VOCAB,
        embed=576,
        mlp=1536,
        num_query_heads=9,
        num_kv_heads=3,
        head_dim=64,
        windows=windows,
        max_position=8192,
        tie_embeddings=True,
    )
    config = changed(config, **heads)
    placement = find_target(target).placement(layout)
    definition = AbstractModel(config, placement.arrangement(config, scan_layers))
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(dtype))
    return next(graph for graph in graphs if graph.key == key)


def temporary_bound(graph: GraphSpec) -> float:
    """Return the bound: a twentieth of the cache, and six float32 arrays of the logits' shape."""
    vocab = graph.arguments[0]["embedding.table"].shape[0]
    return 0.05 * cache_bytes(graph) + 6 * SLOTS * vocab * 4


def cache_bytes(graph: GraphSpec) -> int:
    state = graph.arguments[1]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))


def whole_copies(hlo: str, num_elements: int, dtype: str = "bf16") -> list[str]:
    """Return the shapes of copied or transposed arrays of a dtype and at least this size.

    Prefetches (`copy-start`) do not count: they read once what has to be read anyway.
    """
    found = re.findall(rf"= ({dtype}\[[0-9,]+\])\S* (?:copy|transpose)\(", hlo)
    return [shape for shape in found if _size(shape) >= num_elements]


def _size(shape: str) -> int:
    return math.prod(map(int, re.findall(r"\d+", shape.partition("[")[2])))


def smallest_that_counts(graph: GraphSpec) -> int:
    """Return the number of elements of the smallest weight matrix or array of pages."""
    parameters, state, *_ = graph.arguments
    pages = jax.tree.leaves(state.cache)
    return min(leaf.size for leaf in [*parameters.values(), *pages] if leaf.ndim > 1)


@pytest.mark.parametrize("windows", ALONE_OR_WITH_RINGS)
def test_decode_needs_little_memory_beside_its_arguments(windows):
    graph = decode_graph("cpu", "float32", windows)
    compiled, _ = compile_graph(graph)
    assert compiled.memory_analysis().temp_size_in_bytes <= temporary_bound(graph)


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("cpu", "float32"), pytest.param(ONE_CHIP, "bfloat16", marks=pytest.mark.tpu_compile)],
)
@pytest.mark.parametrize("windows", DEEP_ALONE_OR_WITH_RINGS)
def test_decode_with_scanned_layers_works_in_place(target, dtype, windows):
    """The loop carries the cache of all layers; a copy of it would be twenty times the bound."""
    words = {"vocab_size": SMALL_VOCAB} if target == ONE_CHIP else {}
    graph = decode_graph(target, dtype, windows, scan_layers=True, **words)
    compiled, _ = compile_graph(graph)
    state = graph.arguments[1]
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= temporary_bound(graph)
    assert memory.alias_size_in_bytes >= sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache)
    )


LLAMA_8B = {"num_query_heads": 32, "num_kv_heads": 8, "embed": 4096, "mlp": 14336}
QWEN3_235B = {"num_query_heads": 64, "num_kv_heads": 4, "embed": 4096, "mlp": 1536}
OF_16_EXPERTS = partial(MoeConfig, Routing(num_experts=16, num_chosen=2), QWEN3_235B["mlp"])
"""Experts of Qwen3 235B's sizes; the model itself has eight times as many."""


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("key", "spelling", "shape", "moe"),
    [
        pytest.param(
            GraphKey("decode"), "weight-stationary-1d@tensor=8", LLAMA_8B, None,
            marks=pytest.mark.slow, id="1d",
        ),
        pytest.param(
            GraphKey("decode"), "weight-stationary-2d@data=2,tensor=4", LLAMA_8B, None,
            id="2d",
        ),
        pytest.param(
            GraphKey("decode"), "expert-tensor@data=1,expert=2,tensor=4", QWEN3_235B,
            OF_16_EXPERTS, id="experts",
        ),
        # a device has one head, whose keys have another memory layout
        pytest.param(
            GraphKey("prefill", PrefillBucket(1536, 1, 256)), "weight-stationary-1d@tensor=8",
            LLAMA_8B, None, id="chunks 1d",
        ),
    ],
)  # fmt: skip
def test_temporaries_of_a_loop_do_not_grow_with_its_layers_on_tpu(key, spelling, shape, moe):
    """Keys and weights of all layers keep their memory layout."""
    layout = Layout.from_table(read_layout_table(spelling))
    grid = BucketGrid(1536, ((1536, 1, 256),), 256)
    shape = {"vocab_size": 128, "head_dim": 128, "layout": layout, **shape}

    def of_layers(num_layers: int) -> GraphSpec:
        windows = (None,) * num_layers
        experts = {} if moe is None else {"moe": moe()}
        return graph_of(key, TPU, "bfloat16", windows, grid, scan_layers=True, **shape, **experts)

    graph = of_layers(4)
    of_turns = graph.arguments[0]["layers.0:4.attention.output"]
    of_device = math.prod(of_turns.sharding.shard_shape(of_turns.shape))
    growth, bound = temporaries(graph), 2 * of_turns.dtype.itemsize * of_device // 4
    # less than the bound in all is less than the bound for more layers
    if growth >= bound:
        growth -= temporaries(of_layers(2))
    assert growth < bound


def temporaries(graph: GraphSpec) -> int:
    """Return the bytes of a graph's temporaries."""
    compiled, _ = compile_graph(graph)
    return compiled.memory_analysis().temp_size_in_bytes


LATENTS = {
    "vocab_size": 64,
    "num_query_heads": 16,
    "num_kv_heads": 16,
    "head_dim": 192,
    "latent": LatentAttention(rank=512, plain_dim=128, rope_dim=64, value_dim=128),
}
"""Heads of DeepSeek-V2-Lite; logits are small, so that nothing is as large as the cache."""


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("cpu", "float32"), pytest.param(ONE_CHIP, "bfloat16", marks=pytest.mark.tpu_compile)],
)
def test_decode_reads_latents_where_they_lie(target, dtype):
    """No page is copied in another memory layout for keys, and no values are copied from it."""
    graph = decode_graph(target, dtype, (None,) * 4, **LATENTS)
    compiled, _ = compile_graph(graph)
    pages = jax.tree.leaves(graph.arguments[1].cache)
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in pages)
    assert compiled.memory_analysis().temp_size_in_bytes < smallest


@pytest.mark.tpu_compile
def test_decode_with_scanned_latents_works_in_place_on_tpu():
    graph = decode_graph(ONE_CHIP, "bfloat16", DEEP_WHOLE, scan_layers=True, **LATENTS)
    compiled, _ = compile_graph(graph)
    assert compiled.memory_analysis().temp_size_in_bytes <= temporary_bound(graph)


@pytest.mark.tpu_compile
@pytest.mark.newest_libtpu
@pytest.mark.parametrize("windows", ALONE_OR_WITH_RINGS)
def test_decode_works_in_place_on_tpu(windows):
    graph = decode_graph(ONE_CHIP, "bfloat16", windows)
    compiled, _ = compile_graph(graph)
    assert compiled.memory_analysis().temp_size_in_bytes <= temporary_bound(graph)
    assert whole_copies(compiled.as_text(), smallest_that_counts(graph)) == []


@pytest.mark.tpu_compile
def test_a_cache_that_is_not_donated_is_found_as_copies():
    graph = replace(decode_graph(ONE_CHIP, "bfloat16", (None,)), donated=())
    compiled, _ = compile_graph(graph)
    copies = whole_copies(compiled.as_text(), smallest_that_counts(graph))
    # keys and values
    assert len(copies) == 2
