"""Kernels inside the graphs that run: the answer of the reference, and compiled for absent TPUs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from tiny import CONFIG, random_parameters
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.attention_kernels import choose_kernels
from noria.compile.bucket_grid import BucketGrid
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.compiled_graphs import CompiledGraphs
from noria.compile.definition import Definition
from noria.compile.targets import find_target
from noria.modelzoo.attention import attend_dense
from noria.modelzoo.config import Chunk, DecoderConfig, LatentAttention, Scores
from noria.modelzoo.kernels.splash import attend_splash
from noria.runtime.layout_files import read_layout_table
from noria.sharding.layout import Layout
from noria.sharding.placement import Placement

T = 256
CAPPED_WITH_SINKS = replace(
    CONFIG,
    windows=(None, 100, Chunk(96)),
    scores=Scores(cap=3.0),
    sinks=True,
    max_position=T,
)


def test_a_model_with_splash_gives_the_answer_of_the_reference():
    """All of what it serves at once, and a row that ends in padding."""
    config = CAPPED_WITH_SINKS
    definition = Definition(config)
    parameters = random_parameters(definition)
    tokens_BT = np.random.default_rng(0).integers(3, config.vocab_size, (2, T))
    true_length_B = np.array([T, 140])

    def logprobs(attend):
        def run(parameters):
            decoder = definition.bind(parameters, attend=attend)
            x_BTD, _ = decoder.forward(jnp.asarray(tokens_BT), jnp.asarray(true_length_B))
            return jax.nn.log_softmax(decoder.logits(x_BTD.reshape(2 * T, -1)))

        with pltpu.force_tpu_interpret_mode():
            return np.asarray(jax.jit(run)(parameters)).reshape(2, T, -1)

    got, expected = logprobs(attend_splash), logprobs(attend_dense)
    for row, length in enumerate(true_length_B):
        np.testing.assert_allclose(
            got[row, :length], expected[row, :length], rtol=0, atol=FLOAT32_MODEL_LOGPROB
        )


WIDE = DecoderConfig(
    vocab_size=1024,
    embed=512,
    mlp=1024,
    num_query_heads=8,
    num_kv_heads=4,
    head_dim=64,
    windows=(None, 200),
    max_position=1024,
)
LATENT = LatentAttention(rank=64, plain_dim=32, rope_dim=32, value_dim=48, query_rank=None)
LATENTS = replace(WIDE, num_kv_heads=8, windows=(None, None), latent=LATENT)
WIDE_GRID = BucketGrid(1024, ((64, 8), (1024, 2)), 8, (1024,))


def placed(layout: str | None = None) -> Placement:
    """On an absent TPU: on one device, or on four under a layout."""
    target = find_target("tpu:v5e:2x2")
    if layout is None:
        return replace(target, devices=target.devices[:1]).placement()
    return target.placement(Layout.from_table(read_layout_table(layout)))


def prefill_on_tpu(config: DecoderConfig, layout: str | None) -> jax.stages.Compiled:
    """The longest prefill, compiled."""
    placement = placed(layout)
    definition = Definition(config, placement.arrangement(config))
    graphs = plan_graphs(definition, WIDE_GRID, placement, jnp.dtype(jnp.bfloat16))
    name = CompiledGraphs.prefill_name(WIDE_GRID.prefill[-1])
    compiled, _ = compile_graph(next(graph for graph in graphs if graph.name == name))
    return compiled


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        pytest.param(WIDE, None, id="one device", marks=pytest.mark.slow),
        pytest.param(WIDE, "weight-stationary-1d@tensor=4", id="heads split"),
        pytest.param(
            WIDE, "data-tensor@data=2,tensor=2", id="rows and heads split", marks=pytest.mark.slow
        ),
        pytest.param(LATENTS, None, id="latents", marks=pytest.mark.slow),
        pytest.param(replace(WIDE, sinks=True), None, id="sinks", marks=pytest.mark.slow),
    ],
)
def test_prefill_with_splash_compiles_for_a_tpu(config, layout):
    """One kernel a layer, in `shard_map` where a layout splits heads."""
    text = prefill_on_tpu(config, layout).as_text()
    assert text.count("tpu_custom_call") == len(config.windows)


def test_what_is_chosen_is_said_by_length():
    kernels = choose_kernels(WIDE, WIDE_GRID, placed(), jnp.dtype(jnp.bfloat16))
    why = "tpu, bfloat16, heads of 64, causal and windows of 200"
    assert kernels.report()["prefill"] == (
        "64: xla (splash: it takes whole blocks of 128 tokens, got 64 tokens); "
        f"1024: splash ({why})"
    )


@pytest.mark.parametrize("why", ["a ring", "chunks", "several devices without a layout"])
def test_what_has_no_whole_prompts_in_order_on_a_device_keeps_xla(why):
    placement, grid = placed(), WIDE_GRID
    match why:
        case "a ring":
            placement = placed("ring@sequence=4")
        case "chunks":
            grid = replace(WIDE_GRID, prefill=((1024, 2, 256),))
        case _:
            placement = find_target("tpu:v5e:2x2").placement()
    kernels = choose_kernels(WIDE, grid, placement, jnp.dtype(jnp.bfloat16))
    assert {choice.kernel for choice in kernels.prefill.values()} == {"xla"}
    assert "tokens lie in order on one device" in kernels.report()["prefill"]
