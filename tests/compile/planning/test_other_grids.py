"""Grids that follow a rule: the fastest of each rule, against every choice of lengths."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from planning_models import PLAIN, work_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefill_ladder import prefill_padding
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.cost import CostModel
from noria.compile.planning.other_grids import (
    multiples_of_128,
    powers_of_two,
    rule_based,
    with_lengths,
)
from noria.compile.planning.run_bounds import rows_by_bucket

COST = CostModel(work_of(PLAIN), Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, []))
TOKENS = 512


def plan_of(num_prefill: int, longest: int) -> BucketGrid:
    """Return a plan with some prefill graphs; their lengths do not matter."""
    prefill = tuple((longest - i, 1) for i in reversed(range(num_prefill)))
    return BucketGrid(longest + 8, prefill, 16, pages=99, page=256)


def seconds(grid: BucketGrid, prompts: np.ndarray) -> float:
    pairs = zip(grid.prefill, rows_by_bucket(grid, prompts), strict=True)
    return sum(-(-rows // bucket.batch) * COST.seconds(bucket.call()) for bucket, rows in pairs)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_lengths_of_a_rule_are_faster_than_those_that_are_compared(seed, count):
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(4.5, 0.8, 300).astype(int), 1, 1000)
    longest = int(prompts.max())
    plan = plan_of(count, longest)
    found = rule_based(plan, prompts, TOKENS, COST)
    rules = {"powers of two": powers_of_two(longest), "multiples of 128": multiples_of_128(longest)}
    assert set(found) == set(rules)
    for name, (*shorter, last) in rules.items():
        choices = ([*kept, last] for size in range(count) for kept in combinations(shorter, size))
        every = [seconds(with_lengths(plan, lengths, TOKENS), prompts) for lengths in choices]
        assert seconds(found[name], prompts) == pytest.approx(min(every))
        assert len(found[name].prefill) <= count
        assert replace(found[name], prefill=plan.prefill) == plan


def test_two_powers_of_two_pad_little_if_one_prompt_is_long():
    """The two largest powers, 4096 and 8192, would pad 999 of 1000 prompts to 4096 tokens."""
    prompts = np.array([*[100] * 999, 8000])
    grid = rule_based(plan_of(2, 8000), prompts, TOKENS, COST)["powers of two"]
    assert [bucket.length for bucket in grid.prefill] == [128, 8008]
    real, computed = prefill_padding(prompts.tolist(), grid.prefill)
    assert computed < 1.3 * real


def test_powers_of_two_begin_at_sixteen_and_hold_the_longest_prompt():
    assert powers_of_two(3) == [16]
    assert powers_of_two(64) == [16, 32, 64]
    assert powers_of_two(65) == [16, 32, 64, 128]
    assert multiples_of_128(256) == [128, 256]
    assert multiples_of_128(257) == [128, 256, 384]
