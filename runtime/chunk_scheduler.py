"""The scheduler of plans with chunks: prompts are poured into their slots, piece by piece.

A pure state machine as `Scheduler` is: no clock, no I/O, no device. Policy, in this order:

1. what waits takes free slots, first come first served: a request as many as it has sequences, so
   that its prompt is poured into one of them and copied to the others. Where slots have several
   lengths, it takes the shortest that hold all that it may become; while it lacks some, those that
   come after it take shorter ones;
2. copies are made as soon as their prompt is whole;
3. a chunk batch runs, of one size and span: a whole one first, the one whose first prompt came
   first. At most `chunks_per_decode` of them run in a row while any row decodes. While requests
   wait, one that is not whole runs only after a decode call, whose rows may leave their slots to
   prompts to fill it, and not before an eighth of the slots is taken by prompts: to leave fewer
   idle costs less than dummy rows. Where slots have several lengths, prompts that hold more than a
   quarter of those that reach so far wait for no others: there may be none for such slots. When no
   requests wait nothing is gained by waiting: the largest chunks
   come first, and of them the shortest span, as prompts go on from these to the other ones, and
   then all slots decode together;
4. otherwise the live slots decode, over the shortest span that holds them all.

Guarantees: the chunks of a prompt and their graphs follow from its own length, whatever else waits;
every submitted sequence decodes exactly once or is dropped by `drain`; a prompt is poured once, and
again for each further set of sequences where it has more than there are slots that hold them.
"""

from collections import deque
from dataclasses import dataclass

from ..compile.bucket_grid import BucketGrid, PrefillBucket
from .decode_slots import DecodeAction, DecodeSlots, Job, Sequence


@dataclass(frozen=True)
class OpenAction:
    """Give a slot to a sequence whose prompt is to be poured in."""

    slot: int
    sequence: Sequence


