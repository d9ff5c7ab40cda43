"""A small model compiled for H100s that are not present: what the compiler reports, and omits."""

import re
from importlib.util import find_spec

import jax.numpy as jnp
import pytest

from noria.compile.abstract_model import AbstractModel
from noria.compile.attention_kernels import AttentionPlan
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.layout_measure import COMPILER, SHAPES, measure
from noria.compile.planning.work import Work
from noria.compile.programs.report import read_report
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.call import Call
from noria.sharding.layout import Layout

NUM_LAYERS = 2
CONFIG = DecoderConfig(
    vocab_size=512,
    embed=256,
    mlp=512,
    num_query_heads=16,
    num_kv_heads=8,
    head_dim=64,
    windows=(None,) * NUM_LAYERS,
    max_position=256,
)
GRID = BucketGrid(max_length=256, prefill=((128, 4),), decode_slots=8, decode_spans=(128, 256))
TENSOR = Layout.from_table(read_layout_table("weight-stationary-1d@tensor=8"))
WITHOUT_CUDNN = AttentionPlan(prefill="xla")

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        find_spec("jax_cuda12_plugin") is None or find_spec("nvidia") is None,
        reason="needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12",
    ),
]


@pytest.fixture(scope="module")
def result():
    target = find_target("gpu:h100:8")
    return measure(CONFIG, TENSOR, target, GRID, "bfloat16", attention=WITHOUT_CUDNN)


@pytest.mark.parametrize(("name", "count"), [("gpu:a100:4", 4), ("gpu:h200:16", 16)])
def test_gpus_need_not_be_present(name, count):
    target = find_target(name)
    assert not target.is_present
    assert (target.platform, len(target.devices)) == ("gpu", count)


def test_every_graph_says_what_memory_it_needs(result):
    assert result.findings == []
    of_state = 2 * NUM_LAYERS * 8 * 8 * 64 * 256 * 2
    assert result.bytes_per_device["cache"] * 8 == of_state
    assert all(result.temp_by_phase[phase] > 0 for phase in ("prefill", "decode"))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_collectives_of_a_layer_agree_with_the_formula(result, phase):
    """The layer has two sums of the residual stream: after attention, and after the MLP."""
    found = [
        c for c in result.collectives if c.phase == phase and not c.conditional and c.per_layer
    ]
    assert [(c.kind, c.axis, c.per_layer) for c in found] == [("all-reduce", "tensor", 2)]
    assert found[0].bytes_per_layer == found[0].formula_bytes_per_layer


def test_operations_that_the_compiler_does_not_count_are_those_of_the_shapes(result):
    on_cpu = measure(CONFIG, TENSOR, find_target("cpu:8"), GRID, "bfloat16")
    assert (result.flops_from, on_cpu.flops_from) == (SHAPES, COMPILER)
    assert result.flops_by_phase["prefill"] == pytest.approx(
        on_cpu.flops_by_phase["prefill"], rel=0.2
    )
    longest = Work(AbstractModel(CONFIG), "bfloat16", TENSOR).parts(Call.of_step(8, 256))
    assert result.flops_by_phase["decode"] == sum(part.flops for part in longest)


@pytest.mark.parametrize(
    ("name", "layout"), [("gpu:h100:1", None), ("gpu:h100:8", TENSOR)], ids=["1", "8"]
)
def test_decode_reads_weights_and_cache_as_they_lie(name, layout):
    """A step copies no argument except the logits, from which it chooses tokens."""
    placement = find_target(name).placement(layout)
    definition = AbstractModel(CONFIG, placement.arrangement(CONFIG))
    (graph,) = (
        graph
        for graph in plan_graphs(definition, GRID, placement, jnp.dtype("bfloat16"))
        if graph.name == "decode span 256"
    )
    _, text, _ = compile_with_text(graph)
    sizes = {"data": 1} if layout is None else layout.mesh.sizes
    report = read_report(text, "gpu", sizes, None, None, min_bytes=4096)
    assert {one.argument.split(".")[-1] for one in report.rewrites} <= {"logits_BV"}
    assert not any(one.is_converted for one in report.rewrites)
    # keys and values of a segment, in either order
    moved = r"= bf16\[(\d+,)*(64,128|128,64)\]\S* (copy|transpose|gather)\("
    assert not re.search(moved, text)
