"""Latencies and rates of a job's rows in its manifest."""

import json

import numpy as np
import pytest
from fake_model import run, write_input
from faulty_disk import Crash, FaultyDisk

NAMES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "end_to_end_latency_seconds",
    "output_tokens_per_second_per_row",
)
NUM_TOKENS = 13
"""Tokens in every answer of the fake model."""


def manifest_of(output) -> dict:
    return json.loads(output.with_name(f"{output.name}.manifest.json").read_text())


def latencies(source, output) -> list[dict[str, float]]:
    assert run(source, output) == 1
    manifest = manifest_of(output)
    return [manifest[name] for name in NAMES]


def expected(values: list[float]) -> dict[str, float]:
    """Return the mean and nearest-rank percentiles, by numpy."""
    ranks = {p: np.percentile(values, p, method="inverted_cdf") for p in (50, 90, 95, 99)}
    return {"mean": np.mean(values), **{f"p{p}": value for p, value in ranks.items()}}


@pytest.mark.parametrize("num_rows", [3, 20, 40, 200])
def test_latencies_are_means_and_nearest_ranks_over_all_answered_rows(tmp_path, num_rows):
    source, output = write_input(tmp_path / "in.jsonl", num_rows), tmp_path / "out.jsonl"
    first = [float(len(f"prompt {i}" * (1 + i % 4))) for i in range(num_rows)]
    between = [(1 + seconds) / (NUM_TOKENS - 1) for seconds in first]
    # an answer takes a second longer than its first token
    latency = [2 * seconds + 1 for seconds in first]
    rate = [1 / seconds for seconds in between]
    found = latencies(source, output)
    values_of = (first, between, latency, rate)
    assert found == [pytest.approx(expected(values)) for values in values_of]


def test_rows_of_earlier_runs_count_as_those_of_the_last(tmp_path):
    source = write_input(tmp_path / "in.jsonl")
    whole = latencies(source, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    with pytest.raises(Crash):
        run(source, output, disk=FaultyDisk(24, Crash()))
    assert latencies(source, output) == whole
    assert manifest_of(output)["rows"]["kept_from_earlier_runs"] > 5
