"""Executables: one for every bucket, none for anything else, the same bits under every span."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CHUNK_GRID, GRID, TinyModel

from noria.compile import signatures
from noria.compile.bucket_grid import PrefillBucket
from noria.compile.build import plan_graphs
from noria.compile.compiled_graphs import GraphNotPlanned, graph_names
from noria.compile.monitor import compile_monitor


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def test_a_bucket_outside_the_plan_is_refused_by_name(model):
    tokens_BT, true_length_B = np.zeros((1, 9), np.int32), np.ones(1, np.int32)
    with pytest.raises(GraphNotPlanned, match=r"no graph 'prefill 9x1' in this plan"):
        model.graphs.prefill(model.parameters, PrefillBucket(9, 1), tokens_BT, true_length_B)


def test_another_shape_than_the_buckets_cannot_run_and_does_not_compile(model):
    before = compile_monitor().num_compiles
    tokens_BT, true_length_B = np.zeros((3, 9), np.int32), np.ones(3, np.int32)
    with pytest.raises(TypeError):
        model.graphs.prefill(model.parameters, GRID.prefill[0], tokens_BT, true_length_B)
    assert compile_monitor().num_compiles == before


def test_the_monitor_counts_a_compile():
    before = compile_monitor().num_compiles
    jax.jit(lambda x: x * 3 + before)(np.ones(7, np.float32))
    assert compile_monitor().num_compiles > before


def test_the_monitor_counts_announced_compiles_of_its_thread_apart():
    monitor = compile_monitor()
    compiles, announced = monitor.num_compiles, monitor.num_announced
    with ThreadPoolExecutor() as pool, monitor.announced():
        jax.jit(lambda x: x * 5 + compiles)(np.ones(7, np.float32))
        assert (monitor.num_compiles, monitor.num_announced) == (compiles, announced + 1)
        pool.submit(jax.jit(lambda x: x * 7 + compiles), np.ones(7, np.float32)).result()
    jax.jit(lambda x: x * 9 + compiles)(np.ones(7, np.float32))
    assert (monitor.num_compiles, monitor.num_announced) == (compiles + 2, announced + 1)


def test_every_graph_of_the_grid_is_planned(model):
    planned = plan_graphs(model.definition, GRID, model.placement, jnp.dtype(jnp.float32))
    names = {graph.name for graph in planned}
    lengths = {
        f"{kind} {b.length}x{b.batch}" for b in GRID.prefill for kind in ("prefill", "score")
    }
    inserts = {f"insert {b.length}x{b.batch}" for b in GRID.prefill}
    spans = {f"decode span {span}" for span in GRID.decode_spans}
    assert names == lengths | inserts | spans | {"empty state"} == graph_names(GRID)


def test_every_graph_of_chunks_has_a_name(model):
    planned = plan_graphs(model.definition, CHUNK_GRID, model.placement, jnp.dtype(jnp.float32))
    assert {graph.name for graph in planned} == graph_names(CHUNK_GRID)


def test_a_row_has_the_same_bits_under_every_span(model):
    """The scheduler widens the span for a row's neighbours; that may not show in the row."""
    bucket = GRID.prefill[0]
    tokens_BT = np.arange(3, 3 + bucket.batch * bucket.length, dtype=np.int32)
    tokens_BT = tokens_BT.reshape(bucket.batch, bucket.length)
    true_length_B = np.full(bucket.batch, 7, np.int32)
    outcomes = []
    for span in GRID.decode_spans:
        made = model.graphs.prefill(model.parameters, bucket, tokens_BT, true_length_B)
        state = signatures.decode_state(model.definition, GRID, jnp.dtype(jnp.float32))
        sampling = signatures.greedy_sampling(1, model.config.vocab_size)
        sampling = sampling._replace(num_logprobs_B=jnp.array([5]))
        for slot in range(bucket.batch):
            row = jnp.int32(slot)
            limit_1 = jnp.array([GRID.max_length])
            state = model.graphs.insert(state, bucket, made, row, row, limit_1, sampling)
        is_live_B = np.arange(GRID.decode_slots) < bucket.batch
        # two calls stay within the shortest span
        for _ in range(2):
            state, output = model.graphs.decode(model.parameters, state, is_live_B, span)
        outcomes.append(jax.device_get((output, state.logits_BV)))
    for other in outcomes[1:]:
        for a, b in zip(jax.tree.leaves(outcomes[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a[: bucket.batch], b[: bucket.batch])
