"""Predicted communication against programs compiled for devices that are not present.

The difference between graphs of three and of two layers is the communication of one layer: XLA may
compile the first and the last layer, next to the embedding and the head, in another way.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax.numpy as jnp
import pytest
from alike import changed
from decode_steps import step_of
from expert_reports import is_of_report

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.programs.collectives import Collective, read_collectives
from noria.compile.targets import find_target
from noria.modelzoo import axes
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.runtime.files.layout_files import named_layout_tables
from noria.sharding.call import Call
from noria.sharding.communication import predict_collectives
from noria.sharding.layout import Layout

TPU, CPU = "tpu:v5e:2x4", "cpu:8"
DTYPES = {TPU: jnp.bfloat16, CPU: jnp.float32}
SLOTS, PROMPTS, LENGTH = 64, 8, 256
MAX_LAYERS = 3
GRID = BucketGrid(512, ((LENGTH, PROMPTS),), SLOTS)
CALLS = {
    "prefill": Call("prefill", PROMPTS, LENGTH, LENGTH),
    "decode": step_of(SLOTS, 512),
}
NUM_KV_HEADS = {
    "weight-stationary-1d-kv-copies": 2,
    "weight-stationary-1d-batch-attention": 4,
    "data-tensor-batch-attention": 2,
}
IN_A_LOOP = (
    "data-tensor",
    "sequence-parallel",
    "weight-gathered-all",
    "weight-stationary-1d",
    "weight-stationary-1d-batch-attention",
    "weight-stationary-1d-kv-copies",
    "weight-stationary-2d",
)
"""Layouts tested in a loop over layers, which takes one program, not two. Other layouts combine the
communication of these and of a ring."""
ONE_BY_ONE = {("embed-parallel", "decode")}
"""Layouts and phases tested without a loop in every run; prefill of this layout is in one."""
SENT_BY_OTHERS = {
    ("data-tensor", "decode"): "weight-stationary-1d-kv-copies",
    ("weight-gathered-all", "decode"): "weight-stationary-2d",
    ("weight-stationary-1d", "prefill"): "weight-stationary-1d-kv-copies",
    ("weight-stationary-1d", "decode"): "weight-stationary-1d-kv-copies",
}
"""Layouts and phases that only `--slow` compiles in a loop, and layouts of every run that send the
same in this phase."""
CUT = {("embed-parallel", "decode"), ("gpu-host", "decode")}
"""Cases where XLA for TPU turns a reduce-scatter into an all-reduce and a slice."""
EXPERTS = MoeConfig(Routing(num_experts=8, num_chosen=2), 1536)
LATENT = LatentAttention(rank=128, plain_dim=64, rope_dim=32, value_dim=64, query_rank=192)


def layout_of(name: str) -> Layout:
    return Layout.from_table(named_layout_tables()[name])


def config_of(name: str, num_layers: int, kind: str = "dense") -> DecoderConfig:
    """Return a model with dense layers, Mixtral's sparse layers, or DeepSeek's with latents."""
    config = DecoderConfig.alike(
        vocab_size=64,
        embed=512,
        mlp=1536,
        num_query_heads=16,
        num_kv_heads=NUM_KV_HEADS.get(name, 8),
        head_dim=64,
        windows=(None,) * 3,
        max_position=2048,
    )
    if kind != "dense":
        config = changed(config, moe=EXPERTS)
    if kind == "latent":
        moe = replace(EXPERTS, shared_mlp=256)
        head_dim = LATENT.head_dim
        config = changed(config, num_kv_heads=16, head_dim=head_dim, latent=LATENT, moe=moe)
    return config.first_layers(num_layers)


def collectives(
    layout: Layout,
    name: str,
    grid: BucketGrid,
    config: DecoderConfig,
    target: str,
    scan_layers: bool = False,
) -> Iterator[Collective]:
    """Yield all collectives except those of the report of a call with experts."""
    placement = find_target(target).placement(layout)
    definition = AbstractModel(config, placement.arrangement(config, scan_layers))
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(DTYPES[target]))
    (graph,) = (graph for graph in graphs if str(graph.key).startswith(name))
    shards = layout.mesh.num_devices // layout.mesh.sizes.get("tensor", 1)
    most_bytes = 0 if config.moe is None else MAX_LAYERS * shards * 8 * 4
    for one in read_collectives(compile_graph(graph)[0].as_text(), layout.mesh.sizes):
        if not is_of_report(one, most_bytes):
            yield one


def of_one_layer(
    layout: Layout, name: str, grid: BucketGrid = GRID, kind: str = "dense", target: str = TPU
) -> Counter:
    def of_layers(num_layers: int) -> Counter:
        config, counts = config_of(layout.name, num_layers, kind), Counter()
        for c in collectives(layout, name, grid, config, target):
            counts[c.kind, c.mesh_axes, c.num_bytes] += c.times
        return counts

    with ThreadPoolExecutor() as pool:
        two, three = pool.map(of_layers, (2, MAX_LAYERS))
    return three - two


def said_of_one_layer(
    layout: Layout, phase: str, kind: str = "dense", target: str = TPU
) -> Counter:
    config = config_of(layout.name, 1, kind)
    found = predict_collectives(config, layout, CALLS[phase], jnp.dtype(DTYPES[target]).itemsize)
    return Counter({(e.kind, e.mesh_axes, e.num_bytes): e.times for e in found})


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("name", "phase"),
    [
        pytest.param(name, phase, marks=[pytest.mark.slow] * ((name, phase) not in ONE_BY_ONE))
        for name in named_layout_tables()
        for phase in ("prefill", "decode")
    ],
)
def test_a_layer_of_every_named_layout_sends_what_is_said_and_nothing_else(name, phase):
    layout = layout_of(name)
    wanted = said_of_one_layer(layout, phase)
    assert of_one_layer(layout, phase) == (cut(wanted) if (name, phase) in CUT else wanted)


def cut(said: Counter) -> Counter:
    """Return the counts with an all-reduce instead of each reduce-scatter."""
    wanted = Counter()
    for (kind, mesh_axes, num_bytes), times in said.items():
        is_scatter = kind == "reduce-scatter"
        wanted["all-reduce" if is_scatter else kind, mesh_axes, num_bytes] += times
    return wanted


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["sparse", "latent"])
@pytest.mark.parametrize(
    "name", ["expert-tensor", "expert-parallel", "expert-stationary", "data-tensor"]
)
def test_a_sparse_layer_sends_what_is_said_and_nothing_else(name, kind, phase):
    layout = layout_of(name)
    assert of_one_layer(layout, phase, kind=kind) == said_of_one_layer(layout, phase, kind)


SPLIT, NEWEST = ("sequence-parallel", "decode"), pytest.mark.newest_libtpu
"""An older compiler sends an all-reduce here in place of a reduce-scatter."""


def of_one_turn(
    layout: Layout, name: str, grid: BucketGrid = GRID, kind: str = "dense", target: str = TPU
) -> Counter:
    """Count what one iteration of a loop over three layers sends, in loops of its own, too."""
    config, counts = config_of(layout.name, MAX_LAYERS, kind), Counter()
    for c in collectives(layout, name, grid, config, target, scan_layers=True):
        if MAX_LAYERS in c.loops:
            counts[c.kind, c.mesh_axes, c.num_bytes] += c.times // MAX_LAYERS
    return counts


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("name", "kind", "phase"),
    [
        *(
            pytest.param(
                name,
                "dense",
                phase,
                marks=[
                    *[NEWEST] * ((name, phase) == SPLIT),
                    *[pytest.mark.slow] * ((name, phase) in SENT_BY_OTHERS),
                ],
            )
            for name in IN_A_LOOP
            for phase in CALLS
        ),
        *(("expert-tensor", "sparse", phase) for phase in CALLS),
        ("embed-parallel", "dense", "prefill"),
        *(("ring", "dense", phase) for phase in CALLS),
        *(
            pytest.param("expert-tensor", "latent", phase, marks=pytest.mark.slow)
            for phase in CALLS
        ),
    ],
)
def test_a_turn_of_a_loop_over_layers_sends_what_is_said_of_a_layer(name, kind, phase):
    """The loop's trip count is known, and is the number of layers."""
    layout = layout_of(name)
    wanted = said_of_one_layer(layout, phase, kind)
    is_cut = (name, phase) in CUT
    assert of_one_turn(layout, phase, kind=kind) == (cut(wanted) if is_cut else wanted)


