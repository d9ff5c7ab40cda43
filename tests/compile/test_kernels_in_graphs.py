"""Kernels inside graphs: they give the reference's answers, and compile for absent TPUs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import alike, changed
from jax.experimental.pallas import tpu as pltpu
from tiny import CONFIG, random_parameters
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel
from noria.compile.attention_kernels import AttentionPlan, choose_kernels
from noria.compile.build import GraphSpec, compile_graph, compile_with_text, plan_graphs
from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.programs.report import read_report
from noria.compile.targets import find_target
from noria.modelzoo.attention.attend import attend_dense
from noria.modelzoo.axes import ATTENTION_BATCH as BATCH
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.kernels.splash import attend_splash
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.layer_config import Chunk, Scores
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout
from noria.sharding.placement import Placement

T = 256
CAPPED_WITH_SINKS = changed(
    CONFIG,
    windows=(None, 100, Chunk(96)),
    scores=Scores(cap=3.0),
    sinks=True,
    max_position=T,
)


def test_a_model_with_splash_gives_the_answer_of_the_reference():
    """The model has all features that splash supports, and one row ends in padding."""
    config = CAPPED_WITH_SINKS
    definition = AbstractModel(config)
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


WIDE = DecoderConfig.alike(
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
LATENTS = changed(WIDE, num_kv_heads=8, windows=(None, None), latent=LATENT)
WIDE_GRID = BucketGrid(1024, ((64, 8), (1024, 2)), 8)


def placed(layout: str | None = None) -> Placement:
    """Return a placement on an absent TPU: one device, or four under a layout."""
    target = find_target("tpu:v5e:2x2")
    if layout is None:
        return replace(target, devices=target.devices[:1]).placement()
    return target.placement(Layout.from_table(read_layout_table(layout)))


def longest_prefill(config: DecoderConfig, grid: BucketGrid, placement: Placement) -> GraphSpec:
    definition = AbstractModel(config, placement.arrangement(config))
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(jnp.bfloat16))
    key = GraphKey("prefill", grid.prefill[-1])
    return next(graph for graph in graphs if graph.key == key)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        pytest.param(WIDE, None, id="one device", marks=pytest.mark.slow),
        pytest.param(WIDE, "weight-stationary-1d@tensor=4", id="heads split"),
        pytest.param(
            WIDE, "data-tensor@data=2,tensor=2", id="rows and heads split", marks=pytest.mark.slow
        ),
        pytest.param(LATENTS, None, id="latents", marks=pytest.mark.slow),
        pytest.param(changed(WIDE, sinks=True), None, id="sinks", marks=pytest.mark.slow),
    ],
)
def test_prefill_with_splash_compiles_for_a_tpu(config, layout):
    """Each layer has one kernel, in `shard_map` if the layout splits heads."""
    compiled, _ = compile_graph(longest_prefill(config, WIDE_GRID, placed(layout)))
    assert compiled.as_text().count("tpu_custom_call") == len(alike(config).windows)


CHUNKS_GRID = BucketGrid(2304, ((2304, 2, 256),), 8)
RINGS = changed(WIDE, windows=(None, 256), max_position=2304)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("config", "target", "layout"),
    [
        pytest.param(RINGS, "tpu:v5e:2x4", "weight-stationary-1d@tensor=8", id="v5e, heads split"),
        pytest.param(RINGS, "tpu:v6e:1x1", None, id="v6e", marks=pytest.mark.slow),
        pytest.param(
            replace(LATENTS, max_position=2304), "tpu:v6e:1x1", None, id="latents",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            RINGS, "tpu:v5e:2x2", "data-tensor@data=2,tensor=2", id="rows and heads split",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_chunks_on_a_tpu_attend_to_the_pages_where_they_are(config, target, layout):
    """Each layer has one kernel, and no page is copied."""
    target = find_target(target)
    table = None if layout is None else Layout.from_table(read_layout_table(layout))
    groups = None if table is None else table.mesh.num_shards(table.phase("decode")[BATCH])
    grid = replace(CHUNKS_GRID, slot_groups=groups)
    graph = longest_prefill(config, grid, target.placement(table))
    _, text, _ = compile_with_text(graph)
    assert text is not None
    assert text.count('custom_call_target="tpu_custom_call"') == len(alike(config).windows)
    assert read_report(text, "tpu", {}).step.copied_bytes == 0


def test_what_is_chosen_is_said_by_length():
    kernels = choose_kernels(WIDE, WIDE_GRID, placed(), jnp.dtype(jnp.bfloat16))
    why = "tpu, bfloat16, heads of 64, causal and windows of 200"
    assert kernels.report()["prefill"] == (
        "64: xla (splash: it takes whole blocks of 128 tokens, got 64 tokens); "
        f"1024: splash ({why})"
    )


@pytest.mark.parametrize("why", ["a ring", "several devices without a layout"])
def test_what_has_no_whole_prompts_in_order_on_a_device_keeps_xla(why):
    placement = placed("ring@sequence=4")
    if why != "a ring":
        placement = find_target("tpu:v5e:2x2").placement()
    kernels = choose_kernels(WIDE, WIDE_GRID, placement, jnp.dtype(jnp.bfloat16))
    assert {choice.kernel for choice in kernels.prefill.values()} == {"xla"}
    assert "tokens lie in order on one device" in kernels.report()["prefill"]


PAGED = BucketGrid(1024, ((64, 8), (1024, 2)), 8)


@pytest.mark.tpu_compile
def test_attention_to_pages_has_kernels_of_its_own():
    heads = DecoderConfig.alike(
        vocab_size=64,
        embed=64,
        mlp=64,
        num_query_heads=8,
        num_kv_heads=2,
        head_dim=128,
        windows=(None, 200),
        max_position=1024,
    )

    def decode(
        grid: BucketGrid = PAGED,
        name: str = "auto",
        codes: str | None = None,
        placement: Placement | None = None,
    ) -> str:
        plan, call = AttentionPlan(decode=name), (heads, grid, placement or placed())
        choice = choose_kernels(*call, jnp.dtype("bfloat16"), plan, cache_codes=codes).decode
        return str(choice)

    assert decode().startswith("paged (tpu, bfloat16, heads of 128")
    without_layout = find_target("tpu:v5e:2x2").placement()
    why = "it takes a cache in pages on one device or under a layout"
    assert decode(placement=without_layout) == f"xla (paged: {why})"
    assert decode(name="xla") == "xla (as the plan asks)"
    assert decode(name="paged") == "paged (as the plan asks)"
    assert decode(codes="int8").startswith("xla (paged: it takes codes in pages of 128 entries")
    assert decode(replace(PAGED, page=128, pages=64), codes="int8").startswith("paged")
    with pytest.raises(ValueError, match="got 'splash': it does not read pages"):
        decode(name="splash")
    wide = BucketGrid(2**20, PAGED.prefill, 64, pages=2**14)
    assert "a table of at most 131072 pages" in decode(wide)
    tiles = replace(PAGED, prefill=((1024, 64, 16),))
    prefill = choose_kernels(heads, tiles, placed(), jnp.dtype("bfloat16")).prefill
    assert str(prefill[16]).startswith("paged (tpu, bfloat16, heads of 128")
    plan = AttentionPlan(prefill="splash")
    with pytest.raises(ValueError, match="got 'splash': it does not read pages"):
        choose_kernels(heads, tiles, placed(), jnp.dtype("bfloat16"), plan)
