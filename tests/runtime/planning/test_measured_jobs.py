"""Jobs that ran on real hardware are simulated: their calls exactly, their seconds within 2 %."""

import csv
import json
from dataclasses import replace
from pathlib import Path

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
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.planning.search import simulate_in_order

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RECORD = json.loads((BENCHMARKS / "h200_jobs.json").read_text("utf-8"))
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


def rows_of(job) -> list[ExpectedRow]:
    if isinstance(job["workload"], list):
        lengths = [tuple(job["workload"])] * job["rows"]
    else:
        with (BENCHMARKS / job["workload"]).open(encoding="utf-8") as file:
            table = list(csv.DictReader(file))[: job["rows"]]
        lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in table]
    return [ExpectedRow(RowShape(prompt, output), output) for prompt, output in lengths]


@pytest.mark.parametrize("job", RECORD["jobs"], ids=lambda job: job["name"])
def test_a_measured_job_is_simulated_with_its_calls_and_within_two_percent(job):
    grid = BucketGrid.from_table(job["buckets"])
    simulation = simulate_in_order(rows_of(job), grid, CostModel(WORK, H200))
    prefill, decode = simulation.metrics.prefill.values(), simulation.metrics.decode.values()
    assert sum(use.calls for use in prefill) == job["prefill_calls"]
    assert sum(use.steps for use in decode) == job["decode_steps"]
    assert simulation.seconds == pytest.approx(job["seconds_in_calls"], rel=MEASURED_JOB)


@pytest.mark.parametrize("job", RECORD["jobs"], ids=lambda job: job["name"])
def test_published_peaks_promise_much_less_than_was_measured(job):
    """So plans from peaks say that runs took 1.5 to 2 times as long."""
    at_peaks = CostModel(WORK, replace(H200, efficiency=AT_PEAKS))
    grid = BucketGrid.from_table(job["buckets"])
    seconds = simulate_in_order(rows_of(job), grid, at_peaks).seconds
    assert seconds == pytest.approx(job["seconds_at_peaks"], rel=0.005)
    assert 1.5 < job["seconds_in_calls"] / seconds < 2
