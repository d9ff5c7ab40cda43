"""Cuts of least cost, against an exhaustive search."""

from itertools import combinations

import numpy as np
import pytest

from noria.compile.grids.bucket_search import cheapest_cuts


def total(costs, ends, cost_of_bucket) -> float:
    starts = [0, *(end + 1 for end in ends[:-1])]
    return sum(costs(end)[s] + cost_of_bucket for s, end in zip(starts, ends, strict=True))


@pytest.mark.parametrize("cost_of_bucket", [0, 0.4, 5])
@pytest.mark.parametrize("most", [1, 2, 3, 9])
@pytest.mark.parametrize("seed", range(10))
def test_no_other_cuts_are_cheaper(seed, most, cost_of_bucket):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    table = rng.random((count, count))

    def costs(end):
        return table[end, : end + 1]

    ends = cheapest_cuts(costs, count, most, cost_of_bucket)
    assert ends[-1] == count - 1
    assert len(ends) <= most
    every = [
        [*chosen, count - 1]
        for size in range(min(most, count))
        for chosen in combinations(range(count - 1), size)
    ]
    best = min(total(costs, choice, cost_of_bucket) for choice in every)
    assert total(costs, ends, cost_of_bucket) == pytest.approx(best, abs=1e-12)


def test_of_equally_cheap_choices_the_fewest_buckets():
    assert cheapest_cuts(lambda end: np.zeros(end + 1), 5, 5) == [4]
