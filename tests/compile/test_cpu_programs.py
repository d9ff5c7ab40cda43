"""Programs for the CPU: none converts whole arrays or repeats work, and every product is fast."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from alike import alike, changed

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.graphs.steps import DecodeState
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.programs.report import read_report
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig

CONFIG = DecoderConfig.alike(
    vocab_size=2048,
    embed=256,
    mlp=768,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=64,
    windows=(None, 32),
    max_position=256,
    tie_embeddings=True,
)
GRID = BucketGrid(256, ((64, 1), (192, 2)), 4, page=64, steps_per_call=4, score=True)
SMALLEST_WEIGHT = 2 * 256 * 256


@pytest.fixture(scope="module")
def graphs():
    placement = find_target("cpu").placement(None)
    graphs = plan_graphs(AbstractModel(CONFIG), GRID, placement, jnp.dtype("bfloat16"))
    return {str(graph.key): graph for graph in graphs}


@pytest.mark.parametrize("name", ["decode", "prefill 64x1", "prefill 192x2", "score 64x1"])
def test_no_weight_is_converted_and_every_product_is_fast(graphs, name):
    compiled, _ = compile_graph(graphs[name])
    report = read_report(compiled.as_text(), "cpu", (), min_bytes=SMALLEST_WEIGHT)
    converted = {one.argument for one in report.rewrites if one.is_converted}
    # XLA converts decode's embedding table once a call
    known = {"parameters['embedding.table']"} if name.startswith("decode") else set()
    assert converted <= known
    assert report.step.converted_bytes == 0
    assert report.step.slow_flops == 0, report.slow_products


def test_the_cache_is_float32(graphs):
    state = graphs["decode"].arguments[1]
    assert {x.dtype for x in jax.tree.leaves(state.cache)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_chunk_computes_rotations_once_and_attends_once_in_each_layer(batch):
    grid = BucketGrid(384, ((384, batch, 32),), 4)
    placement = find_target("cpu").placement(None)
    graphs = plan_graphs(AbstractModel(CONFIG), grid, placement, jnp.dtype("float32"))
    (graph,) = (one for one in graphs if str(one.key) == f"prefill 32x{batch}")
    text = compile_graph(graph)[0].as_text()
    assert text.count(" cosine(") == 1
    attention = re.findall(r' dot\(.*op_name="[^"]*layers\.\d+/[a-z_/]*dot_general"', text)
    assert len(attention) == 2 * len(alike(CONFIG).windows), "scores and values"


FEW_WEIGHTS = changed(CONFIG, embed=32, mlp=32, vocab_size=64, windows=(None,) * 2)
PAGES = BucketGrid(128, ((128, 2, 16),), 4, pages=16384, page=8)


@pytest.mark.parametrize(
    ("num_heads", "scan_layers", "codes"),
    [
        (1, True, "int8"),
        (1, True, "int4"),
        (3, False, None),
        pytest.param(1, True, None, marks=pytest.mark.slow),
        pytest.param(1, False, None, marks=pytest.mark.slow),
        pytest.param(3, True, None, marks=pytest.mark.slow),
        pytest.param(3, True, "int8", marks=pytest.mark.slow),
        pytest.param(3, False, "int4", marks=pytest.mark.slow),
    ],
)
def test_no_program_needs_memory_for_a_copy_of_the_pages(num_heads, scan_layers, codes):
    """The pages of one layer, or their scales, are larger than all that a program needs else."""
    config = changed(FEW_WEIGHTS, num_query_heads=2 * num_heads, num_kv_heads=num_heads)
    placement = find_target("cpu").placement(None)
    model = AbstractModel(config, placement.arrangement(config, scan_layers, codes))
    for graph in plan_graphs(model, PAGES, placement, jnp.dtype("float32")):
        if graph.key.kind not in ("prefill", "decode", "fork"):
            continue
        (state,) = (x for x in graph.arguments if isinstance(x, DecodeState))
        arrays = [x for layer in state.cache for x in layer.arrays.values()]
        num_layers = {x.shape[0] for x in arrays}
        of_one = min(math.prod(x.shape) * x.dtype.itemsize for x in arrays) // max(num_layers)
        memory = compile_graph(graph)[0].memory_analysis()
        assert memory.temp_size_in_bytes < of_one, str(graph.key)
        assert memory.alias_size_in_bytes > of_one
