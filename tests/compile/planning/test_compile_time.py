"""Predicted compile times against recorded compile times."""

import json
from pathlib import Path

import pytest

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.planning.candidates import Budget
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1000 + 100 + 10 + 2),
        ({"score": True}, 1000 + 100 + 10 + 4),
        ({"score": True, "decode_slots": 0}, 1000 + 2),
    ],
    ids=str,
)
def test_every_graph_of_a_job_counts(options, expected):
    each = GraphSeconds(prefill=1, decode=10, fork=100, empty_state=1000)
    grid = BucketGrid(64, ((16, 2), (32, 1)), **{"decode_slots": 4, **options})
    assert each.of_grid(grid) == expected


def test_the_graphs_beside_those_of_prompts_count_against_the_time_to_compile():
    each = GraphSeconds(prefill=1, decode=10, fork=100, empty_state=1000)
    budget = Budget(compile_seconds=1112, graph_seconds=each)
    assert budget.with_affordable_graphs(score=False).prefill_graphs == 2
    assert budget.with_affordable_graphs(score=True).prefill_graphs == 1
