"""The scheduler alone: a pure state machine, driven without a device."""

import random
from dataclasses import replace

import pytest

from noria.compile.bucket_grid import BucketGrid
from noria.runtime.decode_slots import DecodeAction, Job
from noria.runtime.scheduler import InsertAction, PrefillAction, Scheduler

GRID = BucketGrid(
    max_length=64,
    prefill=((8, 4), (32, 2)),
    decode_slots=4,
    decode_spans=(16, 64),
    steps_per_call=4,
)
RAGGED = replace(GRID, span_slots=(4, 2))


def job(number, prompt_length=5, max_tokens=8, num_sequences=1, is_scored=False) -> Job:
    return Job(number, prompt_length, prompt_length + max_tokens, num_sequences, is_scored)


def actions_until_decode(scheduler: Scheduler) -> list:
    actions = []
    while (action := scheduler.next_action()) is not None:
        actions.append(action)
        if isinstance(action, DecodeAction):
            return actions
    return actions


def play(scheduler: Scheduler, jobs: list[Job], seed: int = 0) -> list:
    """Run to the end as the engine would, with rows that end early at random."""
    rng = random.Random(seed)
    length, limit, actions = {}, {}, []
    pending = list(jobs)
    while True:
        while pending and scheduler.wants_more:
            scheduler.submit(pending.pop(0))
        action = scheduler.next_action()
        if action is None:
            assert not pending
            return actions
        actions.append(action)
        match action:
            case InsertAction():
                length[action.slot] = action.sequence.job.prompt_length
                limit[action.slot] = action.sequence.job.limit
            case DecodeAction():
                for slot in action.slots:
                    grown = min(GRID.steps_per_call, limit[slot] - length[slot])
                    length[slot] += grown
                    if length[slot] == limit[slot] or rng.random() < 0.1:
                        scheduler.release(slot)
                    else:
                        scheduler.advance(slot, grown)


@pytest.mark.parametrize("grid", [GRID, RAGGED], ids=["alike", "ragged"])
def test_every_sequence_is_inserted_exactly_once_and_every_scored_prompt_is_run(grid):
    rng = random.Random(1)
    jobs = [
        job(
            n,
            prompt_length=rng.randint(1, 32),
            max_tokens=rng.choice([0, 1, 9, 30]),
            num_sequences=rng.randint(1, 6),
            is_scored=rng.random() < 0.3,
        )
        for n in range(200)
    ]
    actions = play(Scheduler(grid), jobs)
    for action in actions:
        if isinstance(action, InsertAction):
            assert action.sequence.job.limit <= grid.reach(action.slot)
    inserted = [
        (a.sequence.job.number, a.sequence.sample) for a in actions if isinstance(a, InsertAction)
    ]
    expected = [
        (j.number, sample)
        for j in jobs
        if j.limit > j.prompt_length
        for sample in range(j.num_sequences)
    ]
    assert sorted(inserted) == expected
    prefilled = [j.number for a in actions if isinstance(a, PrefillAction) for j in a.jobs]
    assert sorted(prefilled) == [j.number for j in jobs]


def test_a_row_runs_in_the_bucket_of_its_own_length_whatever_else_waits():
    jobs = [job(n, prompt_length=1 + n % 32) for n in range(100)]
    for action in play(Scheduler(GRID), jobs):
        if isinstance(action, PrefillAction):
            for member in action.jobs:
                assert GRID.fit(member.prompt_length, 8) == action.bucket


def test_a_free_slot_is_refilled_before_the_next_decode_call():
    scheduler = Scheduler(GRID)
    for n in range(9):
        scheduler.submit(job(n))
    actions = actions_until_decode(scheduler)
    assert [type(a) for a in actions] == [PrefillAction, *[InsertAction] * 4, DecodeAction]
    scheduler.release(2)
    actions = actions_until_decode(scheduler)
    assert [type(a) for a in actions] == [PrefillAction, InsertAction, DecodeAction]
    assert actions[1].slot == 2
    # three rows of that batch are prefilled already: no prefill until they have slots
    scheduler.release(0)
    assert [type(a) for a in actions_until_decode(scheduler)] == [InsertAction, DecodeAction]


def test_a_whole_batch_goes_before_a_part_of_one():
    scheduler = Scheduler(GRID)
    scheduler.submit(job(0, prompt_length=5))
    scheduler.submit(job(1, prompt_length=20))
    scheduler.submit(job(2, prompt_length=20))
    first = scheduler.next_action()
    assert isinstance(first, PrefillAction)
    assert [j.number for j in first.jobs] == [1, 2]


