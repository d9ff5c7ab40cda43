"""The benchmark of sparse layers: all methods bring the same tokens."""

import jax
import numpy as np
from numerics_helpers import script


def test_all_methods_bring_the_same_tokens():
    bench_experts = script("scripts/bench_experts.py")
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
