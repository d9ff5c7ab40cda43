"""Groups of slots that share planned prefixes: symbolic runs of the scheduler."""

from collections import Counter

import numpy as np
import pytest
from related_prompts import related_prompts, table_of
from symbolic_run import SymbolicRun

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_choice import choose_prefixes
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid, hash_tokens
from noria.runtime.engine.actions import DecodeAction, PrefillAction, PrefixAction, ScheduledRequest
from noria.runtime.engine.decode_slots import PrefixGroups, WaitingRows
from noria.runtime.engine.scheduler import Scheduler
from noria.runtime.engine.shared_prefixes import plan_submission


def planned(tokens: list[int]) -> PlannedPrefix:
    return PlannedPrefix(len(tokens), hash_tokens(tokens))


def random_grid(seed: int, prompts: list[list[int]]) -> BucketGrid:
    """Return a grid whose prefixes are those of a plan, or any beginnings of prompts."""
    rng = np.random.default_rng(seed)
    table, _ = table_of(prompts)
    shared = set(choose_prefixes(table, np.array(list(map(len, prompts))), 2))
    if not shared or rng.random() < 0.5:
        some = rng.choice(len(prompts), min(len(prompts), 4), replace=False).tolist()
        shared = {planned(prompts[i][: rng.integers(1, len(prompts[i]) + 1)]) for i in some}
    groups, size = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5]))
    chunk = int(rng.choice([16, 64, 256]))
    prefill = ((64, int(rng.choice([1, 2, 4]))), (200, int(rng.choice([1, 3]))))
    prefixes = PrefixGrid(groups, 256, chunk, tuple(shared))
    return BucketGrid(256, prefill, groups * size, (64, 128, 256), prefixes=prefixes)


def run(seed: int, **options) -> SymbolicRun:
    prompts = related_prompts(seed)
    grid = random_grid(seed, prompts)
    rng = np.random.default_rng(seed)
    # more sequences than a group or all groups have slots
    samples = rng.choice([1, 1, 1, 3, grid.decode_slots + 2], len(prompts)).tolist()
    return SymbolicRun(seed, grid=grid, prompts=prompts, num_samples=samples, **options)


