"""The benchmark of sparse layers compares equal layers, and reports its measurements."""

import jax
import numpy as np
import pytest
from numerics_helpers import script


@pytest.fixture(scope="module")
def bench_experts():
    return script("scripts/bench_experts.py")


@pytest.mark.reference
def test_a_small_run_measures_every_implementation_and_is_written_as_tables(
    bench_experts, monkeypatch
):
    for name, size in {"EMBED": 16, "HIDDEN": 24, "PLACED_EMBED": 8}.items():
        monkeypatch.setattr(bench_experts, name, size)
    layer = bench_experts.measure_layer(8, repeats=1)
    assert set(layer["milliseconds"]) >= {"noria, lossless", "transformers, eager"}
    assert layer["rows_over_choices"] >= 1
    placing = bench_experts.measure_placing(6, 2, 20, repeats=1)
    machine = {"processor": "some", "versions": {"jax": "1"}}
    report = {"command": "c", "machine": machine, "layer": [layer], "placing": [placing]}
    table = bench_experts.markdown(report)
    assert "| 6 / 2 | 20 | one-hot products |" in table


def test_all_methods_bring_the_same_tokens(bench_experts):
    rng = np.random.default_rng(0)
    expert_MZ = np.argsort(rng.random((20, 6)), axis=1)[:, :2].astype(np.int32)
    x_MD = jax.numpy.asarray(rng.standard_normal((20, 8), np.float32))
    by_sorting = bench_experts._sorted(x_MD, expert_MZ, experts=6)
    by_counting = bench_experts._running_sum(x_MD, expert_MZ, experts=6)
    np.testing.assert_array_equal(by_sorting, by_counting)
    of_experts = bench_experts._one_hot(x_MD, expert_MZ, experts=6, capacity=20)
    for e, rows in enumerate(of_experts):
        tokens = np.nonzero((expert_MZ == e).any(axis=1))[0]
        np.testing.assert_array_equal(rows[: len(tokens)], x_MD[tokens])
