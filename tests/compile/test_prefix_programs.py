"""Decode programs read the pages of a prefix once a step, whatever the number of its rows.

The shapes are those of Llama-3.1-8B with two layers and few ids, compiled for chips that are not
there.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import pytest

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.planning.evidence import Evidence
from noria.compile.planning.work import Work
from noria.compile.programs.report import read_report
from noria.compile.targets import find_target
from noria.runtime.checkpoint import open_model
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

pytestmark = pytest.mark.tpu_compile

MODEL = Path(__file__).resolve().parents[2] / "benchmarks" / "models" / "llama-3.1-8b"
LAYOUT = "weight-stationary-1d@tensor=8"
OWN, SHARED, SLOTS, PAGE = 256, 1024, 64, 64


@cache
def evidence_of(num_groups: int) -> Evidence:
    """Compile and read a decode step of 64 rows; 0 groups have no prefix."""
    with open_model(str(MODEL), needs_weights=False) as files:
        config = replace(files.spec.config.first_layers(2), vocab_size=4096)
    layout = Layout.from_table(read_layout_table(LAYOUT))
    target = find_target("tpu:v5e:2x4")
    placement = target.placement(layout)
    definition = AbstractModel(config, placement.arrangement(config))
    prefixes = None
    if num_groups:
        listed = (PlannedPrefix(SHARED, "0" * 16),)
        prefixes = PrefixGrid(num_groups, SLOTS // num_groups, SHARED, listed)
    # XLA would move a pool into faster memory that has room for it
    length, pages = OWN + SHARED, 16_000
    grid = BucketGrid(length, ((length, 8, 64),), SLOTS, pages=pages, page=PAGE, prefixes=prefixes)
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(jnp.bfloat16))
    (graph,) = (graph for graph in graphs if graph.key.kind == "decode")
    _, text, _ = compile_with_text(graph)
    assert text is not None
    report = read_report(text, target.platform, dict(placement.mesh.shape))
    return Evidence(report, Work(definition, "bfloat16", layout).needed(grid.decode_call()))


@pytest.mark.parametrize("num_groups", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_step_moves_little_more_than_weights_own_entries_and_prefixes(num_groups):
    evidence, alone = evidence_of(num_groups), evidence_of(0)
    assert evidence.report.step.loop_turns == evidence.report.step.copied_bytes == 0
    # two layers have one head of 128 features a device: keys and values of two bytes
    prefix_bytes = num_groups * 2 * SHARED * 2 * 128 * 2
    added = evidence.report.step.bytes_moved - alone.report.step.bytes_moved
    assert added < 1.3 * prefix_bytes < SLOTS * prefix_bytes / num_groups
