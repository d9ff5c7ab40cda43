"""What layouts communicate, compiled for a TPU slice that is not there, against the formulas.

The difference between graphs of three and of two layers is what one layer does: the first and the
last layer are next to the embedding and the head, and XLA may treat them in a way of their own.
"""

from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import pytest

from noria.compile.bucket_grid import BucketGrid
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.collectives import Collective, read_collectives
from noria.compile.definition import Definition
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.runtime.layout_files import named_layout_tables
from noria.sharding.communication import FORMULAS, LayerSizes, describes, expected
from noria.sharding.layout import Layout

pytestmark = pytest.mark.tpu_compile

TARGET = "tpu:v5e:2x4"
SLOTS, PROMPTS, LENGTH = 64, 8, 256
GRID = BucketGrid(512, ((LENGTH, PROMPTS),), SLOTS, (512,), steps_per_call=8)
CHUNK, SHORT, LONG = 256, 512, 4096
ROWS = {"prefill": (PROMPTS, LENGTH), "decode": (SLOTS, 1)}
NUM_KV_HEADS = {
    "weight-stationary-1d-kv-copies": 2,
    "weight-stationary-1d-batch-attention": 4,
    "data-tensor-batch-attention": 2,
}


SLOW = {"ring-contiguous", "ring-data-expert", "ring-tensor"}
"""What they add to other rings are sums and gathers that other layouts have."""
CARRIED_OUT_AS_ALL_REDUCE = {("weight-stationary-2d", "prefill"), ("embed-parallel", "decode")}
"""Where XLA for TPU makes an all-reduce and a cut of a reduce-scatter, at these sizes."""


def layout_of(name: str) -> Layout:
    return Layout.from_table(named_layout_tables()[name])


def config_of(name: str, num_layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=1024,
        embed=512,
        mlp=1536,
        num_query_heads=16,
        num_kv_heads=NUM_KV_HEADS.get(name, 8),
        head_dim=64,
        windows=(None,) * num_layers,
        max_position=2048,
    )


def collectives(layout: Layout, name: str, grid: BucketGrid, num_layers: int) -> list[Collective]:
    config = config_of(layout.name, num_layers)
    placement = find_target(TARGET).placement(layout)
    definition = Definition(config, placement.arrangement(config))
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(jnp.bfloat16))
    (graph,) = (graph for graph in graphs if graph.name.startswith(name))
    return read_collectives(compile_graph(graph)[0].as_text(), layout.mesh.sizes)


def of_one_layer(layout: Layout, name: str, grid: BucketGrid = GRID) -> Counter:
    counts = [Counter(), Counter()]
    for count, num_layers in zip(counts, (2, 3), strict=True):
        for c in collectives(layout, name, grid, num_layers):
            count[c.kind, c.mesh_axes, c.num_bytes] += c.times
    return counts[1] - counts[0]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FORMULAS],
)
def test_a_layer_communicates_what_the_formulas_say_and_nothing_else(name, phase):
    layout = layout_of(name)
    sizes = LayerSizes.of(config_of(name, 1), layout, *ROWS[phase], itemsize=2)
    formulas = expected(layout, phase, sizes)
    assert formulas is not None
    wanted = Counter()
    for e in formulas:
        is_cut = e.kind == "reduce-scatter" and (name, phase) in CARRIED_OUT_AS_ALL_REDUCE
        wanted["all-reduce" if is_cut else e.kind, e.mesh_axes, e.num_bytes] += e.times
    assert of_one_layer(layout, phase) == wanted


@pytest.mark.parametrize(
    ("segments", "kind"), [((SHORT,), "collective-permute"), ((SHORT, LONG - SHORT), "all-gather")]
)
@pytest.mark.parametrize(
    ("name", "rows"),
    [("ring", 1), pytest.param("ring-tensor", PROMPTS, marks=pytest.mark.slow)],
)
def test_a_chunk_sends_its_entries_or_its_queries_whichever_are_fewer_bytes(
    name, rows, segments, kind
):
    """Of one span the entries, of another the queries: nothing else goes along the ring.

    Of few rows XLA for TPU makes an all-reduce and a cut of a reduce-scatter in a ring of groups.
    """
    layout = layout_of(name)
    grid = BucketGrid(LONG, ((SHORT, rows), (LONG, rows)), SLOTS, (SHORT, LONG), chunk=CHUNK)
    sizes = LayerSizes.of(config_of(name, 1), layout, rows, CHUNK, itemsize=2)
    formulas = expected(layout, "chunk", replace(sizes, segments=segments))
    assert formulas is not None
    assert kind in {e.kind for e in formulas if e.mesh_axes == ("sequence",)}
    wanted = Counter({(e.kind, e.mesh_axes, e.num_bytes): e.times for e in formulas})
    assert of_one_layer(layout, f"chunk span {sum(segments)} ", grid) == wanted


@pytest.mark.parametrize(
    "option", [{"norm_placement": "both"}, {"is_parallel": True}, {"norm": "layer"}], ids=str
)
def test_the_formulas_claim_nothing_of_other_blocks(option):
    config, layout = config_of("weight-stationary-1d", 1), layout_of("weight-stationary-1d")
    assert describes(config, layout)
    assert not describes(replace(config, **option), layout)


def test_the_formulas_claim_nothing_of_a_ring_that_windows_end():
    config = replace(config_of("ring", 1), windows=(64,))
    assert describes(config, layout_of("sequence-parallel"))
    assert not describes(config, layout_of("ring"))
