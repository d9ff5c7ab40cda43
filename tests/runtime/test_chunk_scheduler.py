"""The scheduler of chunks alone: a pure state machine, driven without a device."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from noria.compile.bucket_grid import BucketGrid
from noria.runtime.chunk_scheduler import ChunkAction, ChunkScheduler, ForkAction, OpenAction
from noria.runtime.decode_slots import DecodeAction, Job

GRID = BucketGrid(
    max_length=64,
    prefill=((16, 2, 8), (32, 2, 8)),
    decode_slots=4,
    decode_spans=(16, 32, 64),
    steps_per_call=4,
    chunks_per_decode=3,
)
TAILS = replace(GRID, prefill=((16, 3, 2), (16, 2, 8), (32, 4, 2), (32, 1, 8)))
RAGGED = replace(GRID, span_slots=(4, 2, 1))


def job(number, prompt_length=5, max_tokens=8, num_sequences=1, is_scored=False) -> Job:
    return Job(number, prompt_length, prompt_length + max_tokens, num_sequences, is_scored)


def random_jobs(count: int, seed: int = 1) -> list[Job]:
    rng = random.Random(seed)
    return [
        job(
            n,
            prompt_length=rng.randint(1, 32),
            max_tokens=rng.choice([0, 1, 9, 30]),
            num_sequences=rng.randint(1, 6),
            is_scored=rng.random() < 0.3,
        )
        for n in range(count)
    ]


class Play:
    """A run to the end as the engine would drive it; a share of rows end early at each call.

    Keeps what each slot holds, and fails where an action does not fit to that.
    """

    def __init__(self, jobs: list[Job], grid: BucketGrid = GRID, seed: int = 0, early: float = 0.1):
        self.early = early
        self.grid, self.scheduler, self.actions = grid, ChunkScheduler(grid), []
        self.filled, self.length, self.limit = {}, {}, {}
        rng = random.Random(seed)
        pending = list(jobs)
        while True:
            while pending and self.scheduler.wants_more:
                self.scheduler.submit(pending.pop(0))
            action = self.scheduler.next_action()
            if action is None:
                assert not pending and not self.filled and not self.length
                return
            self.actions.append(action)
            self._carry_out(action, rng)

    def _carry_out(self, action, rng) -> None:
        match action:
            case OpenAction():
                assert action.slot not in self.filled and action.slot not in self.length
                assert action.sequence.job.limit <= self.grid.reach(action.slot)
                self.filled[action.slot] = 0
            case ChunkAction():
                for row in action.rows:
                    assert self.filled[row.slot] == row.start
                    self.filled[row.slot] += row.count
                    if row.is_last:
                        del self.filled[row.slot]
                        if row.sequence.job.generates:
                            self._decodes(row.slot, row.sequence.job)
            case ForkAction():
                assert action.slot not in self.filled and action.slot not in self.length
                # the source has the prompt and nothing behind it
                assert self.length[action.source] == action.sequence.job.prompt_length
                self._decodes(action.slot, action.sequence.job)
            case DecodeAction():
                assert set(action.slots) == set(self.length)
                for slot in action.slots:
                    self._grow(slot, rng)

    def _decodes(self, slot: int, of: Job) -> None:
        assert of.limit <= self.grid.reach(slot)
        self.length[slot], self.limit[slot] = of.prompt_length, of.limit

    def _grow(self, slot: int, rng) -> None:
        grown = min(GRID.steps_per_call, self.limit[slot] - self.length[slot])
        self.length[slot] += grown
        if self.length[slot] == self.limit[slot] or rng.random() < self.early:
            del self.length[slot]
            self.scheduler.release(slot)
        else:
            self.scheduler.advance(slot, grown)

    def chunks_of(self, number: int) -> list[tuple]:
        """Bucket, start and count of each chunk of a request, in order."""
        return [
            (action.bucket, row.start, row.count)
            for action in self.actions
            if isinstance(action, ChunkAction)
            for row in action.rows
            if row.sequence.job.number == number
        ]


@pytest.fixture(params=[GRID, TAILS, RAGGED], ids=["one size", "two sizes", "ragged"])
def grid(request) -> BucketGrid:
    return request.param


def test_every_sequence_decodes_exactly_once_and_every_prompt_is_poured(grid):
    jobs = random_jobs(200)
    play = Play(jobs, grid)
    begun = Counter()
    for action in play.actions:
        match action:
            case OpenAction() | ForkAction():
                begun[action.sequence.job.number, action.sequence.sample] += 1
    samples = {j.number: range(j.num_sequences if j.generates else 1) for j in jobs}
    assert begun == Counter((number, i) for number, each in samples.items() for i in each)
    for j in jobs:
        # in several sets where there are more sequences than slots that hold them
        suited = sum(j.limit <= grid.reach(slot) for slot in range(grid.decode_slots))
        sets = -(-j.num_sequences // suited) if j.generates else 1
        assert sum(count for _, _, count in play.chunks_of(j.number)) == sets * j.prompt_length


def test_the_graphs_of_a_prompt_follow_from_its_length_whatever_else_waits(grid):
    jobs = [job(n, prompt_length=1 + n % 32) for n in range(100)]
    play = Play(jobs, grid)
    for j in jobs:
        alone = Play([j], grid)
        assert play.chunks_of(j.number) == alone.chunks_of(j.number)
        for bucket, start, count in play.chunks_of(j.number):
            assert bucket.length == GRID.span_of(start + count)


def test_a_prompt_is_poured_in_whole_large_chunks_and_then_in_small_ones():
    found = Play([job(0, prompt_length=29)], TAILS).chunks_of(0)
    pieces = [(bucket.length, bucket.chunk, start, count) for bucket, start, count in found]
    assert pieces == [
        *((16, 8, start, 8) for start in (0, 8)),
        (32, 8, 16, 8),
        *((32, 2, 24 + start, count) for start, count in ((0, 2), (2, 2), (4, 1))),
    ]


def test_batches_are_of_one_graph_and_no_larger_than_planned(grid):
    for action in Play(random_jobs(100, seed=3), grid).actions:
        if isinstance(action, ChunkAction):
            assert 1 <= len(action.rows) <= action.bucket.batch
            assert {row.sequence.job.is_scored for row in action.rows} == {action.is_scored}
            assert len({row.slot for row in action.rows}) == len(action.rows)
            assert all(row.count <= action.bucket.chunk for row in action.rows)


def kinds(scheduler: ChunkScheduler, count: int) -> list[type]:
    return [type(scheduler.next_action()) for _ in range(count)]


def test_slots_fill_before_the_first_decode_call():
    scheduler = ChunkScheduler(GRID)
    for n in range(5):
        scheduler.submit(job(n, prompt_length=12))
    expected = [*[OpenAction] * 4, *[ChunkAction] * 4, DecodeAction]
    assert kinds(scheduler, 9) == expected


def test_decode_calls_go_on_between_the_chunks_of_long_prompts():
    scheduler = ChunkScheduler(GRID)
    scheduler.submit(job(0, max_tokens=40))
    assert kinds(scheduler, 3) == [OpenAction, ChunkAction, DecodeAction]
    for n in (1, 2):
        scheduler.submit(job(n, prompt_length=32))
    # whole batches, of which at most three run in a row
    expected = [OpenAction] * 2 + [ChunkAction] * 3 + [DecodeAction, ChunkAction, DecodeAction]
    assert kinds(scheduler, 8) == expected


def test_a_batch_that_is_not_whole_alternates_with_decode_calls_while_requests_wait():
    scheduler = ChunkScheduler(GRID)
    for n in range(3):
        scheduler.submit(job(n, max_tokens=40))
    kinds(scheduler, 3 + 2 + 1)
    for n in (3, 4):
        scheduler.submit(job(n, prompt_length=20))
    expected = [OpenAction, ChunkAction, DecodeAction, ChunkAction, DecodeAction]
    assert kinds(scheduler, 5) == expected


def test_a_batch_that_is_not_whole_waits_while_few_slots_are_idle():
    """Three of 30, whose rows end one by one; with the fourth it runs."""
    prefill = ((16, 6, 8), (32, 6, 8))
    scheduler = ChunkScheduler(replace(GRID, prefill=prefill, decode_slots=30, chunks_per_decode=5))
    for n in range(40):
        scheduler.submit(job(n, max_tokens=40))
    assert kinds(scheduler, 30 + 5) == [OpenAction] * 30 + [ChunkAction] * 5
    for _ in range(4):
        action = scheduler.next_action()
        assert isinstance(action, DecodeAction)
        scheduler.release(action.slots[0])
        assert kinds(scheduler, 1) == [OpenAction]
    assert len(scheduler.next_action().rows) == 4


def test_when_no_request_waits_prompts_fill_their_slots_and_meet_on_the_way():
    scheduler = ChunkScheduler(GRID)
    scheduler.submit(job(0, max_tokens=40))
    kinds(scheduler, 3)
    scheduler.submit(job(1, prompt_length=20))
    # one chunk ahead of the next
    assert kinds(scheduler, 2) == [OpenAction, ChunkAction]
    scheduler.submit(job(2, prompt_length=20))
    assert kinds(scheduler, 1) == [OpenAction]
    calls = [scheduler.next_action() for _ in range(2)]
    assert [type(call) for call in calls] == [ChunkAction] * 2
    assert [sorted(row.start for row in call.rows) for call in calls] == [[0, 8], [8]]
    assert kinds(scheduler, 2) == [DecodeAction, ChunkAction]


def test_when_no_request_waits_large_chunks_come_before_the_small_ones_that_they_lead_to():
    scheduler = ChunkScheduler(TAILS)
    for n, length in enumerate((29, 3)):
        scheduler.submit(job(n, prompt_length=length))
    kinds(scheduler, 2)
    calls = [scheduler.next_action() for _ in range(6)]
    shapes = [(call.bucket.chunk, call.bucket.length, len(call.rows)) for call in calls]
    assert shapes == [(8, 16, 1), (8, 16, 1), (8, 32, 1), (2, 16, 1), (2, 16, 1), (2, 32, 1)]


def test_prompts_that_generate_nothing_give_their_slots_back():
    scheduler = ChunkScheduler(GRID)
    for n in range(6):
        scheduler.submit(job(n, max_tokens=0, is_scored=True))
    expected = [*[OpenAction] * 4, ChunkAction, *[OpenAction] * 2, ChunkAction, ChunkAction]
    assert kinds(scheduler, 10) == [*expected, type(None)]


def test_sequences_of_a_prompt_are_copied_before_the_first_decodes_on():
    scheduler = ChunkScheduler(GRID)
    scheduler.submit(job(0, num_sequences=3))
    actions = [scheduler.next_action() for _ in range(5)]
    expected = [OpenAction, ChunkAction, ForkAction, ForkAction, DecodeAction]
    assert [type(action) for action in actions] == expected
    assert [action.slot for action in actions[2:4]] == [1, 2]


def test_drain_drops_what_has_no_slot_and_keeps_prompts_that_fill_one():
    scheduler = ChunkScheduler(GRID)
    scheduler.submit(job(0, num_sequences=6))
    for n in range(1, 4):
        scheduler.submit(job(n))
    scheduler.next_action()
    assert [j.number for j in scheduler.drain()] == [1, 2, 3]
    # the two sequences that found no slot belong to a request that has some
    assert scheduler.num_waiting == 1


def test_a_request_that_does_not_fit_is_not_queued():
    scheduler = ChunkScheduler(GRID)
    with pytest.raises(ValueError, match="prefill length 40, in whole chunks of 8"):
        scheduler.submit(job(0, prompt_length=33))
    assert scheduler.num_waiting == 0


def test_requests_that_wait_for_long_slots_do_not_keep_shorter_ones_from_theirs():
    scheduler = ChunkScheduler(RAGGED)
    for n in range(3):
        scheduler.submit(job(n, max_tokens=50))
    for n in range(3, 6):
        scheduler.submit(job(n))
    opened = []
    while isinstance(action := scheduler.next_action(), OpenAction):
        opened.append((action.sequence.job.number, action.slot))
    # slot 1 is too short for request 1, which has no claim on it
    assert opened == [(0, 0), (3, 2), (4, 3), (5, 1)]


def test_a_request_that_lacks_slots_keeps_those_that_it_could_use():
    scheduler = ChunkScheduler(RAGGED)
    scheduler.submit(job(0, max_tokens=50))
    scheduler.submit(job(1, max_tokens=25, num_sequences=2))
    for n in range(2, 6):
        scheduler.submit(job(n))
    opened = []
    while isinstance(action := scheduler.next_action(), OpenAction):
        opened.append((action.sequence.job.number, action.slot))
    assert opened == [(0, 0), (2, 2), (3, 3)]


def test_prompts_that_hold_the_long_slots_do_not_wait_for_others_to_fill_their_call():
    """A call for the span of two long slots has room for eight prompts, so it is never full."""
    few_long = {"decode_slots": 32, "span_slots": (32, 2, 2), "chunks_per_decode": 8}
    grid = replace(GRID, prefill=((16, 2, 8), (32, 8, 8)), **few_long)
    long, short = job(0, prompt_length=30, max_tokens=34), range(1, 9)
    rest = [job(number, prompt_length=30, max_tokens=4) for number in short]
    calls = Play([long, *rest], grid, early=0.0).actions
    # in one slot 34 tokens, four in a call; all others pass through the second meanwhile
    assert sum(isinstance(action, DecodeAction) for action in calls) == -(-34 // 4)
