"""A prefill graph works in place: it copies no pages."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from alike import alike, changed
from test_memory import whole_copies

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import GraphSpec, compile_graph, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.latent_config import LatentAttention

CONFIG = DecoderConfig.alike(
    vocab_size=512,
    embed=64,
    mlp=128,
    num_query_heads=6,
    num_kv_heads=3,
    head_dim=64,
    windows=(None, 96, None, 96),
    max_position=8192,
)
LATENT = LatentAttention(rank=512, plain_dim=128, rope_dim=64, value_dim=128)
CONFIGS = {
    "heads": CONFIG,
    "latents": changed(CONFIG, num_query_heads=16, num_kv_heads=16, head_dim=192, latent=LATENT),
}
TPU = "tpu:v5e:1x1"
EVERY_TWO = {
    (False, False, False, False),
    (False, True, True, True),
    (True, False, True, True),
    (True, True, False, True),
    (True, True, True, False),
}
"""Combinations of four facts in which every two facts have all their combinations."""


@cache
def prefill_graph(
    target: str,
    slots: int,
    config: DecoderConfig = CONFIG,
    scan_layers: bool = False,
    batch: int = 2,
    in_chunks: bool = True,
) -> GraphSpec:
    """Return the prefill graph; prompts and rows exceed the windows."""
    grid = BucketGrid(2048, ((2048, batch, 128),), slots, row_tokens=256)
    if not in_chunks:
        grid = replace(grid, prefill=((256, batch),), chunks_per_decode=None)
    placement = find_target(target).placement()
    definition = AbstractModel(config, placement.arrangement(config, scan_layers))
    dtype = "bfloat16" if target == TPU else "float32"
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(dtype))
    (graph,) = (graph for graph in graphs if graph.key.kind == "prefill")
    return graph


def temporaries(graph: GraphSpec) -> int:
    compiled, _ = compile_graph(graph)
    return compiled.memory_analysis().temp_size_in_bytes


def pages(graph: GraphSpec) -> list[jax.ShapeDtypeStruct]:
    """Return all arrays of keys, values or latents."""
    return jax.tree.leaves(graph.arguments[1].cache)


@pytest.fixture
def is_slow(request) -> bool:
    return request.config.getoption("--slow")


def num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


@pytest.mark.parametrize(("keeps", "batch"), [("heads", 1), ("latents", 1), ("heads", 2)])
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "chunks"])
@pytest.mark.parametrize("target", ["cpu", pytest.param(TPU, marks=pytest.mark.tpu_compile)])
def test_what_a_prompt_needs_does_not_grow_with_the_slots(
    target, in_chunks, scan_layers, keeps, batch, is_slow
):
    """Growth would mean a copy of all slots; XLA writes one row differently from several rows.

    Every run covers all combinations of any two of target, pieces, loop and kind of cache.
    """
    facts = (target == TPU, in_chunks, scan_layers, keeps == "latents")
    if (batch > 1 or facts not in EVERY_TWO) and not is_slow:
        pytest.skip("slow; run with --slow")
    config = CONFIGS[keeps]
    config = changed(config, windows=alike(config).windows * (3 if scan_layers else 1))
    few, many = (
        prefill_graph(target, slots, config, scan_layers, batch, in_chunks) for slots in (64, 128)
    )
    compiled, _ = compile_graph(many)
    growth, bound = (
        compiled.memory_analysis().temp_size_in_bytes,
        min(map(num_bytes, pages(few))),
    )
    # less than the bound in all is less than the bound for more slots
    if growth >= bound:
        growth -= temporaries(few)
    assert growth < bound
    overwritten = compiled.memory_analysis().alias_size_in_bytes
    assert overwritten >= sum(map(num_bytes, pages(many)))
    smallest = min(leaf.size for leaf in pages(many))
    dtype = "bf16" if target == TPU else "f32"
    assert whole_copies(compiled.as_text(), smallest, dtype) == []


def test_what_a_chunk_needs_does_not_grow_with_the_layers():
    """Each layer's pages are read only when the layer runs."""
    few, many = (
        temporaries(prefill_graph("cpu", 4, changed(CONFIG, windows=(None,) * layers)))
        for layers in (3, 9)
    )
    assert many < 1.1 * few


@pytest.mark.tpu_compile
@pytest.mark.newest_libtpu
def test_a_chunk_needs_little_beside_its_arguments_on_tpu():
    graph = prefill_graph(TPU, 64)
    assert temporaries(graph) < 0.05 * sum(map(num_bytes, pages(graph)))