def seeds(count: int) -> list:
    """Return the numbers of random runs, of which a third are in every run of the tests."""
    slow = pytest.mark.slow
    return [pytest.param(seed, marks=[slow] * (seed >= count // 3)) for seed in range(count)]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("seed", seeds(100))
def test_every_row_runs_in_a_group_with_its_prefix(seed, in_order):
    run(seed, in_order=in_order).assert_all_rows_ended()


@pytest.mark.parametrize("seed", seeds(12))
def test_a_drain_at_any_step_keeps_rows_in_flight(seed):
    for step in range(run(seed).num_steps + 1):
        drained = run(seed, in_order=False, drain_at=step)
        drained.assert_all_rows_ended()
        num_ended = Counter(number for number, _ in drained.done)
        for number in drained.dropped:
            assert num_ended[number] < drained.num_samples[drained.row_of[number]]


def rows_with(beginnings: list[list[int]]) -> list[list[int]]:
    """Return a prompt after each beginning, with other tokens at its end."""
    rng = np.random.default_rng(0)
    return [[*b, *rng.integers(3, 9, rng.integers(1, 30)).tolist()] for b in beginnings]


FIRST, SECOND = [1] * 40, [2] * 33


def grid_of(groups: int, size: int, shared: list[list[int]]) -> BucketGrid:
    prefixes = PrefixGrid(groups, 64, 32, tuple(map(planned, shared)))
    return BucketGrid(128, ((32, 2),), groups * size, (64, 128), prefixes=prefixes)


def test_a_prefix_is_computed_for_a_second_group_only_if_many_rows_wait():
    for count, times in ((4, 1), (5, 1), (6, 2), (40, 2)):
        run = SymbolicRun(0, grid=grid_of(2, 4, [FIRST]), prompts=rows_with([FIRST] * count))
        run.assert_all_rows_ended()
        assert run.computed_prefixes == [planned(FIRST)] * times


def test_rows_in_order_of_their_prefix_compute_each_one_once():
    beginnings = [[1] * 47 + [i] for i in range(3, 8)]
    run = SymbolicRun(0, grid=grid_of(1, 4, beginnings), prompts=rows_with(beginnings * 9))
    run.assert_all_rows_ended()
    assert sorted(run.computed_prefixes) == sorted(map(planned, beginnings))


def test_a_rare_prefix_does_not_wait_for_all_rows_of_a_frequent_one():
    beginnings = [FIRST] * 5 + [SECOND] + [FIRST] * 300 + [[]] + [FIRST] * 300
    prompts = rows_with(beginnings)
    run = SymbolicRun(0, grid=grid_of(1, 4, [FIRST, SECOND]), prompts=prompts, in_order=None)
    run.assert_all_rows_ended()
    ended = [number for number, _ in run.done]
    for number in (5, 306):
        assert ended.index(number) < number + 40


def test_rows_without_a_prefix_may_follow_those_with_one():
    prompts = rows_with([FIRST] * 3 + [[]] * 3)
    run = SymbolicRun(0, grid=grid_of(1, 2, [FIRST]), prompts=prompts)
    run.assert_all_rows_ended()
    assert run.computed_prefixes == [planned(FIRST)]


def test_rows_that_wait_for_a_full_group_get_a_second_one():
    prefix = PlannedPrefix(16, "0" * 16)
    grid = BucketGrid(64, ((32, 1),), 8, (64,), prefixes=PrefixGrid(2, 16, 16, (prefix,)))
    scheduler = Scheduler(grid)
    for number in range(8):
        scheduler.submit(ScheduledRequest(number, 8, 24, 1, False, planned_prefix=prefix))
    actions = [scheduler.next_action() for _ in range(10)]
    assert [type(action) for action in actions] == (
        [PrefixAction] + 4 * [PrefillAction] + [PrefixAction] + 4 * [PrefillAction]
    )
    groups = [action.group for action in actions if isinstance(action, PrefixAction)]
    assert sorted(groups) == [0, 1]


def test_a_group_keeps_its_prefix_while_a_slot_is_taken():
    grid = BucketGrid(
        64, ((32, 1),), 4, (64,), prefixes=PrefixGrid(2, 16, 16, (PlannedPrefix(16, "0" * 16),))
    )
    scheduler = Scheduler(grid)
    groups = PrefixGroups(grid, scheduler.slots)
    a, b = PlannedPrefix(16, "a" * 16), PlannedPrefix(16, "b" * 16)
    one = WaitingRows(1, 1)
    assert groups.assign({a: one, b: one}) == (0, a)
    scheduler.slots.claim([0])
    assert groups.assign({b: one}) == (1, b)
    scheduler.slots.claim([2])
    assert groups.assign({None: one}) is None
    scheduler.slots.release(0)
    assert groups.assign({None: one}) == (0, None)


PREFIXES = PlannedPrefix(16, "a" * 16), PlannedPrefix(16, "b" * 16)


def two_groups(slots: int, batch: int) -> Scheduler:
    """Return a scheduler with two groups of slots, for rows of 8 own tokens."""
    prefixes = PrefixGrid(2, 16, 16, PREFIXES)
    return Scheduler(BucketGrid(64, ((32, batch),), slots, (64,), prefixes=prefixes))


def test_a_batch_that_waits_for_slots_does_not_stop_other_groups():
    scheduler = two_groups(64, 4)
    for number in range(38):
        scheduler.submit(ScheduledRequest(number, 8, 60, 1, False, planned_prefix=PREFIXES[0]))
    slots: list[int] = []
    while not isinstance(action := scheduler.next_action(), DecodeAction):
        slots += [row.slot for row in getattr(action, "rows", ())]
    scheduler.slots.release(slots[0])
    for number in range(38, 78):
        scheduler.submit(ScheduledRequest(number, 8, 60, 1, False, planned_prefix=PREFIXES[1]))
    actions = [scheduler.next_action() for _ in range(9)]
    rows = sum(len(action.rows) for action in actions if isinstance(action, PrefillAction))
    assert rows == 32 and isinstance(actions[0], PrefixAction)


def test_a_request_of_more_samples_than_a_group_has_free_gets_a_second_group():
    scheduler = two_groups(12, 2)
    for number in range(8):
        scheduler.submit(ScheduledRequest(number, 8, 24, 4, False, planned_prefix=PREFIXES[0]))
    groups = set()
    while not isinstance(action := scheduler.next_action(), DecodeAction):
        groups |= {action.group} if isinstance(action, PrefixAction) else set()
    assert groups == {0, 1} and len(action.slots) == 8


def test_prefixes_of_equally_many_rows_run_longest_rows_first():
    prompts = [[n] * 32 + [end] for n in (1, 2, 3) for end in (1, 2)]
    limits = [10, 10, 50, 50, 30, 30]
    shared = tuple(PlannedPrefix(32, hash_tokens(prompts[i][:32])) for i in (0, 2, 4))
    grid = BucketGrid(64, ((16, 1),), 4, (64,), prefixes=PrefixGrid(2, 64, 64, shared))
    lengths = [(33, limit) for limit in limits]
    order = plan_submission(lengths, table_of(prompts)[0], grid).rows
    assert [limits[row] for row in order] == [50, 50, 30, 30, 10, 10]
