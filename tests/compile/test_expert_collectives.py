"""Communication of sparse layers, compiled for a TPU slice that is not present.

As for dense layers, the difference between graphs of three and of two layers is one layer.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax.numpy as jnp
import pytest
from expert_reports import is_of_report

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.programs.collectives import read_collectives
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.moe_config import MoeConfig, Routing
from noria.runtime.files.layout_files import named_layout_tables
from noria.sharding.layout import Layout

pytestmark = pytest.mark.tpu_compile

TARGET = "tpu:v5e:2x4"
SLOTS, PROMPTS, LENGTH, EMBED, BYTES = 64, 8, 256, 512, 2
NUM_EXPERTS, CHOSEN = 8, 2
KV_HEADS, HEAD_DIM = 8, 64
GRID = BucketGrid(512, ((LENGTH, PROMPTS),), SLOTS)
TOKENS = {"prefill": PROMPTS * LENGTH, "decode": SLOTS}
MAX_LAYERS = 3
WEIGHTS_OF_ONE_EXPERT = 3 * EMBED * 1536 * BYTES


def layout_of(name: str) -> Layout:
    return Layout.from_table(named_layout_tables()[name])


def compiled(layout: Layout, phase: str, num_layers: int):
    config = DecoderConfig.alike(
        vocab_size=64,
        embed=EMBED,
        mlp=1536,
        num_query_heads=16,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        windows=(None,) * num_layers,
        max_position=2048,
        moe=MoeConfig(Routing(NUM_EXPERTS, CHOSEN), 1536),
    )
    placement = find_target(TARGET).placement(layout)
    definition = AbstractModel(config, placement.arrangement(config))
    graphs = plan_graphs(definition, GRID, placement, jnp.dtype(jnp.bfloat16))
    (graph,) = (graph for graph in graphs if graph.key.kind == phase)
    return compile_graph(graph)[0]


def collectives(program, layout: Layout) -> Counter:
    """Count all collectives except those of the report of a call."""
    shards = layout.mesh.num_devices // layout.mesh.sizes.get("tensor", 1)
    most_bytes = MAX_LAYERS * shards * NUM_EXPERTS * 4
    found = read_collectives(program.as_text(), layout.mesh.sizes)
    return Counter(
        (c.kind, c.mesh_axes, c.num_bytes) for c in found if not is_of_report(c, most_bytes)
    )


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("expert-tensor", "prefill"),
        pytest.param("expert-tensor", "decode", marks=pytest.mark.slow),
        pytest.param("expert-parallel", "prefill", marks=pytest.mark.slow),
        pytest.param("expert-parallel", "decode", marks=pytest.mark.slow),
        pytest.param("expert-stationary", "prefill", marks=pytest.mark.slow),
        pytest.param("expert-stationary", "decode", marks=pytest.mark.slow),
    ],
)
def test_a_sparse_layer_exchanges_tokens_twice_and_gathers_no_expert(name, phase):
    """Tokens go to experts with their choices and weights, and return without them, a row each.

    In prefill, keys and values go to every device that may have the slots of their rows.
    """
    layout = layout_of(name)
    mesh = layout.mesh.sizes
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(partial(compiled, layout, phase), (2, MAX_LAYERS)))
    two, three = (collectives(program, layout) for program in programs)
    # each device sends its tokens to every device of its exchange
    exchanging = mesh.get("expert", 1)
    sent = TOKENS[phase] // (mesh.get("data", 1) * exchanging) * exchanging
    words_of_choices = CHOSEN + CHOSEN * 4 // BYTES
    wanted = Counter()
    if exchanging > 1:
        wanted["all-to-all", ("expert",), sent * (EMBED + words_of_choices) * BYTES] += 1
        wanted["all-to-all", ("expert",), sent * EMBED * BYTES] += 1
    if "tensor" in mesh:
        # the sum of attention, and the sum over the experts' hidden size or over experts
        residual = TOKENS[phase] // (mesh.get("data", 1) * exchanging) * EMBED * BYTES
        wanted["all-reduce", ("tensor",), residual] += 2
    rows = tuple(axis for axis in mesh if axis in layout.rules["batch"])
    if phase == "prefill" and rows:
        entries = TOKENS[phase] * KV_HEADS // mesh.get("tensor", 1) * HEAD_DIM * BYTES
        wanted["all-gather", rows, entries] += 2
    assert three - two == wanted
    # products do not copy weights either
    assert programs[0].memory_analysis().temp_size_in_bytes < 4 * WEIGHTS_OF_ONE_EXPERT
