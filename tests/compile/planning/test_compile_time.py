"""Predicted compile times against recorded compile times."""

import json
from pathlib import Path

import pytest

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.planning.compile_time import GraphSeconds

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
RECORD = BENCHMARKS / "whole_plans.json"
STARTS = json.loads((BENCHMARKS / "bundle_start.json").read_text("utf-8"))["plans"]
LAYERS = {"llama-3.1-8b": 32, "llama-3.1-70b": 80}
CASES = {
    name: case
    for name, case in json.loads(RECORD.read_text("utf-8"))["cases"].items()
    if name.partition(" on ")[0] in LAYERS and case.get("is_done") and "graphs" in case
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_compiles_about_as_long_as_is_predicted(name):
    """The prediction is within a factor of 1.5 of half the processor's seconds, for every case."""
    case, (model, target) = CASES[name], name.split(" on ")
    prefill = tuple((length, rows) for length, rows in case["prefill"])
    grid = BucketGrid(case["max_length"], prefill, case["decode_slots"])
    # a loop over equal layers defines one layer
    num_layers = 1 if ", scanned" in name else LAYERS[model]
    entries = case["decode_slots"] * grid.max_length * LAYERS[model]
    each = GraphSeconds.predicted(
        target.partition(":")[0], num_layers, case["cache_bytes"] / entries
    )
    predicted = each.of_grid(grid)
    measured = sum(graph["cpu_seconds"] for graph in case["graphs"].values()) / 2
    assert measured / 1.5 < predicted < measured * 1.5


@pytest.mark.parametrize("name", STARTS)
def test_on_the_cpu_a_plan_compiles_about_as_long_as_its_bundle_saves(name):
    """The prediction is within a factor of 1.5; the embedded model has 30 layers."""
    start = STARTS[name]
    table = dict(start["buckets"])
    # the recorded plans have a decode graph for each span of a cache without pages
    more = len(table.pop("decode_spans", [None])) - 1
    each, grid = GraphSeconds.predicted("cpu", 30, 0), BucketGrid.from_table(table)
    seconds = start["median_seconds"]
    saved = seconds["cold"] - seconds["bundle"]
    assert saved / 1.5 < each.of_grid(grid) + more * each.decode < saved * 1.5


def test_scored_prompts_have_graphs_of_their_own():
    each = GraphSeconds(prefill=3.0, decode=5.0)
    prefill = (16, 2), (32, 1)
    assert each.of_grid(BucketGrid(64, prefill, 4)) == 2 * 3 + 5
    assert each.of_grid(BucketGrid(64, prefill, 4, score=True)) == 4 * 3 + 5
    assert each.of_grid(BucketGrid(64, prefill, 0, score=True)) == 2 * 3
