"""Executables: one for every bucket, and no others; results have the same bits for every span."""

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
from noria.compile.grids.bucket_grid import BucketGrid
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
        (TAIL_GRID, ("4x3 span 64", "16x2 span 64")),
    ],
    ids=["whole", "chunks"],
)
def test_every_graph_of_the_grid_is_planned(model, grid, buckets):
    planned = plan_graphs(model.definition, grid, model.placement, jnp.dtype(jnp.float32))
    prefill = {f"{kind} {bucket}" for bucket in buckets for kind in ("prefill", "score")}
    names = prefill | {"decode span 64", "fork", "empty state"}
    assert {str(graph.key) for graph in planned} == names == set(map(str, graph_keys(grid)))


def test_a_row_has_the_same_bits_under_every_span():
    """The scheduler widens the span for a row's neighbours, which must not change the row."""
    grid = BucketGrid(64, GRID.prefill[:1], 4, (16, 32, 64), steps_per_call=4)
    model, bucket = TinyModel(TWO_LAYERS, grid), grid.prefill[0]
    rows = np.arange(3, 3 + bucket.batch * 7).reshape(bucket.batch, 7).tolist()
    pieces, asked, tokens_BT = pack_greedy(rows, 0, bucket, grid, model.config.vocab_size)
    wanted_B = np.full(bucket.batch, 5, np.int32)
    asked = asked._replace(sampling=asked.sampling._replace(num_logprobs_B=wanted_B))
    outcomes = []
    for span in grid.decode_spans:
        state = model.graphs.empty_state()
        arguments = GraphKey("prefill", bucket), model.parameters, state, pieces, asked, tokens_BT
        state, _ = model.graphs.call(*arguments)
        is_live_B = np.arange(grid.decode_slots) < bucket.batch
        # two calls stay within the shortest span
        for _ in range(2):
            key = GraphKey("decode", span)
            state, output = model.graphs.call(key, model.parameters, state, is_live_B)
        outcomes.append(jax.device_get((output, state.logits_BV)))
    for other in outcomes[1:]:
        for a, b in zip(jax.tree.leaves(outcomes[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a[: bucket.batch], b[: bucket.batch])
