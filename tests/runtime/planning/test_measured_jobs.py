"""Calls that ran on real hardware are made again, and have the measured seconds, within 2 %.

The calls of each job are data of the record, with their shapes and numbers. Decode steps read the
whole reserved length of every slot. Jobs whose prompts came in chunks are recorded, but neither
simulated nor priced: their chunks gathered slots, which no graph does any more.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tolerances import MEASURED_JOB

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.efficiency import AT_PEAKS
from noria.compile.planning.cost import CostModel
from noria.compile.planning.run_bounds import ExpectedRow
from noria.compile.planning.work import Work
from noria.modelzoo.config import Arrangement, DecoderConfig
from noria.runtime.engine.metrics import prefill_name
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.planning.search import simulate_in_order
from noria.sharding.call import Call

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RECORD = json.loads((BENCHMARKS / "h200_jobs.json").read_text("utf-8"))
JOBS = [job for job in RECORD["jobs"] if all(one["kind"] != "chunk" for one in job["calls"])]
LLAMA_8B = DecoderConfig.alike(
    vocab_size=128256,
    embed=4096,
    mlp=14336,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    windows=(None,) * 32,
    max_position=131072,
)
H200 = known_hardware()["h200"]
WORK = Work(AbstractModel(LLAMA_8B, Arrangement()), "bfloat16")
OF_SPANS = {"decode_spans", "span_slots", "decode_graphs"}
"""Keys of recorded grids that no plan has any more."""


def rows_of(job: Mapping[str, Any]) -> list[ExpectedRow]:
    """Return the rows of a job in the order of its input."""
    if isinstance(job["workload"], list):
        lengths = [tuple(job["workload"])] * job["rows"]
    else:
        with (BENCHMARKS / job["workload"]).open(encoding="utf-8") as file:
            table = list(csv.DictReader(file))[: job["rows"]]
        lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in table]
    return [ExpectedRow(RowShape(prompt, output), output) for prompt, output in lengths]


def seconds_of(calls: list[Mapping[str, Any]], cost: CostModel) -> float:
    """Return the seconds of all calls of a job."""
    total = 0.0
    for one in calls:
        if one["kind"] == "prefill":
            call = Call("prefill", one["rows"], one["tokens"], one["length"])
            total += one["calls"] * cost.seconds(call)
        else:
            step = Call("decode", one["rows"], 1, one["length"], entries=one["entries"])
            total += one["steps"] * cost.seconds(step)
            total += one["calls"] * cost.decode_call_seconds()
    return total


def test_the_record_has_all_calls_of_its_jobs():
    assert len(JOBS) == 3 and len(RECORD["jobs"]) == 5
    for job in RECORD["jobs"]:
        of_prompts = [one for one in job["calls"] if one["kind"] != "decode"]
        (decode,) = (one for one in job["calls"] if one["kind"] == "decode")
        assert sum(one["calls"] for one in of_prompts) == job["prefill_calls"]
        assert decode["steps"] == job["decode_steps"]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_the_scheduler_makes_the_recorded_calls(job):
    buckets = {key: value for key, value in job["buckets"].items() if key not in OF_SPANS}
    grid = BucketGrid.from_table(buckets)
    metrics = simulate_in_order(rows_of(job), grid, None).metrics
    *of_prompts, recorded = job["calls"]
    decode = metrics.decode
    assert (decode.calls, decode.steps) == (recorded["calls"], recorded["steps"])
    graphs = {(b.batch, b.tokens): prefill_name(b, is_scored=False) for b in grid.prefill}
    assert {name: use.calls for name, use in metrics.prefill.items()} == {
        graphs[one["rows"], one["tokens"]]: one["calls"] for one in of_prompts
    }


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_the_calls_of_a_measured_job_take_its_seconds(job):
    seconds = seconds_of(job["calls"], CostModel(WORK, H200))
    assert seconds == pytest.approx(job["seconds_in_calls"], rel=MEASURED_JOB)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_published_peaks_promise_much_less_than_was_measured(job):
    """So plans from peaks say that runs took 1.5 to 2 times as long."""
    seconds = seconds_of(job["calls"], CostModel(WORK, replace(H200, efficiency=AT_PEAKS)))
    assert seconds == pytest.approx(job["seconds_at_peaks"], rel=0.005)
    assert 1.5 < job["seconds_in_calls"] / seconds < 2