def test_layouts_of_every_run_send_what_is_said_of_those_of_slow_runs():
    for (name, phase), other in SENT_BY_OTHERS.items():
        said, wanted = (said_of_one_layer(layout_of(one), phase) for one in (name, other))
        times = [
            Counter({(kind, along): n for (kind, along, _), n in one.items()})
            for one in (said, wanted)
        ]
        assert (other, phase) not in SENT_BY_OTHERS
        assert times[0] == times[1], name


IN_A_LOOP_OR_ALONE = [
    pytest.param(of_one_turn, id="in a loop"),
    pytest.param(of_one_layer, id="alone", marks=pytest.mark.slow),
]


def bytes_by_axes(collectives: Counter) -> Counter:
    """XLA for CPU may send two arrays in one collective, or one in two."""
    sums = Counter()
    for (kind, mesh_axes, num_bytes), times in collectives.items():
        sums[kind, mesh_axes] += times * num_bytes
    return sums


@pytest.mark.parametrize("count", IN_A_LOOP_OR_ALONE)
@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("expert-tensor", "prefill"),
        ("expert-stationary", "prefill"),
        ("expert-stationary", "decode"),
        pytest.param("expert-tensor", "decode", marks=pytest.mark.slow),
        pytest.param("expert-parallel", "prefill", marks=pytest.mark.slow),
        pytest.param("expert-parallel", "decode", marks=pytest.mark.slow),
    ],
)
def test_a_sparse_layer_sends_the_same_bytes_on_the_cpu(name, phase, count):
    layout = layout_of(name)
    found = count(layout, phase, kind="sparse", target=CPU)
    assert bytes_by_axes(found) == bytes_by_axes(said_of_one_layer(layout, phase, "sparse", CPU))


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "name",
    [
        "data-tensor",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("ring", "data-tensor-batch-attention", "v5p-slice")
        ),
    ],
)
def test_a_call_of_pieces_in_pages_sends_what_is_said_and_nothing_else(name):
    """The pieces of all rows go to every device, and the partial results are merged."""
    layout, page = layout_of(name), 64
    groups = layout.mesh.num_shards(layout.phase("decode")[axes.ATTENTION_BATCH])
    shapes = 512, ((512, 4 * PROMPTS, page),), SLOTS
    grid = BucketGrid(*shapes, pages=512, page=page, slot_groups=groups)
    call = grid.prefill_call(grid.prefill[0])
    said = predict_collectives(config_of(name, 1), layout, call, itemsize=2)
    wanted = Counter({(e.kind, e.mesh_axes, e.num_bytes): e.times for e in said})
    assert of_one_turn(layout, "prefill", grid) == wanted