def test_prompts_that_generate_nothing_do_not_wait_for_a_slot():
    scheduler = Scheduler(GRID)
    for n in range(4):
        scheduler.submit(job(n))
    actions_until_decode(scheduler)
    scheduler.submit(job(4))
    scheduler.submit(job(5, max_tokens=0, is_scored=True))
    action = scheduler.next_action()
    assert isinstance(action, PrefillAction)
    assert [j.number for j in action.jobs] == [5]
    assert isinstance(scheduler.next_action(), DecodeAction)


def test_the_span_holds_every_live_row_and_no_more():
    scheduler = Scheduler(GRID)
    scheduler.submit(job(0, prompt_length=5, max_tokens=30))
    assert actions_until_decode(scheduler)[-1].span == 16
    scheduler.advance(0, 4)
    scheduler.advance(0, 4)
    assert scheduler.next_action().span == 64


def test_a_limit_keeps_the_span_short():
    scheduler = Scheduler(GRID)
    scheduler.submit(job(0, prompt_length=14, max_tokens=2))
    assert actions_until_decode(scheduler)[-1].span == 16


def test_the_arrays_of_a_prefill_are_released_with_its_last_row():
    scheduler = Scheduler(GRID)
    scheduler.submit(job(0, num_sequences=2))
    scheduler.submit(job(1))
    inserts = [a for a in actions_until_decode(scheduler) if isinstance(a, InsertAction)]
    assert [a.is_last_of_prefill for a in inserts] == [False, False, True]


def test_drain_drops_what_has_no_slot_and_keeps_requests_that_do():
    scheduler = Scheduler(GRID)
    scheduler.submit(job(0, num_sequences=6))
    for n in range(1, 8):
        scheduler.submit(job(n))
    actions_until_decode(scheduler)
    dropped = scheduler.drain()
    assert sorted(j.number for j in dropped) == list(range(1, 8))
    scheduler.release(0)
    action = scheduler.next_action()
    assert isinstance(action, InsertAction)
    assert action.sequence.job.number == 0


def test_a_row_gets_the_shortest_free_slot_that_holds_all_that_it_may_become():
    scheduler = Scheduler(RAGGED)
    for n, max_tokens in enumerate((8, 30, 8, 8)):
        scheduler.submit(job(n, max_tokens=max_tokens))
    inserts = [a for a in actions_until_decode(scheduler) if isinstance(a, InsertAction)]
    assert {a.sequence.job.number: a.slot for a in inserts} == {0: 2, 1: 0, 2: 3, 3: 1}


def test_rows_that_wait_for_a_long_slot_do_not_keep_shorter_rows_from_theirs():
    scheduler = Scheduler(RAGGED)
    for n in range(7):
        scheduler.submit(job(n, max_tokens=30))
    for n in range(7, 9):
        scheduler.submit(job(n))
    inserts = [a for a in actions_until_decode(scheduler) if isinstance(a, InsertAction)]
    assert sorted(a.sequence.job.number for a in inserts) == [0, 1, 7, 8]


def test_few_long_rows_are_prefilled_ahead_of_their_slots():
    """What a prefill leaves stays on the device until its rows have slots."""
    scheduler = Scheduler(RAGGED)
    actions = []
    for n in range(40):
        scheduler.submit(job(n, max_tokens=30))
    for n in range(40, 60):
        scheduler.submit(job(n))
    for _ in range(5):
        actions += actions_until_decode(scheduler)
        for slot in (2, 3):
            scheduler.release(slot)
    prefilled = [j.number for a in actions if isinstance(a, PrefillAction) for j in a.jobs]
    assert sum(number < 40 for number in prefilled) <= 2 + GRID.prefill[0].batch
    assert sum(number >= 40 for number in prefilled) >= 10


def test_more_is_read_while_nothing_that_waits_fits_a_free_slot():
    scheduler, number = Scheduler(RAGGED), 0
    while scheduler.wants_more:
        scheduler.submit(job(number, max_tokens=30))
        number += 1
    assert isinstance(actions_until_decode(scheduler)[-1], DecodeAction)
    waiting = scheduler.num_waiting
    while scheduler.wants_more:
        scheduler.submit(job(number, max_tokens=30))
        number += 1
    assert scheduler.num_waiting > 4 * waiting
    scheduler.submit(job(number))
    assert isinstance(scheduler.next_action(), PrefillAction)


def test_a_request_that_does_not_fit_is_not_queued():
    scheduler = Scheduler(GRID)
    with pytest.raises(ValueError, match="prefill length 33"):
        scheduler.submit(job(0, prompt_length=33))
    assert scheduler.num_waiting == 0
