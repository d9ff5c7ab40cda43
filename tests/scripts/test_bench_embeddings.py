"""The benchmark of embeddings compares equal vectors, and reports its measurements."""

import pytest
from numerics_helpers import script


@pytest.mark.reference
def test_a_small_run_compares_equal_vectors_and_is_written_as_a_table(monkeypatch):
    bench = script("scripts/bench_embeddings.py")
    monkeypatch.setattr(bench, "NUM_HEADS", 2)
    monkeypatch.setattr(bench, "PARTS", 2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
    lengths = [3, 9, 4, 30, 3]
    run = bench.measure("tiny", sizes, lengths, "float32")
    assert run["max_difference"] < 1e-5 and run["graphs"] == 1
    assert run["padding_ratio"] == pytest.approx(5 * 30 / sum(lengths))
    report = {"machine": bench.describe_machine(), "runs": [run]}
    assert "| tiny | float32 | 5 | 49 | 1 |" in bench.markdown(report)
