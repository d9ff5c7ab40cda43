"""Weights in codes against float32, on the embedded model: a bound on the loss of int8.

The test uses a few prompts; scripts/compare_dtypes.py measures more tokens.
"""

import json

import pytest
import tolerances
from numerics_helpers import ROOT, script

from noria.compile.plan import Numbers

NUM_ROWS, NUM_TOKENS, LONGEST_PROMPT = 4, 32, 96


@pytest.mark.slow
def test_int8_weights_lose_little():
    compare = script("scripts/compare_dtypes.py")
    lines = (ROOT / "benchmarks" / "workloads" / "peers64.jsonl").read_text().splitlines()
    rows = [json.loads(line)["body"]["messages"] for line in lines]
    rows = sorted(rows, key=lambda row: len(row[0]["content"]))[:NUM_ROWS]
    grid = compare.grid_of(NUM_ROWS, LONGEST_PROMPT + NUM_TOKENS)
    with compare.load("smollm2", compare.REFERENCE, grid) as llm:
        answers = compare.answered(llm, rows, NUM_TOKENS)
    numbers = compare.REFERENCE, Numbers("float32", "int8")
    logits = [compare.answer_logits("smollm2", x, answers)[0] for x in numbers]
    figures = compare.distributions(*logits)
    assert 0 < figures["mean_kl"] < tolerances.INT8_WEIGHTS_MEAN_KL
    assert figures["greedy_agreement"] > tolerances.INT8_WEIGHTS_GREEDY_AGREEMENT
