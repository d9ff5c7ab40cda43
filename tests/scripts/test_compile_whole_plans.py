"""The record of whole plans: finished work is not repeated, and plans that do not fit are named."""

from pathlib import Path

from numerics_helpers import script

PLANS = script("scripts/compile_whole_plans.py")
CASE = PLANS.dense("llama-3.1-8b", "tpu:v5e:2x4", 2, 4)
STEP = {"seconds": 2.0, "cpu_seconds": 90.0, "temp_bytes": 1e9, "all_bytes": 14e9}
PROMPTS = {"seconds": 2.0, "cpu_seconds": 90.0, "temp_bytes": 2e9, "all_bytes": 15e9}
COMPILED = {
    "layout": "weight-stationary-1d (tensor=8)",
    "prefill": [[512, 4]],
    "decode_slots": 64,
    "max_length": 1536,
    "weight_bytes": 2e9,
    "cache_bytes": 6e9,
    "device_bytes": 16e9,
    "graphs": {"decode": STEP, "prefill 512x4": PROMPTS},
    "is_done": True,
}


def test_every_case_is_of_a_model_that_is_here_and_named_once():
    assert len({case.name for case in PLANS.CASES}) == len(PLANS.CASES)
    for case in PLANS.CASES:
        assert (Path(PLANS.MODELS) / case.model / "config.json").is_file()


def test_what_is_done_is_not_done_again():
    record = {"refused": "too large", "is_done": True}
    PLANS.measure(CASE, record, keep=None)
    assert record == {"refused": "too large", "is_done": True}


def test_a_plan_is_a_row_with_the_most_that_is_on_a_device():
    assert PLANS.row("8B", COMPILED).endswith("| 2.00 | 6.00 | 15.00 | 16.00 | 2 | 3.0 |")


def test_a_plan_with_a_graph_that_needs_more_than_there_is_does_not_fit():
    assert "15.00, does not fit" in PLANS.row("8B", COMPILED | {"device_bytes": 14e9})
    refused = {"refused": "RESOURCE_EXHAUSTED"}
    graphs = COMPILED["graphs"] | {"prefill 256x8": refused}
    assert "15.00, does not fit" in PLANS.row("8B", COMPILED | {"graphs": graphs})
