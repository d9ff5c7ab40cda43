"""Executables: one for every bucket, and no others."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GRID, TAIL_GRID, TWO_LAYERS, TinyModel

from noria.compile.build import plan_graphs
from noria.compile.compiled_graphs import GraphNotPlanned
from noria.compile.graphs.graph_kinds import GraphKey, graph_keys
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.monitor import compile_monitor
from noria.runtime.engine.padding import pack_greedy


@pytest.fixture(scope="module")
def model() -> TinyModel:
    """The tiny model with only the bucket that tests call."""
    return TinyModel(TWO_LAYERS, replace(GRID, prefill=GRID.prefill[:1], score=False))


def test_a_bucket_outside_the_plan_is_refused_by_name(model):
    bucket, state = PrefillBucket(9, 1), model.graphs.empty_state()
    arguments = pack_greedy([[5] * 9], 0, bucket, GRID, model.config.vocab_size)
    with pytest.raises(GraphNotPlanned, match=r"no graph 'prefill 9x1' in this plan"):
        model.graphs.call(GraphKey("prefill", bucket), model.parameters, state, *arguments)


def test_another_shape_than_the_buckets_cannot_run_and_does_not_compile(model):
    state = model.graphs.empty_state()
    before = compile_monitor().num_compiles
    arguments = pack_greedy([[5] * 9] * 3, 0, PrefillBucket(9, 3), GRID, model.config.vocab_size)
    with pytest.raises(TypeError):
        key = GraphKey("prefill", GRID.prefill[0])
        model.graphs.call(key, model.parameters, state, *arguments)
    assert compile_monitor().num_compiles == before


def test_the_monitor_counts_a_compile():
    before = compile_monitor().num_compiles
    jax.jit(lambda x: x * 3 + before)(np.ones(7, np.float32))
    assert compile_monitor().num_compiles > before


def test_the_monitor_counts_compiles_of_several_threads():
    monitor = compile_monitor()
    event, before = "/jax/core/compile/backend_compile_duration", monitor.num_compiles
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: monitor._on_duration(event, 0.0), range(40)))
    assert monitor.num_compiles - before == 40


@pytest.mark.parametrize(
    ("grid", "buckets"),
    [
        (GRID, ("8x3", "16x2", "48x1")),
        (TAIL_GRID, ("4x3", "16x2")),
    ],
    ids=["whole", "chunks"],
)
def test_every_graph_of_the_grid_is_planned(model, grid, buckets):
    planned = plan_graphs(model.definition, grid, model.placement, jnp.dtype(jnp.float32))
    prefill = {f"{kind} {bucket}" for bucket in buckets for kind in ("prefill", "score")}
    (decode,) = (str(graph.key) for graph in planned if graph.key.kind == "decode")
    names = prefill | {decode, "fork", "empty state"}
    assert {str(graph.key) for graph in planned} == names == set(map(str, graph_keys(grid)))
