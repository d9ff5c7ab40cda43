"""The scheduler: which graph runs next, as a pure state machine.

No clock, no I/O, no device: the engine drives it, and so can a simulator. It knows requests by a
number and their lengths. Policy, in this order:

1. a free slot is refilled from prompts that are prefilled already, before anything else runs;
2. when slots are free and nothing is prefilled, one prefill batch runs: the fullest choice first (a
bucket
   with a whole batch waiting, the one whose first prompt came first; if none, the bucket of the
   oldest prompt). What finds no slot waits prefilled, so batches stay full when slots free up one
   by one;
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


@dataclass(frozen=True)
class _Ready:
    sequence: Sequence
    prefill: int
    row: int


class Scheduler:
    """Queues, slots and the choice of the next action."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._waiting: dict[_Queue, deque[Job]] = {}
        self._ready: deque[_Ready] = deque()
        self._slots = DecodeSlots(grid)
        self._num_prefills = 0

    @property
    def num_waiting(self) -> int:
        """Requests that no prefill has taken yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def wants_more(self) -> bool:
        """Whether the queue is too short to choose full batches from."""
        rows = sum(bucket.batch for bucket in self._grid.prefill)
        return self.num_waiting < 2 * (rows + len(self._slots))

    def submit(self, job: Job) -> None:
        """Queue a request that fits the grid."""
        bucket = self._grid.fit(job.prompt_length, job.limit - job.prompt_length)
        self._waiting.setdefault((bucket, job.is_scored), deque()).append(job)

    def next_action(self) -> Action | None:
        """What to run next; None when all work is done."""
        free = self._slots.free
        if free and self._ready:
            return self._insert(free[0])
        queues = self._open_queues(bool(free))
        if queues:
            return self._prefill(queues)
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
        dropped = [job for queue in self._waiting.values() for job in queue]
        dropped += {
            ready.sequence.job.number: ready.sequence.job
            for ready in self._ready
            if ready.sequence.job.number not in in_flight
        }.values()
        self._ready = deque(r for r in self._ready if r.sequence.job.number in in_flight)
        self._waiting.clear()
        return dropped

    def _open_queues(self, has_free_slot: bool) -> list[_Queue]:
        """Queues that a prefill may take from; prompts that generate nothing need no slot."""
        return [
            key
            for key, queue in self._waiting.items()
            if has_free_slot or not any(job.generates for job in queue)
        ]

    def _insert(self, slot: int) -> InsertAction:
        ready = self._ready.popleft()
        self._slots.put(slot, ready.sequence)
        is_last = all(other.prefill != ready.prefill for other in self._ready)
        return InsertAction(slot, ready.sequence, ready.prefill, ready.row, is_last)

    def _prefill(self, queues: list[_Queue]) -> PrefillAction:
        bucket, is_scored = key = self._choose(queues)
        queue = self._waiting[key]
        jobs = tuple(queue.popleft() for _ in range(min(bucket.batch, len(queue))))
        if not queue:
            del self._waiting[key]
        number = self._num_prefills
        self._num_prefills += 1
        for row, job in enumerate(jobs):
            self._ready.extend(
                _Ready(Sequence(job, sample), number, row)
                for sample in range(job.num_sequences if job.generates else 0)
            )
        return PrefillAction(number, bucket, is_scored, jobs)

    def _choose(self, queues: list[_Queue]) -> _Queue:
        full = [key for key in queues if len(self._waiting[key]) >= key[0].batch]
        return min(full or queues, key=lambda key: self._waiting[key][0].number)
