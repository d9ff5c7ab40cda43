"""Decode programs for TPU read codes as they are: none is widened or dequantised in memory."""

import re

import jax.numpy as jnp
import pytest
from layers_of_8b import LAYERS_OF_8B

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.planning.evidence import Evidence
from noria.compile.planning.work import ONE_DEVICE, Work
from noria.compile.programs.report import read_report
from noria.compile.targets import find_target
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.weights.weight_formats import WeightFormat
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout
from noria.sharding.placement import arrangement_of

GRID = BucketGrid(512, ((128, 4),), 16, steps_per_call=4)
ONE_LAYER = LAYERS_OF_8B.first_layers(1)
MOST_BYTES = 1.10


INT8, FLOAT8 = WeightFormat("int8"), WeightFormat("float8_e4m3fn")
INT4 = WeightFormat("int4", 128)
ASYMMETRIC = WeightFormat("uint4", 128, "float16", has_offsets=True)
"""The published format of AWQ, and of GPTQ with zero points."""
CASES = [
    (INT8, True),
    (FLOAT8, False),
    (INT4, True),
    (ASYMMETRIC, False),
    # the layer of another test has such codes, and activations in integers
    pytest.param(INT8, False, marks=pytest.mark.slow),
    pytest.param(INT4, False, marks=pytest.mark.slow),
    pytest.param(ASYMMETRIC, True, marks=pytest.mark.slow),
]


def read_decode(model: AbstractModel, layout: Layout | None, grid: BucketGrid):
    """Return the report of the decode program, the bytes it needs, and its text.

    Without a layout, it is a program of one chip.
    """
    target = find_target("tpu:v5e:2x4" if layout else "tpu:v5e:1x1")
    placement = target.placement(layout)
    graphs = plan_graphs(model, grid, placement, jnp.dtype("bfloat16"))
    (decode,) = (graph for graph in graphs if graph.key.kind == "decode")
    _, text, _ = compile_with_text(decode)
    assert text is not None
    report = read_report(text, target.platform, dict(placement.mesh.shape))
    work = Work(model, "bfloat16", layout or ONE_DEVICE)
    return report, work.needed(grid.decode_call()), text


@pytest.mark.tpu_compile
@pytest.mark.parametrize(("form", "scan_layers"), CASES, ids=str)
def test_decode_moves_little_more_than_its_codes_and_scales(form, scan_layers):
    layout = Layout.from_table(read_layout_table("weight-stationary-1d@tensor=8"))
    arrangement = arrangement_of(layout, "tpu", LAYERS_OF_8B, scan_layers)
    rules = WeightRules(form)
    if form.is_published:
        weights = ("qkv", "output", "gate_up", "down")
        rules = WeightRules(published=tuple((f"*.{weight}", form) for weight in weights))
    model = AbstractModel(LAYERS_OF_8B, arrangement, rules)
    report, needed, _ = read_decode(model, layout, GRID)
    codes = (
        2 * 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336) * (0.5 if form.codes.endswith("int4") else 1)
    )
    assert codes / 8 < needed.weights < codes / 8 * 1.25 + 16384 * 4096 * 2 / 8 * 1.01
    assert Evidence(report, needed).ratio < MOST_BYTES
    assert report.step.converted_bytes == 0


@pytest.mark.tpu_compile
def test_decode_writes_no_values_of_a_weight_that_is_larger_than_the_memory_on_the_chip():
    """The values of gate and up would take 235 MB."""
    arrangement = find_target("tpu:v5e:1x1").placement(None).arrangement(ONE_LAYER, False, None)
    model = AbstractModel(ONE_LAYER, arrangement, WeightRules(INT4))
    report, needed, _ = read_decode(model, None, GRID)
    assert Evidence(report, needed).ratio < MOST_BYTES


@pytest.mark.tpu_compile
@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_decode_reads_a_cache_in_codes_once_and_as_it_is(codes):
    layout = Layout.from_table(read_layout_table("weight-stationary-1d@tensor=8"))
    grid = BucketGrid(4096, ((128, 4),), 32, steps_per_call=4, page=128)
    arrangement = arrangement_of(layout, "tpu", ONE_LAYER, cache_codes=codes)
    report, needed, _ = read_decode(AbstractModel(ONE_LAYER, arrangement), layout, grid)
    # one head of keys and values, with two scales in bfloat16
    codes_bytes = 2 * 128 // (2 if codes == "int4" else 1)
    assert needed.cache == 32 * 4096 * (codes_bytes + 2 * 2)
    assert report.step.converted_bytes == 0
    assert report.step.loop_turns == 0
    # libtpu 0.0.42 copies the logits that a step begins with
    moved = report.step.bytes_moved - 2 * report.step.copied_bytes
    assert moved < MOST_BYTES * needed.total
    assert {one.argument.split(".")[-1] for one in report.rewrites} <= {"logits_BV"}


@pytest.mark.tpu_compile
def test_products_with_int8_activations_multiply_integers():
    layout = Layout.from_table(read_layout_table("weight-stationary-1d@tensor=8"))
    rules = WeightRules(WeightFormat("int8"), rounds_activations=True)
    model = AbstractModel(ONE_LAYER, arrangement_of(layout, "tpu", ONE_LAYER), rules)
    report, needed, text = read_decode(model, layout, GRID)
    products = re.findall(r"= (\w+)\[[\d,]*\]\S* convolution\(", text)
    # of queries, keys and values, of the output of attention, of gate and up, and of down
    assert products.count("s32") == 4, products
    assert Evidence(report, needed).ratio < MOST_BYTES
    assert report.step.converted_bytes == 0
