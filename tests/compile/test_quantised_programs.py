"""Decode programs for TPU read codes as they are: no weight is widened or dequantised in memory."""

import jax.numpy as jnp
import pytest

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.planning.evidence import Evidence
from noria.compile.planning.work import Work
from noria.compile.programs.report import read_report
from noria.compile.targets import find_target
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.weight_formats import WeightFormat
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

LAYERS_OF_8B = DecoderConfig(
    vocab_size=16384,
    embed=4096,
    mlp=14336,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    windows=(None, None),
    max_position=8192,
)
"""Two layers of Llama-3.1-8B, with a small vocabulary."""
GRID = BucketGrid(512, ((128, 4),), 64, (256, 512), steps_per_call=4)
MOST_BYTES = 1.10


INT8, INT4 = WeightFormat("int8"), WeightFormat("int4", 128)
ASYMMETRIC = WeightFormat("uint4", 128, "float16", has_offsets=True)
"""The published format of AWQ, and of GPTQ with zero points."""
CASES = [
    (INT8, False),
    (INT8, True),
    (INT4, True),
    (ASYMMETRIC, False),
    pytest.param(INT4, False, marks=pytest.mark.slow),
    pytest.param(ASYMMETRIC, True, marks=pytest.mark.slow),
]


@pytest.mark.tpu_compile
@pytest.mark.parametrize(("form", "scan_layers"), CASES, ids=str)
def test_decode_moves_little_more_than_its_codes_and_scales(form, scan_layers):
    layout = Layout.from_table(read_layout_table("weight-stationary-1d@tensor=8"))
    target = find_target("tpu:v5e:2x4")
    placement = target.placement(layout)
    arrangement = placement.arrangement(LAYERS_OF_8B, scan_layers)
    rules = WeightRules(form)
    if form.is_published:
        weights = ("qkv", "output", "gate_up", "down")
        rules = WeightRules(published=tuple((f"*.{weight}", form) for weight in weights))
    model = AbstractModel(LAYERS_OF_8B, arrangement, rules)
    graphs = plan_graphs(model, GRID, placement, jnp.dtype("bfloat16"))
    decode = [graph for graph in graphs if graph.kind == "decode"][-1]
    _, text, _ = compile_with_text(decode)
    assert text is not None
    report = read_report(text, target.platform, dict(placement.mesh.shape))
    needed = Work(model, "bfloat16", layout).needed(GRID.decode_call(512))
    codes = 2 * 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336) * (1 if form.codes == "int8" else 0.5)
    assert codes / 8 < needed.weights < codes / 8 * 1.25 + 16384 * 4096 * 2 / 8 * 1.01
    assert Evidence(report, needed).ratio < MOST_BYTES
    assert report.step.converted_bytes == 0
