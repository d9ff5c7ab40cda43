"""bfloat16, and weights in int8, against float32 on the embedded model: bounds on the loss.

The test uses a few prompts; benchmarks/numbers.md has more tokens and more formats.
"""

import pytest
import tolerances
from numerics_helpers import ROOT

from noria.runtime import ComparedModel, compare
from noria.runtime.checkpoint import open_model
from noria.runtime.rows.job_text import read_row_ids

NUM_ROWS, NUM_TOKENS = 4, 32
NUMBERS = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"weights": "int8"}}


@pytest.mark.slow
def test_bfloat16_and_int8_weights_lose_little():
    path = ROOT / "benchmarks" / "workloads" / "peers64.jsonl"
    with open_model("smollm2") as files:
        rows = sorted(read_row_ids(path, files), key=len)[:NUM_ROWS]
    models = [ComparedModel("smollm2", numbers) for numbers in NUMBERS.values()]
    comparison = compare(
        models,
        rows,
        max_tokens=NUM_TOKENS,
        dtype="float32",
        target="cpu",
        slots=NUM_ROWS,
        overrides=["model.scan_layers=true"],
    )
    bfloat16, int8 = comparison.figures
    assert 0 < bfloat16.divergence.mean < tolerances.BFLOAT16_MEAN_KL
    assert bfloat16.agreement.mean > tolerances.BFLOAT16_GREEDY_AGREEMENT
    assert bfloat16.widest_gap < tolerances.BFLOAT16_WIDEST_GAP
    assert 0 < int8.divergence.mean < tolerances.INT8_WEIGHTS_MEAN_KL
    assert int8.agreement.mean > tolerances.INT8_WEIGHTS_GREEDY_AGREEMENT
