"""The scheduler: which graph runs next, as a pure state machine.

No clock, no I/O, no device: the engine drives it, and so can a simulator. It knows requests by a
number and their lengths. Policy, in this order:

1. a free slot is refilled from prompts that are prefilled already, before anything else runs; each
   goes into the shortest slot that holds all that it may become;
2. when slots are free and nothing that fits them is prefilled, one prefill batch runs: the fullest
   choice first (a bucket with a whole batch waiting, the one whose first prompt came first; if
   none, the bucket of the oldest prompt). What finds no slot waits prefilled, so batches stay full
   when slots free up one by one; of rows that need slots as long, none is prefilled before it;
3. otherwise the live slots decode, over the shortest span that holds them all.

Guarantees: a request passes through the prefill bucket of its own length, whatever else waits;
every submitted sequence is inserted exactly once or dropped by `drain`.
"""

from collections import deque
from dataclasses import dataclass

from ..compile.bucket_grid import BucketGrid, PrefillBucket
from .decode_slots import DecodeAction, DecodeSlots, Job, Sequence


@dataclass(frozen=True)
class PrefillAction:
    """Run one prefill batch; its rows in this order, dummies after them."""

    number: int
    bucket: PrefillBucket
    is_scored: bool
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class InsertAction:
    """Give a slot to a row of an earlier prefill."""

    slot: int
    sequence: Sequence
    prefill: int
    row: int
    is_last_of_prefill: bool
    """Whether the prefill's arrays can be released after this."""


Action = PrefillAction | InsertAction | DecodeAction
_Queue = tuple[PrefillBucket, bool]
_Lane = deque[Job]
NO_SLOT = 0
"""In place of how far a slot must reach: for prompts that generate nothing."""
BLOCKED_QUEUE = 8
"""Times as many requests that wait while none of them fits a free slot."""


@dataclass(frozen=True)
class _Ready:
    sequence: Sequence
    prefill: int
    row: int


class Scheduler:
    """Queues, slots and the choice of the next action."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._waiting: dict[_Queue, dict[int, _Lane]] = {}
        """By queue and by how far a slot must reach."""
        self._ready: deque[_Ready] = deque()
        self._slots = DecodeSlots(grid)
        self._num_prefills = 0

    @property
    def num_waiting(self) -> int:
        """Requests that no prefill has taken yet."""
        return sum(len(lane) for lanes in self._waiting.values() for lane in lanes.values())

    @property
    def wants_more(self) -> bool:
        """Whether the queue is too short to choose full batches from."""
        rows = sum(bucket.batch for bucket in self._grid.prefill)
        enough = 2 * (rows + len(self._slots))
        if (waiting := self.num_waiting) < enough:
            return True
        # while what waits is too long for the slots that are free, something shorter may come
        is_blocked = bool(self._slots.free) and not self._choices()
        return is_blocked and waiting < BLOCKED_QUEUE * enough

    def submit(self, job: Job) -> None:
        """Queue a request that fits the grid."""
        bucket = self._grid.fit(job.prompt_length, job.limit - job.prompt_length)
        lanes = self._waiting.setdefault((bucket, job.is_scored), {})
        lanes.setdefault(self._reach(job), deque()).append(job)

    def next_action(self) -> Action | None:
        """What to run next; None when all work is done."""
        longest = self._slots.longest_free
        for ready in self._ready:
            if ready.sequence.job.limit <= longest:
                return self._insert(ready)
        if choices := self._choices():
            return self._prefill(choices)
        return self._slots.decode()

    def advance(self, slot: int, num_tokens: int) -> None:
        """Note that a slot's row grew."""
        self._slots.advance(slot, num_tokens)

    def release(self, slot: int) -> None:
        """Free a slot whose row ended."""
        self._slots.release(slot)

    def drain(self) -> list[Job]:
        """Drop all that has no slot yet, unless the request has another sequence in one."""
        in_flight = self._slots.job_numbers
        lanes = [lane for lanes in self._waiting.values() for lane in lanes.values()]
        dropped = [job for lane in lanes for job in lane]
        dropped += {
            ready.sequence.job.number: ready.sequence.job
            for ready in self._ready
            if ready.sequence.job.number not in in_flight
        }.values()
        self._ready = deque(r for r in self._ready if r.sequence.job.number in in_flight)
        self._waiting.clear()
        return dropped

    def _choices(self) -> dict[_Queue, list[_Lane]]:
        """What the next prefill may take, by queue: of those of which a row finds a slot at once.

        Prompts that generate nothing need no slot.
        """
        longest = self._slots.longest_free
        in_stock = {self._reach(ready.sequence.job) for ready in self._ready}
        choices = {}
        for key, lanes in self._waiting.items():
            wanted = {reach: lane for reach, lane in lanes.items() if reach not in in_stock}
            if any(NO_SLOT < reach <= longest for reach in wanted) or set(lanes) == {NO_SLOT}:
                choices[key] = list(wanted.values())
        return choices

    def _reach(self, job: Job) -> int:
        """How far a slot must reach at least that a job's sequences fit into."""
        return self._grid.reach_of(job.limit) if job.generates else NO_SLOT

    def _take(self, key: _Queue, lanes: list[_Lane]) -> Job:
        """The first job of some lanes of a queue."""
        lane = min(filter(None, lanes), key=lambda lane: lane[0].number)
        job = lane.popleft()
        if not lane:
            del self._waiting[key][self._reach(job)]
        if not self._waiting[key]:
            del self._waiting[key]
        return job

    def _insert(self, ready: _Ready) -> InsertAction:
        self._ready.remove(ready)
        slot = self._slots.those_for(ready.sequence.job, self._slots.free)[0]
        self._slots.put(slot, ready.sequence)
        is_last = all(other.prefill != ready.prefill for other in self._ready)
        return InsertAction(slot, ready.sequence, ready.prefill, ready.row, is_last)

    def _prefill(self, choices: dict[_Queue, list[_Lane]]) -> PrefillAction:
        bucket, is_scored = key = _fullest(choices)
        jobs = tuple(self._take(key, choices[key]) for _ in range(_num_rows(key, choices[key])))
        number = self._num_prefills
        self._num_prefills += 1
        for row, job in enumerate(jobs):
            self._ready.extend(
                _Ready(Sequence(job, sample), number, row)
                for sample in range(job.num_sequences if job.generates else 0)
            )
        return PrefillAction(number, bucket, is_scored, jobs)


def _fullest(choices: dict[_Queue, list[_Lane]]) -> _Queue:
    full = [key for key, lanes in choices.items() if _num_rows(key, lanes) == key[0].batch]
    return min(full or choices, key=lambda key: min(lane[0].number for lane in choices[key]))


def _num_rows(queue: _Queue, lanes: list[_Lane]) -> int:
    return min(queue[0].batch, sum(map(len, lanes)))
