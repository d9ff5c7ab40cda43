"""Grids that follow a rule: the fastest of each rule, against every choice of lengths and calls."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from planning_models import PLAIN, work_of

from noria.compile.abstract_model import model_sizes
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.grids.prefill_ladder import prefill_padding
from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.cost import CostModel
from noria.compile.planning.other_grids import multiples_of_128, powers_of_two, rule_based
from noria.compile.planning.run_bounds import ExpectedRow, rows_by_bucket
from noria.sharding.layout import Layout
from noria.sharding.legality import check

HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
COST = CostModel(work_of(PLAIN), HARDWARE)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ONE_DEVICE = GridDefaults()
# rows over 2 devices, and the tokens of a prompt over 3: no power of two divides by them
SPLIT = {
    "name": "split",
    "max_replicated": 1.0,
    "mesh": {"data": 2, "sequence": 3},
    "rules": {"batch": "data"},
    "prefill": {"rules": {"length": "sequence"}},
}


def with_memory(num_bytes: float) -> CostModel:
    """Return the same prices for a device with so many bytes."""
    return CostModel(COST.work, replace(HARDWARE, memory_bytes=num_bytes))


@cache
def call_seconds(length: int, batch: int) -> float:
    return COST.seconds(PrefillBucket(length, batch).call())


def seconds(grid: BucketGrid, prompts: np.ndarray) -> float:
    """Return the seconds of the calls that prefill the prompts."""
    pairs = zip(grid.prefill, rows_by_bucket(grid, prompts), strict=True)
    return sum(-(-rows // b.batch) * call_seconds(b.length, b.batch) for b, rows in pairs)


def plan_of(count: int, longest: int, slots: int = 16) -> BucketGrid:
    """Return a plan with some prefill graphs; their lengths do not matter.

    Without slots, it only scores.
    """
    prefill = tuple((longest - i, 1) for i in reversed(range(count)))
    pages = 2 * longest if slots else None
    return BucketGrid(longest + 8, prefill, slots, score=not slots, pages=pages)


def rows_of(prompts: np.ndarray) -> list[ExpectedRow]:
    return [ExpectedRow(RowShape(int(prompt), 8), 8) for prompt in prompts]


def least_seconds(plan: BucketGrid, lengths: list[int], prompts: np.ndarray) -> float:
    """Return the least seconds of all choices of lengths, for all sizes of calls.

    If rows wait for slots, a call has at most a sixteenth of the slots.
    """
    most = plan.decode_slots or np.inf
    if len(prompts) > most:
        most = max(1, plan.decode_slots // 16)
    *shorter, last = lengths
    best = np.inf
    for tokens in TOKENS:
        for size in range(len(plan.prefill)):
            for kept in combinations(shorter, size):
                ends = [min(length, plan.max_length) for length in (*kept, last)]
                total = 0.0
                for start, end in zip((0, *ends), ends, strict=False):
                    count = int(((prompts > start) & (prompts <= end)).sum())
                    batch = max(1, min(tokens // end, most))
                    total += -(-count // batch) * call_seconds(end, batch)
                best = min(best, total)
    return best


@pytest.mark.parametrize("rule", ["powers of two", "multiples of 128"])
def test_no_lengths_of_a_rule_are_faster_than_those_that_are_compared(rule):
    """The comparison is with the best of 200 random workloads, as found by trying every choice."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        median, spread = rng.uniform(2.5, 5.5), rng.uniform(0.1, 1.5)
        prompts = rng.lognormal(median, spread, rng.integers(1, 300)).astype(int).clip(1, 480)
        longest = int(prompts.max())
        count, slots = int(rng.integers(1, 5)), int(rng.choice([0, 1, 4, 16, 64]))
        plan = plan_of(min(longest, count), longest, slots)
        found = rule_based(plan, rows_of(prompts), ONE_DEVICE, COST)[rule]
        lengths = {"powers of two": powers_of_two, "multiples of 128": multiples_of_128}
        every = lengths[rule](longest)
        assert {bucket.length for bucket in found.prefill} <= {*every, plan.max_length}
        assert seconds(found, prompts) == pytest.approx(least_seconds(plan, every, prompts))
        # as many graphs, and the same memory
        assert len(found.prefill) <= len(plan.prefill)
        assert replace(found, prefill=plan.prefill) == plan


@pytest.mark.parametrize("rule", ["powers of two", "multiples of 128"])
def test_calls_that_need_more_memory_than_a_device_has_are_not_compared(rule):
    rows, plan = rows_of(np.full(400, 100)), plan_of(1, 100, slots=0)
    memory = COST.work.parameter_bytes + COST.work.working_bytes(PrefillBucket(128, 2).call())
    (small,) = rule_based(plan, rows, ONE_DEVICE, with_memory(memory))[rule].prefill
    (large,) = rule_based(plan, rows, ONE_DEVICE, COST)[rule].prefill
    assert small.batch <= 2 < large.batch


def test_the_grids_of_a_rule_are_legal_under_the_layout_of_the_plan():
    layout = Layout.from_table(SPLIT)
    defaults = GridDefaults.for_layout(layout)
    assert (defaults.batch_multiple, defaults.length_multiple) == (2, 3)
    prompts = np.array([5, 40, 40, 40, 200, 250])
    plan = replace(plan_of(3, 250), slot_groups=2)
    for grid in rule_based(plan, rows_of(prompts), defaults, COST).values():
        assert check(layout, model_sizes(PLAIN, 6, grid)) == []
        assert all(grid.fit(int(prompt), 8) for prompt in prompts)


def test_two_powers_of_two_pad_little_if_one_prompt_is_long():
    """The two largest powers, 4096 and 8192, would pad 999 of 1000 prompts to 4096 tokens."""
    prompts = np.array([*[100] * 999, 8000])
    grid = rule_based(plan_of(2, 8000), rows_of(prompts), ONE_DEVICE, COST)["powers of two"]
    assert [bucket.length for bucket in grid.prefill] == [128, 8008]
    real, computed = prefill_padding(prompts.tolist(), grid.prefill)
    assert computed < 1.3 * real


def test_powers_of_two_begin_at_sixteen_and_hold_the_longest_prompt():
    assert powers_of_two(3) == [16]
    assert powers_of_two(64) == [16, 32, 64]
    assert powers_of_two(65) == [16, 32, 64, 128]
    assert multiples_of_128(256) == [128, 256]
    assert multiples_of_128(257) == [128, 256, 384]
