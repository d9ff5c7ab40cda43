"""The table of a job's plan, and the work that its padding wasted."""

import pytest
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.planning.work import Work
from noria.runtime.batch.plan_report import plan_table, with_waste
from noria.runtime.engine.actions import ReadEntries
from noria.runtime.engine.metrics import EngineMetrics, PrefillUse, prefill_name
from noria.sharding.layout import Layout

MODEL = PlannedModel("tiny", "")
GRID = BucketGrid(64, ((16, 4), (32, 2)), 8, page=16, steps_per_call=4)
LAYOUT = Layout.from_table({"name": "two", "mesh": {"data": 2}, "rules": {"batch": "data"}})


def work_of(layout=None) -> Work:
    return Work(AbstractModel(CONFIG), "float32", layout)


def test_a_plan_is_a_few_lines_of_its_sizes():
    table = plan_table(Plan("cpu", MODEL, Numbers("float32"), GRID), work_of())
    lines = table.splitlines()
    assert lines[:4] == [
        "plan     cpu, tiny, float32",
        "rows     at most 64 tokens, prompt and output",
        "prefill  16x4, 32x2",
        "decode   8 slots, 4 steps in a call of rows up to 64 tokens",
    ]
    assert lines[4].startswith("memory   weights 0.")
    assert lines[4].endswith(" in 32 pages of 16 entries")


def test_layouts_prefixes_and_plans_that_only_score_are_said():
    prefixes = PrefixGrid(2, 4, 64, (PlannedPrefix(64, "0" * 16),))
    grid = BucketGrid(64, ((64, 4, 16),), 8, prefixes=prefixes)
    table = plan_table(Plan("cpu:2", MODEL, Numbers("float32"), grid, LAYOUT), work_of(LAYOUT))
    assert "prefixes  1 prefix, read by at most 2 groups of rows\n" in table
    assert "layout    two: data=2\n" in table and table.endswith("on each device")
    scored = BucketGrid(64, ((64, 4),), 0, score=True)
    table = plan_table(Plan("cpu", MODEL, Numbers("float32"), scored), work_of())
    assert "decode   none, as rows are only scored\n" in table


@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_waste_is_the_share_of_padding_in_the_work_of_every_bucket(layout):
    work, metrics = work_of(layout), EngineMetrics(grid=GRID)
    for is_scored in (False, True):
        name = prefill_name(GRID.prefill[0], is_scored=is_scored)
        metrics.count_prefill(name, PrefillUse(1, 3, 16, 64, 2.0))
    metrics.count_decode(
        steps=4, emitted=24, live_slots=7, slots=8, seconds=1.0, read=ReadEntries(1200, 1200)
    )
    buckets = with_waste(metrics.report(), GRID, work)["buckets"]
    devices = 1 if layout is None else 2

    def flops(call):
        return devices * sum(part.flops for part in work.parts(call))

    prefill, scored = buckets["prefill"]["16x4"], buckets["prefill"]["16x4 scored"]
    assert prefill["flops"] == flops(GRID.prefill_call(GRID.prefill[0]))
    assert scored["flops"] == flops(GRID.prefill_call(GRID.prefill[0], is_scored=True))
    assert prefill["flops"] < scored["flops"]
    assert prefill["wasted_flops"] == 0.75 * prefill["flops"]
    assert prefill["wasted_seconds"] == 1.5
    decode = buckets["decode"]["64"]
    assert decode["flops"] == 4 * flops(GRID.average_step(300))
    assert decode["wasted_flops"] == 0.25 * decode["flops"]
    assert decode["wasted_seconds"] == 0.25
