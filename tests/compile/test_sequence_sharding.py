"""Graphs over a ring: more devices need less memory each; sent bytes do not grow with the cache."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from alike import alike, changed
from laid_out import layout_of

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.graphs.graph_kinds import FORK, GraphKey
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.programs.collectives import read_collectives
from noria.compile.programs.hlo_text import read_program
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig

SLOTS, LONG, PROMPT = 16, 512, 1 << 18
CONFIG = DecoderConfig.alike(
    vocab_size=64,
    embed=256,
    mlp=512,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=64,
    windows=(None, 24),
    max_position=PROMPT,
)
RING_OPCODES = ("collective-permute-start", "collective-permute-done", "while")
ON_BOTH = pytest.mark.parametrize(
    "target", ["cpu:8", pytest.param("tpu:v5e:2x4", marks=pytest.mark.tpu_compile)]
)


@cache
def compiled(
    target: str, num_devices: int, key: GraphKey, grid: BucketGrid, config: DecoderConfig = CONFIG
) -> jax.stages.Compiled:
    placement = find_target(target).placement(layout_of(f"ring@sequence={num_devices}"))
    graphs = plan_graphs(AbstractModel(config), grid, placement, jnp.dtype(jnp.float32))
    return compile_graph(next(graph for graph in graphs if graph.key == key))[0]


def cache_bytes(grid: BucketGrid) -> int:
    """Return the bytes of pages of both layers, of which one has a window."""
    pages = grid.most_pages + grid.decode_slots * grid.window_pages(24)
    return pages * grid.page * 2 * alike(CONFIG).num_kv_heads * alike(CONFIG).head_dim * 4


@ON_BOTH
def test_a_step_costs_two_sums_a_layer_and_no_permute(target):
    """Every device has entries of each page."""
    grid = BucketGrid(LONG, ((64, 1),), SLOTS, steps_per_call=4)
    program = compiled(target, 8, GraphKey("decode"), grid)
    found = read_collectives(program.as_text(), {"sequence": 8})
    lse = SLOTS * alike(CONFIG).num_query_heads * 4
    each = {("all-reduce", lse): 2, ("all-reduce", lse * (alike(CONFIG).head_dim + 1)): 2}
    assert Counter((c.kind, c.num_bytes) for c in found) == each


@pytest.mark.tpu_compile
def test_the_next_keys_are_in_flight_while_a_device_attends():
    """In the ring's loop, both permutes start before the loop of attention, and end after it."""
    length = 8192
    grid = BucketGrid(length, ((length, 1),), 8)
    key = GraphKey("prefill", grid.prefill[0])
    config = changed(CONFIG, windows=(None,))
    program = compiled("tpu:v5e:2x4", 8, key, grid, config)
    computations = read_program(program.as_text()).computations
    order = [
        [one.opcode for one in computation.instructions.values() if one.opcode in RING_OPCODES]
        for computation in computations.values()
    ]
    start, done = "collective-permute-start", "collective-permute-done"
    in_ring = [opcodes for opcodes in order if start in opcodes]
    assert in_ring == [[start, start, "while", done, done]]


def test_a_fork_moves_nothing():
    """Each device copies its own entries."""
    grid = BucketGrid(LONG, ((64, 2),), SLOTS)
    program = compiled("cpu:8", 8, FORK, grid)
    assert read_collectives(program.as_text(), {"sequence": 8}) == []


def test_what_a_device_holds_of_a_prompt_falls_with_the_devices():
    """The cache falls exactly, in place; so do temporaries, except positions and score blocks.

    On a ring, a layer's own keys and values stay until they are written, next to those that
    travel.
    """
    grid = BucketGrid(PROMPT, ((PROMPT, 1),), 1, row_tokens=1)
    key = GraphKey("prefill", grid.prefill[0])
    memory = {n: compiled(f"cpu:{n}", n, key, grid).memory_analysis() for n in (1, 2, 8)}
    kept = cache_bytes(grid)
    num_own = (
        2 * CONFIG.num_layers * PROMPT * alike(CONFIG).num_kv_heads * alike(CONFIG).head_dim * 4
    )
    for n, of_device in memory.items():
        saved = memory[1].alias_size_in_bytes - of_device.alias_size_in_bytes
        assert saved == kept - kept // n
        least = 1.02 * memory[1].temp_size_in_bytes
        assert of_device.temp_size_in_bytes < (least + (n > 1) * num_own) / n


def test_what_a_device_holds_of_the_cache_beside_a_chunk_falls_with_the_devices():
    """The cache falls exactly, in place; a device needs less else than its keys of one layer."""
    span, slots = 1 << 14, 2
    grid = BucketGrid(span, ((span, 1, 256),), slots, row_tokens=256)
    key = GraphKey("prefill", grid.prefill[0])
    memory = {n: compiled(f"cpu:{n}", n, key, grid).memory_analysis() for n in (1, 8)}
    kept = cache_bytes(grid)
    saved = memory[1].alias_size_in_bytes - memory[8].alias_size_in_bytes
    assert saved == kept - kept // 8
    keys = slots * span * alike(CONFIG).num_kv_heads * alike(CONFIG).head_dim * 4
    assert memory[8].temp_size_in_bytes < keys // 8


def test_the_work_of_a_chunk_is_shared_out():
    """Devices share projections, MLP and attention: each has a stripe of every page.

    The compiler counts one turn of the loop over pages, of which all devices run as many.
    """
    grid = BucketGrid(LONG, ((LONG, 1, 256),), 1)
    key = GraphKey("prefill", grid.prefill[0])
    one, shared = (compiled(f"cpu:{n}", n, key, grid).cost_analysis()["flops"] for n in (1, 8))
    assert shared < 1.02 * one / 8
