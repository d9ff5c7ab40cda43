"""Models compiled for H100s that are not present: what the compiler reports, moves and omits."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from alike import alike, changed
from layers_of_8b import LAYERS_OF_8B

from noria.compile.abstract_model import AbstractModel
from noria.compile.attention_kernels import AttentionPlan
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.layout_measure import COMPILER, SHAPES, MeasuredModel, measure
from noria.compile.planning.work import ONE_DEVICE, Work
from noria.compile.programs.collectives import read_collectives
from noria.compile.programs.executions import Executions
from noria.compile.programs.hbm_bytes import Traffic
from noria.compile.programs.hlo_text import array_bytes, read_program
from noria.compile.programs.report import read_report
from noria.compile.targets import find_target
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.modelzoo.weights.weight_formats import WeightFormat
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

NUM_LAYERS = 2
CONFIG = DecoderConfig.alike(
    vocab_size=512,
    embed=256,
    mlp=512,
    num_query_heads=16,
    num_kv_heads=8,
    head_dim=64,
    windows=(None,) * NUM_LAYERS,
    max_position=256,
)
GRID = BucketGrid(256, ((128, 4),), 8)
TENSOR = Layout.from_table(read_layout_table("weight-stationary-1d@tensor=8"))
WITHOUT_CUDNN = AttentionPlan(prefill="xla")
LAYER_OF_8B = LAYERS_OF_8B.first_layers(1)
GRID_OF_8B = BucketGrid(512, ((512, 8),), 64, page=128, steps_per_call=4)
SMALLEST = 4096 * 4096
"""The numbers of the smallest weight of a product, and half of those of keys or values."""

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
    return measure(MeasuredModel(CONFIG, GRID, "bfloat16", WITHOUT_CUDNN), TENSOR, target)


@pytest.mark.parametrize(("name", "count"), [("gpu:a100:4", 4), ("gpu:h200:16", 16)])
def test_gpus_need_not_be_present(name, count):
    target = find_target(name)
    assert not target.is_present
    assert (target.platform, len(target.devices)) == ("gpu", count)


def test_gpus_are_found_without_a_setting_of_the_environment():
    """The plugin looks for a driver if jax may start it, and is not registered without one."""
    code = (
        "from noria.compile.targets import find_target; import jax; "
        "print(len(find_target('gpu:h100:8').devices), jax.devices()[0].platform)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "8 cpu\n", done.stderr


def test_kernels_of_mosaic_compile():
    """A block is copied into the memory of a core while others compute."""
    sharding = find_target("gpu:h100:1").placement().replicated

    def double(x, out, shared, barrier):
        plgpu.copy_gmem_to_smem(x, shared, barrier)
        plgpu.barrier_wait(barrier)
        out[...] = shared[...] * 2

    numbers = jax.ShapeDtypeStruct((128,), jnp.float32, sharding=sharding)
    scratch = [plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()]
    kernel = plgpu.kernel(
        double, out_type=numbers, grid=(1,), grid_names=("i",), scratch_types=scratch
    )
    text = jax.jit(kernel).lower(numbers).compile().as_text()
    assert text is not None and "mosaic_gpu" in text


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
    on_cpu = measure(MeasuredModel(CONFIG, GRID, "bfloat16"), TENSOR, find_target("cpu:8"))
    assert (result.flops_from, on_cpu.flops_from) == (SHAPES, COMPILER)
    assert result.flops_by_phase["prefill"] == pytest.approx(
        on_cpu.flops_by_phase["prefill"], rel=0.2
    )
    longest = Work(AbstractModel(CONFIG), "bfloat16", TENSOR).parts(GRID.decode_call())
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
        if graph.key == GraphKey("decode")
    )
    _, text, _ = compile_with_text(graph)
    sizes = {"data": 1} if layout is None else layout.mesh.sizes
    report = read_report(text, "gpu", sizes, None, None, min_bytes=4096)
    assert {one.argument.split(".")[-1] for one in report.rewrites} <= {"logits_BV"}
    assert not any(one.is_converted for one in report.rewrites)
    # keys and values of pages
    moved = r"= bf16\[(\d+,)*64,64\]\S* (copy|transpose|gather)\("
    assert not re.search(moved, text)


def compile_8b(
    kind: str, rules: WeightRules, cache_codes: str | None, config: DecoderConfig = LAYER_OF_8B
):
    """Return the graph of a kind of a layer of 8B: its executable, text and model."""
    placement = find_target("gpu:h100:1").placement(None)
    arrangement = placement.arrangement(config, cache_codes=cache_codes)
    model, dtype = AbstractModel(config, arrangement, rules), jnp.dtype("bfloat16")
    graphs = plan_graphs(model, GRID_OF_8B, placement, dtype, attention=WITHOUT_CUDNN)
    (graph,) = (graph for graph in graphs if graph.key.kind == kind)
    executable, text, _ = compile_with_text(graph)
    assert text is not None
    return executable, text, model


def written_arrays(text: str) -> Iterator[tuple[str, int]]:
    """Yield the dtype and the numbers of each array that a step writes to memory."""
    program = read_program(text)
    traffic = Traffic(program)
    for execution in Executions(program, traffic):
        if traffic.written(execution.computation, execution.instruction):
            for array in execution.instruction.arrays:
                dtype, sizes = array.rstrip("]").split("[")
                yield dtype, math.prod(map(int, filter(None, sizes.split(","))))


@pytest.mark.parametrize(
    ("form", "cache_codes", "most_bytes"),
    [
        (WeightFormat("int8"), "int8", 1.5),
        (WeightFormat("float8_e4m3fn"), "float8_e4m3fn", 1.5),
        (WeightFormat("float8_e4m3fn", 0, "float32"), None, 1.5),
        (WeightFormat("int4"), "int4", 1.8),
        (WeightFormat("int4", 128), "int8", 1.4),
        (WeightFormat("float8_e4m3fn", 128, "float32"), "float8_e4m3fn", 1.4),
        (WeightFormat("int8", 0, "bfloat16", has_offsets=True), "int8", 1.6),
        # codes without a sign are written as codes with a sign in each step
        (WeightFormat("uint4", 128, "float16", has_offsets=True), "int8", 2.6),
    ],
    ids=str,
)
def test_decode_widens_no_weight_and_no_cache_in_codes(form, cache_codes, most_bytes):
    """A product reads codes, and converts them as it multiplies; pages are updated in place.

    The bytes beyond those needed are partial sums and other float32 results beside the weights. A
    program without codes moves as many.
    """
    rules = WeightRules(form)
    if form.is_published:
        rules = WeightRules(published=(("layers.*.attention.*", form), ("layers.*.mlp.*", form)))
    _, text, model = compile_8b("decode", rules, cache_codes)
    assert len(model.quantisations) == 4
    codes = {"s8", "s4", "u4", "f8e4m3fn"}
    large = {dtype for dtype, numbers in written_arrays(text) if numbers >= SMALLEST}
    assert large <= (codes if cache_codes else {"bf16"}), "only the cache is large"
    report = read_report(text, "gpu", {"data": 1})
    assert report.step.converted_bytes == 0
    # codes of four bits are put in another order before the steps of a call
    in_steps = (one.argument for one in report.rewrites if not one.is_once)
    assert {argument.split(".")[-1] for argument in in_steps} <= {"logits_BV"}
    needed = Work(model, "bfloat16", ONE_DEVICE).needed(GRID_OF_8B.decode_call())
    assert report.step.bytes_moved < most_bytes * needed.total


@pytest.mark.parametrize(
    ("form", "cache_codes"),
    [
        (WeightFormat("int4", 128), "int8"),
        (WeightFormat("int8"), "int8"),
        (WeightFormat("int8"), "float8_e4m3fn"),
    ],
    ids=str,
)
def test_decode_widens_no_weight_of_latents_and_no_latent(form, cache_codes):
    """Two weights have the same activations, one with groups along features of the result."""
    latent = LatentAttention(rank=512, plain_dim=256, rope_dim=64, value_dim=256, query_rank=1536)
    heads = {"num_query_heads": 16, "num_kv_heads": 16, "head_dim": latent.head_dim}
    config = changed(LAYER_OF_8B, **heads, latent=latent)
    _, text, _ = compile_8b("decode", WeightRules(form), cache_codes, config)
    absorbed = alike(config).num_query_heads * latent.plain_dim * latent.rank
    cache = GRID_OF_8B.decode_slots * 512 * (latent.rank + latent.rope_dim)
    # without groups, XLA splits the inputs of products, and writes float32 sums of the parts
    smallest = absorbed if form.group else cache
    large = {dtype for dtype, numbers in written_arrays(text) if numbers >= smallest}
    assert large <= {"s8", "s4", "f8e4m3fn"}
    assert read_report(text, "gpu", {"data": 1}).step.converted_bytes == 0


def test_weights_in_groups_need_little_memory_for_prompts():
    """The products of groups are never written: they would be 32 times as large as their sum."""
    executable, _, model = compile_8b("prefill", WeightRules(WeightFormat("int4", 128)), "int8")
    widened = max(math.prod(leaf.shape) for leaf in model.abstract_parameters("bfloat16").values())
    rows, hidden = 512 * 8, 2 * alike(LAYER_OF_8B).mlp
    memory = executable.memory_analysis()
    assert memory.temp_size_in_bytes < 2 * widened + 1.5 * rows * hidden * 4


def test_gathered_weights_in_int4_are_sent_as_two_codes_a_byte():
    layout = Layout.from_table(read_layout_table("weight-gathered-all@data=2,tensor=4"))
    grid = BucketGrid(256, ((128, 8),), 8, slot_groups=2)

    def gathered_bytes(codes: str) -> int:
        """Return the bytes of codes that devices gather in a prefill call."""
        placement = find_target("gpu:h100:8").placement(layout)
        rules = WeightRules(WeightFormat(codes))
        model = AbstractModel(CONFIG, placement.arrangement(CONFIG), rules)
        dtype = jnp.dtype("bfloat16")
        graphs = plan_graphs(model, grid, placement, dtype, attention=WITHOUT_CUDNN)
        (prefill,) = (graph for graph in graphs if graph.key.kind == "prefill")
        _, text, _ = compile_with_text(prefill)
        assert text is not None
        found = read_collectives(text, layout.mesh.sizes)
        gathers = [x for one in found if one.kind == "all-gather" for x in one.arrays]
        return sum(array_bytes(array) for array in gathers if array.startswith(("s8", "s4")))

    # XLA may gather the parts of a weight over the mesh axes in another order
    assert 0.4 < gathered_bytes("int4") / gathered_bytes("int8") < 0.6
