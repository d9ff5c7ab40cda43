"""The scheduler alone: a pure state machine, tested without a device."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.engine.actions import DecodeAction, ForkAction, PrefillAction, ScheduledRequest
from noria.runtime.engine.page_room import PageRoom
from noria.runtime.engine.scheduler import Scheduler

WHOLE = BucketGrid(
    max_length=64,
    prefill=((8, 4), (32, 2)),
    decode_slots=4,
    page=8,
    steps_per_call=4,
)
CHUNKS = replace(WHOLE, prefill=((64, 2, 8),), chunks_per_decode=3, row_tokens=8)
"""A grid with one piece of a prompt in a call."""
TAILS = replace(CHUNKS, prefill=((64, 4, 2), (64, 1, 8)))
"""A grid with at most four pieces of a prompt in a call."""
GRIDS = {
    "whole": WHOLE,
    "chunks": CHUNKS,
    "tails": TAILS,
    "packed": replace(TAILS, prefill=((64, 3, 2), (64, 4, 8)), row_tokens=None),
}


@pytest.fixture(params=GRIDS.values(), ids=GRIDS)
def grid(request) -> BucketGrid:
    return request.param


def scheduled(
    number, prompt_length=5, max_tokens=8, num_sequences=1, is_scored=False
) -> ScheduledRequest:
    return ScheduledRequest(
        number, prompt_length, prompt_length + max_tokens, num_sequences, is_scored
    )


def random_requests(count: int, seed: int = 1) -> list[ScheduledRequest]:
    rng = random.Random(seed)
    return [
        scheduled(
            n,
            prompt_length=rng.randint(1, 32),
            max_tokens=rng.choice([0, 1, 9, 30]),
            num_sequences=rng.randint(1, 6),
            is_scored=rng.random() < 0.3,
        )
        for n in range(count)
    ]


class Play:
    """Runs a scheduler to the end like the engine; a share of rows end early at each call.

    It tracks the content of each slot, and fails if an action contradicts it.
    """

    def __init__(
        self,
        requests: list[ScheduledRequest],
        grid: BucketGrid,
        seed: int = 0,
        early: float = 0.1,
        drain_after: int | None = None,
    ):
        self.grid, self.early, self.rng = grid, early, random.Random(seed)
        self.scheduler, self.actions = Scheduler(grid), []
        self.submitted, self.dropped, self.kept = [], [], set()
        self.batches_since_decode = 0
        self.owner, self.filled, self.length, self.limit = {}, {}, {}, {}
        pending = list(requests)
        while True:
            if len(self.actions) == drain_after:
                self.kept = {self.owner[slot] for slot in (*self.filled, *self.length)}
                self.dropped = [j.number for j in self.scheduler.drain()]
                pending.clear()
            while pending and self.scheduler.wants_more:
                self.submitted.append(pending.pop(0))
                self.scheduler.submit(self.submitted[-1])
            action = self.scheduler.next_action()
            if action is None:
                assert not pending and not self.filled and not self.length
                assert not self.scheduler.num_waiting
                return
            self.actions.append(action)
            self._carry_out(action)

    @property
    def rows(self) -> list:
        """Return the bucket and the row of every piece of a prompt, in order."""
        calls = (action for action in self.actions if isinstance(action, PrefillAction))
        return [(call.bucket, row) for call in calls for row in call.rows]

    def pieces_of(self, number: int) -> list[tuple]:
        """Return bucket, start and count of each piece of a request, in order."""
        return [
            (bucket, row.start, row.count)
            for bucket, row in self.rows
            if row.sequence.request.number == number
        ]

    def _carry_out(self, action) -> None:
        match action:
            case PrefillAction():
                assert 1 <= len(action.rows) <= action.bucket.batch
                self.batches_since_decode += bool(self.length)
                most = self.grid.chunks_per_decode
                assert most is None or self.batches_since_decode <= most
                of_slots = Counter(row.slot for row in action.rows if row.slot is not None)
                tokens = self.grid.row_tokens
                limit = 1 if not self.grid.chunks else tokens and tokens // action.bucket.tokens
                assert limit is None or max(of_slots.values(), default=1) <= limit
                for row in action.rows:
                    self._prefill(action, row)
            case ForkAction():
                # the source has only the prompt
                assert self.length[action.source] == action.sequence.request.prompt_length
                self._decodes(action.slot, action.sequence.request)
            case DecodeAction():
                assert set(action.slots) == set(self.length)
                self.batches_since_decode = 0
                assert action.length == max(map(self._next_length, action.slots))
                for slot in action.slots:
                    self._grow(slot)

    def _prefill(self, action, row) -> None:
        of = row.sequence.request
        assert of.is_scored == action.is_scored and row.count <= action.bucket.tokens
        if row.slot is None:
            assert not of.generates and row.count == of.prompt_length
            return
        if not row.start:
            assert row.slot not in self.filled and row.slot not in self.length
            self.filled[row.slot], self.owner[row.slot] = 0, of.number
        assert self.filled[row.slot] == row.start
        self.filled[row.slot] += row.count
        if row.is_last:
            del self.filled[row.slot]
            if of.generates:
                self._decodes(row.slot, of)

    def _decodes(self, slot: int, of: ScheduledRequest) -> None:
        assert slot not in self.filled and slot not in self.length
        self.length[slot], self.limit[slot] = of.prompt_length, of.max_total_length
        self.owner[slot] = of.number

    def _next_length(self, slot: int) -> int:
        return min(self.length[slot] + self.grid.steps_per_call, self.limit[slot])

    def _grow(self, slot: int) -> None:
        grown = self._next_length(slot) - self.length[slot]
        self.length[slot] += grown
        if self.length[slot] == self.limit[slot] or self.rng.random() < self.early:
            del self.length[slot]
            self.scheduler.slots.release(slot)
        else:
            self.scheduler.slots.advance(slot, grown)


def check_all_ran(play: Play, requests: list[ScheduledRequest]) -> None:
    """Check that every sequence decodes once, and every prompt is read as often as needed."""
    begun, read = Counter(), Counter()
    for _, row in play.rows:
        read[row.sequence.request.number] += row.count
        if row.is_last:
            begun[row.sequence.request.number, row.sequence.sample] += 1
    for action in play.actions:
        if isinstance(action, ForkAction):
            begun[action.sequence.request.number, action.sequence.sample] += 1
    numbers = {j.number for j in requests}
    begun = Counter({key: count for key, count in begun.items() if key[0] in numbers})
    samples = {j.number: range(j.num_sequences if j.generates else 1) for j in requests}
    assert begun == Counter((number, i) for number, each in samples.items() for i in each)
    for j in requests:
        # several sets of slots if there are more sequences than slots
        sets = -(-j.num_sequences // play.grid.decode_slots) if j.generates else 1
        assert read[j.number] == sets * j.prompt_length


@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_decodes_exactly_once_and_every_prompt_is_read(grid, seed):
    requests = random_requests(200, seed)
    check_all_ran(Play(requests, grid, seed), requests)


@pytest.mark.parametrize("seed", range(20))
def test_drain_drops_requests_without_a_slot_at_any_moment_and_all_others_run(grid, seed):
    moment = random.Random(seed).randint(0, 60)
    play = Play(random_requests(100, seed), grid, seed, drain_after=moment)
    dropped = set(play.dropped)
    assert len(dropped) == len(play.dropped) and not dropped & play.kept
    check_all_ran(play, [j for j in play.submitted if j.number not in dropped])
    later = (call for call in play.actions[moment:] if isinstance(call, PrefillAction))
    assert not dropped & {row.sequence.request.number for call in later for row in call.rows}


def test_drain_keeps_the_sequences_of_a_request_that_has_slots():
    scheduler = Scheduler(WHOLE)
    scheduler.submit(scheduled(0, num_sequences=6))
    for n in range(1, 4):
        scheduler.submit(scheduled(n))
    scheduler.next_action()
    assert [j.number for j in scheduler.drain()] == [1, 2, 3]
    # two sequences found no slot
    assert scheduler.num_waiting == 1


def test_the_pieces_of_a_prompt_follow_from_its_length_whatever_else_waits(grid):
    requests = [scheduled(n, prompt_length=1 + n % 32) for n in range(100)]
    play = Play(requests, grid)
    for j in requests:
        pieces = play.pieces_of(j.number)
        assert pieces == Play([j], grid).pieces_of(j.number)
        assert [bucket for bucket, _, _ in pieces] == grid.buckets_of(j.prompt_length)


def test_a_prompt_is_prefilled_in_large_chunks_and_then_in_small_ones():
    found = Play([scheduled(0, prompt_length=29)], TAILS).pieces_of(0)
    pieces = [(bucket.chunk, start, count) for bucket, start, count in found]
    assert pieces == [
        *((8, start, 8) for start in (0, 8, 16)),
        *((2, 24 + start, count) for start, count in ((0, 2), (2, 2), (4, 1))),
    ]


@pytest.mark.parametrize(
    "odd", [scheduled(60, 12, 4, 1, True), scheduled(60, 3), scheduled(60, 12, 4, 4)]
)
def test_no_prompt_waits_while_a_stream_of_others_begins(odd):
    """Otherwise full batches of prompts of one length would go first for ever."""
    grid = replace(CHUNKS, prefill=((64, 3, 2), (64, 3, 4)), row_tokens=4)
    requests = [odd if n == odd.number else scheduled(n, 24, 1) for n in range(600)]
    begun = [row.sequence.request.number for _, row in Play(requests, grid).rows if not row.start]
    ahead = [number for number in begun[: begun.index(odd.number)] if number > odd.number]
    # at most the number of requests that wait at a time
    assert len(ahead) <= 2 * (4 + 3 + 3) + 3


def kinds(scheduler: Scheduler, count: int) -> list[type]:
    return [type(scheduler.next_action()) for _ in range(count)]


def begun_by(call: PrefillAction) -> list[tuple]:
    return [(row.sequence.request.number, row.slot) for row in call.rows]


def test_slots_fill_before_the_first_decode_call():
    scheduler = Scheduler(CHUNKS)
    for n in range(5):
        scheduler.submit(scheduled(n, prompt_length=12))
    assert kinds(scheduler, 5) == [*[PrefillAction] * 4, DecodeAction]


def test_a_free_slot_is_refilled_before_the_next_decode_call():
    scheduler = Scheduler(WHOLE)
    for n in range(9):
        scheduler.submit(scheduled(n))
    assert kinds(scheduler, 2) == [PrefillAction, DecodeAction]
    scheduler.slots.release(2)
    assert begun_by(scheduler.next_action()) == [(4, 2)]
    assert kinds(scheduler, 1) == [DecodeAction]


def test_a_full_batch_goes_before_an_older_one_that_is_not_full():
    scheduler = Scheduler(CHUNKS)
    scheduler.submit(scheduled(0, prompt_length=20))
    for n in (1, 2):
        scheduler.submit(scheduled(n, prompt_length=5, is_scored=True))
    scheduler.submit(scheduled(3, prompt_length=60 - 32, max_tokens=30))
    found = [begun_by(scheduler.next_action()) for _ in range(3)]
    assert found == [[(0, 0), (3, 1)], [(0, 0), (3, 1)], [(0, 0), (3, 1)]]


def test_while_all_slots_idle_a_full_batch_goes_before_an_older_one_that_is_not_full():
    """Each prompt has a long piece and a short piece; four of these prompts make a full batch."""
    grid = replace(TAILS, prefill=((64, 4, 2), (64, 2, 8)), decode_slots=8, pages=64)
    scheduler = Scheduler(grid)
    for number in range(6):
        scheduler.submit(scheduled(number, prompt_length=10))
    calls = [scheduler.next_action() for _ in range(3)]
    assert [(call.bucket.tokens, len(call.rows)) for call in calls] == [(8, 2), (8, 2), (2, 4)]


def test_decode_calls_go_on_between_the_chunks_of_long_prompts():
    scheduler = Scheduler(CHUNKS)
    scheduler.submit(scheduled(0, max_tokens=40))
    assert kinds(scheduler, 2) == [PrefillAction, DecodeAction]
    for n in (1, 2):
        scheduler.submit(scheduled(n, prompt_length=32))
    # full batches, of which at most three run in a row
    expected = [*[PrefillAction] * 3, DecodeAction, PrefillAction, DecodeAction]
    assert kinds(scheduler, 6) == expected


def test_a_batch_that_is_not_full_alternates_with_decode_calls_while_requests_wait():
    scheduler = Scheduler(CHUNKS)
    for n in range(3):
        scheduler.submit(scheduled(n, max_tokens=40))
    assert kinds(scheduler, 3) == [PrefillAction, PrefillAction, DecodeAction]
    for n in (3, 4):
        scheduler.submit(scheduled(n, prompt_length=20))
    expected = [PrefillAction, DecodeAction, PrefillAction, DecodeAction]
    assert kinds(scheduler, 4) == expected


def test_the_last_prompt_of_a_bucket_waits_for_no_other_when_none_is_left():
    """The 31 prompts run in calls of two; one idle slot is less than a sixteenth of 31."""
    grid = BucketGrid(32, ((8, 2),), 31, page=8, steps_per_call=4)
    scheduler = Scheduler(grid)
    for n in range(31):
        scheduler.submit(scheduled(n, max_tokens=8))
    assert kinds(scheduler, 17) == [*[PrefillAction] * 16, DecodeAction]
    assert scheduler.wants_more


@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunks"])
def test_a_batch_that_is_not_full_waits_while_few_slots_are_idle(is_chunked):
    """The batch runs when a sixteenth of the 30 slots is idle, or an eighth in a packed grid."""
    grid = replace(CHUNKS, prefill=((64, 6, 8),), chunks_per_decode=5)
    grid = grid if is_chunked else replace(WHOLE, prefill=((8, 6), (32, 6)))
    grid = replace(grid, decode_slots=30, pages=240)
    scheduler = Scheduler(grid)
    for n in range(40):
        scheduler.submit(scheduled(n, max_tokens=40))
    assert kinds(scheduler, 5) == [PrefillAction] * 5
    slots = (3, 7, 8, 11) if is_chunked else (3, 7)
    for slot in slots:
        assert isinstance(scheduler.next_action(), DecodeAction)
        scheduler.slots.release(slot)
    assert begun_by(scheduler.next_action()) == list(enumerate(slots, start=30))


def test_when_no_request_waits_prompts_meet_on_the_way():
    scheduler = Scheduler(CHUNKS)
    scheduler.submit(scheduled(0, max_tokens=40))
    kinds(scheduler, 2)
    scheduler.submit(scheduled(1, prompt_length=20))
    # one chunk ahead of the next
    assert kinds(scheduler, 1) == [PrefillAction]
    scheduler.submit(scheduled(2, prompt_length=20))
    calls = [scheduler.next_action() for _ in range(2)]
    assert [sorted(row.start for row in call.rows) for call in calls] == [[0, 8], [8, 16]]
    assert kinds(scheduler, 2) == [DecodeAction, PrefillAction]


def test_when_no_request_waits_large_chunks_come_before_the_small_ones_that_they_lead_to():
    scheduler = Scheduler(TAILS)
    for n, length in enumerate((29, 3)):
        scheduler.submit(scheduled(n, prompt_length=length))
    calls = [scheduler.next_action() for _ in range(5)]
    shapes = [(call.bucket.chunk, len(call.rows)) for call in calls]
    # the three small pieces of the long prompt run with the first one of the short prompt
    assert shapes == [(8, 1), (8, 1), (8, 1), (2, 4), (2, 1)]


def test_sequences_of_a_prompt_are_copied_before_the_first_decodes_on(grid):
    scheduler = Scheduler(grid)
    scheduler.submit(scheduled(0, num_sequences=3))
    actions = [scheduler.next_action() for _ in range(6)]
    last = next(i for i, action in enumerate(actions) if isinstance(action, ForkAction))
    expected = [*[PrefillAction] * last, ForkAction, ForkAction, DecodeAction]
    assert [type(action) for action in actions[: last + 3]] == expected
    source = actions[0].rows[0].slot
    copies = actions[last : last + 2]
    assert {copy.source for copy in copies} == {source}
    assert len({source, *(copy.slot for copy in copies)}) == 3


def test_whole_prompts_that_are_only_scored_use_no_slot_while_all_slots_decode():
    scheduler = Scheduler(WHOLE)
    for n in range(4):
        scheduler.submit(scheduled(n, max_tokens=40))
    while not isinstance(scheduler.next_action(), DecodeAction):
        pass
    # an older generating prompt waits for a slot in the same bucket
    scheduler.submit(scheduled(4, is_scored=True))
    for n in range(5, 9):
        scheduler.submit(scheduled(n, max_tokens=0, is_scored=True))
    assert begun_by(scheduler.next_action()) == [(n, None) for n in range(5, 9)]
    assert isinstance(scheduler.next_action(), DecodeAction)
    assert scheduler.num_waiting == 1


def test_prompts_that_find_no_free_slot_are_not_looked_at(monkeypatch):
    looked_at = []

    def count(self, prompt, free):
        looked_at.append(prompt.request.number)
        return slots_for(self, prompt, free)

    slots_for = PageRoom.slots_for
    scheduler = Scheduler(WHOLE)
    for n in range(3):
        scheduler.submit(scheduled(n, max_tokens=30))
    while not isinstance(scheduler.next_action(), DecodeAction):
        pass
    for n in range(10, 210):
        scheduler.submit(scheduled(n, max_tokens=30))
    monkeypatch.setattr(PageRoom, "slots_for", count)
    while not isinstance(scheduler.next_action(), DecodeAction):
        pass
    assert len(looked_at) <= 8


def test_a_prompt_that_is_scored_in_several_pieces_gives_its_slot_back():
    requests = [scheduled(n, prompt_length=20, max_tokens=0, is_scored=True) for n in range(9)]
    play = Play(requests, CHUNKS)
    assert {row.slot for _, row in play.rows} <= set(range(4))
    assert len(play.rows) == 9 * 3


def begun(scheduler: Scheduler) -> dict[int, int]:
    """Return the slot of each prompt that begins before the first decode call."""
    found = {}
    while isinstance(action := scheduler.next_action(), PrefillAction):
        found |= {row.sequence.request.number: row.slot for row in action.rows}
    return found


@pytest.mark.parametrize("grid", [WHOLE, CHUNKS], ids=["whole", "chunks"])
def test_a_request_that_lacks_slots_keeps_those_that_it_could_use(grid):
    scheduler = Scheduler(grid)
    scheduler.submit(scheduled(0, num_sequences=3))
    scheduler.submit(scheduled(1, num_sequences=2))
    for n in range(2, 6):
        scheduler.submit(scheduled(n))
    assert begun(scheduler) == {0: 0}
    while not isinstance(action := scheduler.next_action(), DecodeAction):
        pass
    scheduler.slots.release(action.slots[0])
    assert begun(scheduler)[1] in (action.slots[0], 3)


@pytest.mark.parametrize(("grid", "length"), [(WHOLE, 33), (CHUNKS, 65)], ids=["whole", "chunks"])
def test_a_request_that_does_not_fit_is_not_queued(grid, length):
    scheduler = Scheduler(grid)
    with pytest.raises(ValueError, match=f"prefill length {length};"):
        scheduler.submit(scheduled(0, prompt_length=length))
    assert scheduler.num_waiting == 0