@dataclass(frozen=True)
class ChunkOfPrompt:
    """One row of a chunk call."""

    slot: int
    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is whole after it."""
        return self.start + self.count == self.sequence.job.prompt_length


@dataclass(frozen=True)
class ChunkAction:
    """Run one chunk batch; its rows in this order, dummies after them."""

    bucket: PrefillBucket
    is_scored: bool
    rows: tuple[ChunkOfPrompt, ...]


@dataclass(frozen=True)
class ForkAction:
    """Copy a whole prompt to the slot of another sequence of its request."""

    source: int
    slot: int
    sequence: Sequence


IDLE_SHARE = 1 / 8
"""Of all slots, that may be taken by prompts while these wait for others to fill a batch."""
MOST_TAKEN = 1 / 4
"""The same of the slots of a length, where slots have several."""

Action = OpenAction | ChunkAction | ForkAction | DecodeAction
_Queue = tuple[PrefillBucket, bool]


@dataclass(frozen=True)
class _Waiting:
    job: Job
    first_sample: int = 0


@dataclass
class _Filling:
    """A prompt on its way into a slot, and the slots that are kept for its other sequences."""

    sequence: Sequence
    slot: int
    kept: list[int]
    queue: _Queue
    """Where it waits for its next piece."""
    length: int = 0


class ChunkScheduler:
    """Prompts that wait and that fill slots, and the choice of the next action."""

    def __init__(self, grid: BucketGrid):
        assert grid.chunks_per_decode is not None
        self._grid, self._most_chunks = grid, grid.chunks_per_decode
        self._waiting: deque[_Waiting] = deque()
        self._filling: list[_Filling] = []
        """In the order in which they took their slots."""
        self._forks: deque[ForkAction] = deque()
        self._slots = DecodeSlots(grid)
        self._chunks_since_decode = 0

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def wants_more(self) -> bool:
        """Whether the queue is too short to keep slots full."""
        return self.num_waiting < 2 * len(self._slots)

    def submit(self, job: Job) -> None:
        """Queue a request that fits the grid."""
        self._grid.fit(job.prompt_length, job.limit - job.prompt_length)
        self._waiting.append(_Waiting(job))

    def next_action(self) -> Action | None:
        """What to run next; None when all work is done."""
        if self._forks:
            fork = self._forks.popleft()
            self._slots.put(fork.slot, fork.sequence)
            return fork
        if (opened := self._open()) is not None:
            return opened
        if (chunk := self._choose()) is not None:
            self._chunks_since_decode += self._slots.any_live
            return self._pour(chunk)
        self._chunks_since_decode = 0
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
        in_flight |= {filling.sequence.job.number for filling in self._filling}
        dropped = [entry.job for entry in self._waiting if entry.job.number not in in_flight]
        self._waiting = deque(e for e in self._waiting if e.job.number in in_flight)
        return dropped

    def _open(self) -> OpenAction | None:
        taken = set(self._taken)
        free = [slot for slot in self._slots.free if slot not in taken]
        for index, entry in enumerate(self._waiting):
            if not free:
                return None
            job, first = entry.job, entry.first_sample
            left = job.num_sequences - first if job.generates else 1
            count = min(left, self._slots.num_for(job))
            suited = self._slots.those_for(job, free)
            if len(suited) < count:
                # what it waits for is not for those that come after it
                free = [slot for slot in free if slot not in suited]
                continue
            if count < left:
                self._waiting[index] = _Waiting(job, first + count)
            else:
                del self._waiting[index]
            sequence = Sequence(job, first)
            queue = self._queue_of(job, 0)
            self._filling.append(_Filling(sequence, suited[0], suited[1:count], queue))
            return OpenAction(suited[0], sequence)
        return None

    def _choose(self) -> tuple[_Queue, list[_Filling]] | None:
        """The rows of the next chunk batch, if one is to run now."""
        queues: dict[_Queue, list[_Filling]] = {}
        for filling in self._filling:
            queues.setdefault(filling.queue, []).append(filling)
        starved = self._starved()
        urgent = {key: rows for key, rows in queues.items() if starved & self._reaches(rows)}
        queues = urgent or queues
        whole = [key for key, rows in queues.items() if len(rows) >= key[0].batch]
        is_patient = not (whole or urgent) and bool(self._waiting)
        if not queues or (self._slots.any_live and self._must_decode(is_patient)):
            return None
        if whole or self._waiting:
            # by the first of their rows, as they were found
            key = (whole or list(queues))[0]
        else:
            key = min(queues, key=lambda queue: (-queue[0].tokens, queue[0].length))
        return key, queues[key][: key[0].batch]

    def _must_decode(self, is_patient: bool) -> bool:
        """Whether live rows decode before more is poured."""
        if not is_patient:
            return self._chunks_since_decode >= self._most_chunks
        return self._chunks_since_decode > 0 or len(self._taken) < IDLE_SHARE * len(self._slots)

    @property
    def _taken(self) -> list[int]:
        """Slots of prompts that are poured in, and those kept for their other sequences."""
        return [slot for filling in self._filling for slot in (filling.slot, *filling.kept)]

    def _starved(self) -> set[int]:
        """Where slots have several lengths, those lengths of which most slots do not decode.

        Their rows may be too few to fill a call, however long they wait for each other.
        """
        if self._grid.span_slots is None:
            return set()
        taken = self._taken
        return {
            reach
            for reach in self._grid.decode_spans
            if self._slots.num_reaching(reach, taken) > MOST_TAKEN * self._slots.num_reaching(reach)
        }

    def _reaches(self, rows: list[_Filling]) -> set[int]:
        return {self._slots.reach(filling.slot) for filling in rows}

    def _queue_of(self, job: Job, length: int) -> _Queue:
        return self._grid.bucket_of(job.prompt_length, length), job.is_scored

    def _pour(self, chosen: tuple[_Queue, list[_Filling]]) -> ChunkAction:
        (bucket, is_scored), batch = chosen
        rows = []
        for filling in batch:
            left = filling.sequence.job.prompt_length - filling.length
            count = min(bucket.tokens, left)
            rows.append(ChunkOfPrompt(filling.slot, filling.sequence, filling.length, count))
            filling.length += count
            if count == left:
                self._filled(filling)
            else:
                filling.queue = self._queue_of(filling.sequence.job, filling.length)
        return ChunkAction(bucket, is_scored, tuple(rows))

    def _filled(self, filling: _Filling) -> None:
        self._filling.remove(filling)
        job, sample = filling.sequence.job, filling.sequence.sample
        if not job.generates:
            return
        self._slots.put(filling.slot, filling.sequence)
        self._forks.extend(
            ForkAction(filling.slot, slot, Sequence(job, sample + i))
            for i, slot in enumerate(filling.kept, start=1)
        )
