"""bfloat16 weights and activations against float32, on the embedded model: bounds on the error.

These tests use a few prompts; scripts/compare_dtypes.py measures the whole distribution.
"""

import json

import pytest
import tolerances
from numerics_helpers import ROOT, script

from noria.compile.grids.bucket_grid import BucketGrid

NUM_TOKENS = 16
GRID = BucketGrid(
    max_length=128, prefill=((128, 2),), decode_slots=4, decode_spans=(128,), score=True
)


@pytest.fixture(scope="module")
def figures():
    compare = script("scripts/compare_dtypes.py")
    lines = (ROOT / "benchmarks" / "workloads" / "peers64.jsonl").read_text().splitlines()
    rows = [json.loads(line)["body"]["messages"] for line in lines]
    rows = sorted(rows, key=lambda row: len(row[0]["content"]))[: GRID.decode_slots]
    models = [compare.load("smollm2", numbers, GRID) for numbers in compare.NUMBERS]
    yield compare.compare(*models, rows, NUM_TOKENS)
    for model in models:
        model.close()


@pytest.mark.slow
def test_bfloat16_logprobs_stay_near_those_of_float32(figures):
    forced = figures["teacher_forced"]
    assert forced["tokens"] > 200
    assert 0 < forced["mean"] < tolerances.BFLOAT16_MODEL_LOGPROB_MEAN
    assert forced["max"] < tolerances.BFLOAT16_MODEL_LOGPROB_MAX
    assert forced["best_token_agreement"] > tolerances.BFLOAT16_BEST_TOKEN_AGREEMENT


@pytest.mark.slow
def test_greedy_tokens_part_only_where_float32s_best_two_are_close(figures):
    greedy = figures["greedy"]
    assert greedy["rows_equal_after"][1] > 0
    assert (greedy["widest_gap_at_divergence"] or 0) < tolerances.BFLOAT16_MODEL_LOGPROB_MAX
