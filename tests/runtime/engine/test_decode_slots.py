"""Groups of rows that read planned prefixes: runs of the scheduler without a device."""

from collections import Counter, deque

import numpy as np
import pytest
from related_prompts import hash_tokens, table_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.runtime.engine.actions import (
    DecodeAction,
    ForkAction,
    PrefillAction,
    ScheduledRequest,
    SharedGroup,
)
from noria.runtime.engine.decode_slots import DecodeSlots
from noria.runtime.engine.scheduler import Scheduler
from noria.runtime.engine.shared_prefixes import plan_submission

PREFIXES = tuple(PlannedPrefix(length, str(length) * 8) for length in (10, 16, 24))
"""They have 1, 2 and 2 whole pages that groups read."""


def grid_of(slots: int = 8, groups: int = 4, rows: int = 3, parts: int = 1) -> BucketGrid:
    prefixes = PrefixGrid(groups, rows, 16, PREFIXES)
    return BucketGrid(
        64, ((64, 4, 8),), slots, page=8, slot_groups=parts if parts > 1 else None,
        prefixes=prefixes, score=True,
    )  # fmt: skip


def check(action: DecodeAction, live: dict[int, ScheduledRequest], grid: BucketGrid) -> None:
    """Check that rows with a prefix run in groups of it, and that no row waits without need."""
    assert grid.prefixes is not None
    parts = grid.slot_groups or 1
    placed = Counter(slot for group in action.groups for slot in group.slots)
    assert set(placed.values()) <= {1}
    assert len({group.number for group in action.groups}) == len(action.groups)
    for number, slots, num_pages in action.groups:
        # scored prompts run in other graphs
        ((prefix, _),) = {(live[slot].planned_prefix, live[slot].is_scored) for slot in slots}
        assert len(slots) <= grid.prefixes.rows and num_pages == min(prefix.length, 16) // 8
        # the rows of a group are on the devices of the group
        assert {slot * parts // grid.decode_slots for slot in slots} == {
            number * parts // grid.prefixes.groups
        }
    has_prefix = {slot for slot, request in live.items() if request.planned_prefix is not None}
    assert set(placed) == has_prefix & set(action.slots)
    assert live.keys() - has_prefix <= set(action.slots)
    assert action.num_waiting == len(live) - len(action.slots)
    for part in range(parts):
        of_part = [slot for slot in live if slot * parts // grid.decode_slots == part]
        used = sum(group.number * parts // grid.prefixes.groups == part for group in action.groups)
        is_waiting = not set(of_part) <= set(action.slots)
        assert used == grid.prefixes.groups // parts if is_waiting else True
        if of_part:
            assert min(of_part, key=lambda slot: live[slot].number) in action.slots


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_every_row_with_a_prefix_runs_in_a_group_of_it(seed, parts):
    rng = np.random.default_rng(seed)
    rows, groups = int(rng.integers(1, 5)), parts * int(rng.integers(1, 4))
    grid = grid_of(8, groups, rows, parts)
    scheduler, waiting, live, left, num_ended = Scheduler(grid), deque(), {}, {}, 0
    for number in range(40):
        prefix = PREFIXES[rng.integers(3)] if rng.random() < 0.7 else None
        length = int(rng.integers(25, 40))
        limit = length + int(rng.integers(1, 20))
        scored = bool(rng.random() < 0.3)
        waiting.append(ScheduledRequest(number, length, limit, 1, scored, planned_prefix=prefix))
    while True:
        while waiting and scheduler.wants_more:
            scheduler.submit(waiting.popleft())
        match scheduler.next_action():
            case PrefillAction(rows=pieces):
                for piece in (piece for piece in pieces if piece.is_last):
                    live[piece.slot] = request = piece.sequence.request
                    left[piece.slot] = request.max_total_length - request.prompt_length
            case DecodeAction() as action:
                check(action, live, grid)
                for slot in action.slots:
                    emitted = min(left[slot], grid.steps_per_call)
                    scheduler.slots.advance(slot, emitted)
                    left[slot] -= emitted
                    if not left[slot]:
                        scheduler.slots.release(slot)
                        del live[slot]
                        num_ended += 1
            case None:
                break
    assert num_ended == 40


def test_a_group_reads_whole_pages_that_the_largest_chunk_computes_in_all_prompts():
    """With chunks of 4 and 16, what follows a prefix decides which of them computes its end."""
    shared = PrefixGrid(4, 2, 40, PREFIXES)
    one, two = (
        BucketGrid(64, tuple((64, 4, chunk) for chunk in chunks), 8, page=8, prefixes=shared)
        for chunks in ((4,), (4, 16))
    )
    assert [one.prefix_pages(n) for n in (7, 8, 24, 31, 32, 64)] == [0, 1, 3, 3, 4, 5]
    assert [two.prefix_pages(n) for n in (7, 8, 24, 31, 32, 64)] == [0, 0, 2, 2, 4, 5]


def test_rows_whose_prefix_has_no_whole_page_need_no_group():
    scheduler = Scheduler(grid_of(groups=1))
    prefix = PlannedPrefix(7, "7" * 16)
    for number in range(3):
        planned = PREFIXES[1] if number == 1 else prefix
        scheduler.submit(ScheduledRequest(number, 30, 40, 1, False, planned_prefix=planned))
    while not isinstance(action := scheduler.next_action(), DecodeAction):
        pass
    assert len(action.slots) == 3 and [len(group.slots) for group in action.groups] == [1]


def test_the_samples_of_a_prompt_are_rows_of_its_group():
    scheduler = Scheduler(grid_of(rows=4))
    scheduler.submit(ScheduledRequest(0, 30, 40, 4, False, planned_prefix=PREFIXES[1]))
    actions = [scheduler.next_action() for _ in range(5)]
    assert [type(action) for action in actions] == [PrefillAction, *[ForkAction] * 3, DecodeAction]
    (group,) = actions[-1].groups
    assert len(group.slots) == 4 and group.num_pages == 2


def test_entries_that_a_group_reads_count_once_for_each_step():
    slots = DecodeSlots(grid_of())
    slots.advance(np.array([1, 2, 5]), np.array([20, 31, 9]))
    groups = [SharedGroup(0, (1, 2), 2)]
    read, seen = slots.read_entries(np.array([1, 2, 5]), np.array([2, 1, 1]), groups)
    # rows of 20 and 21 positions read 3 pages, a row of 31 positions 4, and a row of 9 reads 2
    assert seen == 8 * (3 + 3 + 4 + 2)
    # in the first of two steps, one of two rows reads the 2 pages of both
    assert read == seen - 8 * 2


def test_rows_with_equal_prefixes_come_together_and_the_longest_first():
    prompts = [[n] * 32 + [end] for n in (1, 2, 3) for end in (1, 2)]
    limits = [10, 10, 50, 50, 30, 30]
    shared = tuple(PlannedPrefix(32, hash_tokens(prompts[i][:32])) for i in (0, 2, 4))
    grid = BucketGrid(128, ((128, 1, 32),), 4, prefixes=PrefixGrid(2, 4, 64, shared))
    lengths = [(33, limit) for limit in limits]
    submission = plan_submission(lengths, table_of(prompts)[0], grid)
    assert [limits[row] for row in submission.rows] == [50, 50, 30, 30, 10, 10]
    assert submission.planned == [shared[i] for i in (1, 1, 2, 2, 0, 0)]
