"""The paged kernel reads a cache as the reference does, and in place on an absent TPU."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from tiny import CONFIG, random_parameters
from tolerances import (
    BFLOAT16_ELEMENTWISE,
    BFLOAT16_ELEMENTWISE_RELATIVE,
    BFLOAT16_MODEL_LOGPROB_MEAN,
)

from noria.compile.attention_kernels import AttentionPlan, choose_kernels
from noria.compile.bucket_grid import BucketGrid
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.compiled_graphs import CompiledGraphs
from noria.compile.definition import Definition
from noria.compile.targets import find_target
from noria.modelzoo.attention import Visibility, attend_dense
from noria.modelzoo.config import PLAIN_SCORES, Chunk, DecoderConfig, Scores
from noria.modelzoo.kernels.paged import attend_paged
from noria.modelzoo.kv_cache import allocate, insert
from noria.modelzoo.segments import held_positions
from noria.runtime.layout_files import read_layout_table
from noria.sharding.layout import Layout

LENGTHS = (1, 130, 256, 397)
"""Of rows: within a page, past one, all of a cache, and round a ring."""
S = 256
PAGED = AttentionPlan(decode="paged")


@pytest.mark.parametrize(
    ("window", "scores"),
    [
        pytest.param(None, PLAIN_SCORES, id="whole"),
        pytest.param(S, PLAIN_SCORES, id="ring", marks=pytest.mark.slow),
        pytest.param(Chunk(S), Scores(cap=0.7), id="ring of chunks, capped"),
    ],
)
def test_a_cache_is_read_as_far_as_it_is_filled(window, scores):
    """Grouped heads; a ring has come round, and only a piece of one with chunks is seen."""
    rng = np.random.default_rng(0)
    lengths = [min(length, S) if window is None else length for length in LENGTHS]
    held_BS = jnp.stack([held_positions(length, S) for length in lengths])
    position_B1 = jnp.asarray(lengths)[:, None] - 1
    shapes = ((len(lengths), 1, 2, 3, 128), (len(lengths), 2, 128, S), (len(lengths), 2, S, 128))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    seen = Visibility(position_B1, held_BS, window, sees_beginning=True)
    with pltpu.force_tpu_interpret_mode():
        out, lse = jax.jit(lambda *x: attend_paged(*x, seen, scores))(*arrays)
    exact, _ = attend_dense(*(x.astype(jnp.float32) for x in arrays), seen, scores)
    np.testing.assert_allclose(
        np.asarray(out, np.float32),
        exact,
        rtol=BFLOAT16_ELEMENTWISE_RELATIVE,
        atol=BFLOAT16_ELEMENTWISE,
    )
    assert np.isnan(lse).all(), "the kernel has none to give"


@pytest.mark.slow
def test_a_token_decodes_as_with_the_reference():
    """Behind prompts of two lengths; one layer's ring is shorter than the longer prompt."""
    config = replace(CONFIG, head_dim=128, windows=(None, 128), max_position=S)
    definition = Definition(config)
    parameters = {
        name: x.astype(jnp.bfloat16) / 4 for name, x in random_parameters(definition).items()
    }
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(3, 151, (2, 200)))
    length_B = jnp.array([200, 90])

    def logprobs(attend):
        def run(parameters):
            _, made, _ = definition.bind(parameters).prefill(tokens_BT, length_B)
            cache = allocate(config, 2, [S], jnp.dtype(jnp.bfloat16))
            for row in range(2):
                cache = insert(cache, made, length_B, jnp.int32(row), jnp.int32(row))
            decoder = definition.bind(parameters, attend=attend)
            logits_BV, *_ = decoder.decode(jnp.array([5, 7]), length_B, cache, length_B > 0)
            return jax.nn.log_softmax(logits_BV)

        with pltpu.force_tpu_interpret_mode():
            return np.asarray(jax.jit(run)(parameters))

    difference = np.abs(logprobs(attend_paged) - logprobs(attend_dense))
    assert difference.mean() < BFLOAT16_MODEL_LOGPROB_MEAN


WIDE = DecoderConfig(
    vocab_size=1024,
    embed=512,
    mlp=1024,
    num_query_heads=8,
    num_kv_heads=4,
    head_dim=128,
    windows=(None, 256),
    max_position=1024,
)
GRID = BucketGrid(1024, ((64, 8),), 8, (1024,))


def decode_on_tpu(layout: str | None, plan: AttentionPlan) -> jax.stages.Compiled:
    target = find_target("tpu:v5e:2x2")
    if layout is None:
        target = replace(target, devices=target.devices[:1])
    table = None if layout is None else Layout.from_table(read_layout_table(layout))
    placement = target.placement(table)
    definition = Definition(WIDE, placement.arrangement(WIDE))
    graphs = plan_graphs(definition, GRID, placement, jnp.dtype(jnp.bfloat16), attention=plan)
    name = CompiledGraphs.decode_name(1024)
    return compile_graph(next(graph for graph in graphs if graph.name == name))[0]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(None, marks=pytest.mark.slow), "data-tensor@data=2,tensor=2"],
    ids=["one device", "rows and heads split"],
)
def test_no_cache_is_copied_to_be_read_in_pages(layout):
    text = decode_on_tpu(layout, PAGED).as_text()
    assert text.count("tpu_custom_call") == len(WIDE.windows)
    copied = re.findall(r"= bf16\[\d+,\d+,128,\d{3,}\]\S* (?:copy|transpose)\(", text)
    assert copied == []


@pytest.mark.parametrize(
    ("config", "grid", "layout", "reason"),
    [
        (WIDE, GRID, None, None),
        (WIDE, replace(GRID, decode_spans=(512, 1024)), None, "merge 2 segments"),
        (replace(WIDE, windows=(200, None)), GRID, None, r"got caches of \[200, 1024\]"),
        (replace(WIDE, sinks=True), GRID, None, "to weigh sinks against"),
        (replace(WIDE, head_dim=64), GRID, None, "one multiple of 128, got 64 and 64"),
        (WIDE, GRID, "ring@sequence=4", "see a beginning of a cache on their device"),
    ],
)
def test_pages_are_refused_with_a_reason_or_left_to_be_asked_for(config, grid, layout, reason):
    target, dtype = find_target("tpu:v5e:2x2"), jnp.dtype(jnp.bfloat16)
    placement = replace(target, devices=target.devices[:1]).placement()
    if layout is not None:
        placement = target.placement(Layout.from_table(read_layout_table(layout)))
    said = choose_kernels(config, grid, placement, dtype).decode
    assert said.kernel == "xla"
    if reason is None:
        assert "paged: it reads less" in said.reason
        assert choose_kernels(config, grid, placement, dtype, PAGED).decode.kernel == "paged"
    else:
        assert re.search(reason, said.reason)
        with pytest.raises(ValueError, match=reason):
            choose_kernels(config, grid, placement, dtype, PAGED)


def test_numbers_that_would_be_rounded_are_refused():
    target = find_target("tpu:v5e:2x2")
    placement = replace(target, devices=target.devices[:1]).placement()
    with pytest.raises(ValueError, match="takes bfloat16, and rounds others to it, got float32"):
        choose_kernels(WIDE, GRID, placement, jnp.dtype(jnp.float32), PAGED)
