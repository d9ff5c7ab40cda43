"""The scheduler: which graph runs next, as a pure state machine.

No clock, no I/O, no device: the engine drives it, and so can a simulator. It knows requests by a
number and their lengths. A prompt is prefilled piece by piece, straight into its slot; a whole
prompt is one piece. Policy, in this order:

1. the slot of a complete prompt is copied to the other sequences of its request;
2. a prefill batch runs. The candidates are the buckets in which started prompts have their next
   piece, and the bucket of the oldest prompt that waits and for which there are slots: the shortest
   that hold all that it may become, and none that an older prompt lacks. Waiting prompts of the
   same bucket fill a batch up, if they are not so much younger than the oldest that it would wait
   for ever. A full batch goes first, then the one with the oldest prompt. While rows decode and
   requests wait, a batch that is not full waits for a decode call, and until a share of the slots
   that its oldest prompt may have is idle: to leave fewer idle costs less than dummy rows. A batch
   of prompts that only few, long slots hold counts as full from a larger idle share of these on; a
   prompt that needs no slot waits for none, nor does a batch of whole prompts that nothing is left
   to fill. At most `chunks_per_decode` batches run in a row while any row decodes. When no requests
   wait, nothing is gained by waiting: the largest pieces come
   first, and of them the shortest span, as prompts go on from these to the others, and then all
   slots decode together;
3. otherwise the live slots decode, over the shortest span that holds them all.

Guarantees: the pieces of a prompt and their graphs follow from its own length, whatever else waits;
every submitted sequence decodes exactly once or is dropped by `drain`; a prompt is prefilled once,
and again for each further set of sequences where it has more than there are slots that hold them.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import chain

from ...compile.grids.bucket_grid import BucketGrid, PrefillBucket
from .decode_slots import DecodeAction, DecodeSlots, ScheduledRequest, ScheduledSequence


@dataclass(frozen=True)
class PromptPiece:
    """One row of a prefill call."""

    slot: int | None
    """None for a prompt that is only scored, in one piece."""
    sequence: ScheduledSequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it."""
        return self.start + self.count == self.sequence.request.prompt_length


@dataclass(frozen=True)
class PrefillAction:
    """Run one prefill batch; its rows in this order, dummies after them."""

    bucket: PrefillBucket
    is_scored: bool
    rows: tuple[PromptPiece, ...]


@dataclass(frozen=True)
class ForkAction:
    """Copy a complete prompt to the slot of another sequence of its request."""

    source: int
    slot: int
    sequence: ScheduledSequence


IDLE_SHARE = 1 / 16
"""Share of the slots that a prompt may have which are idle when a batch runs that is not full."""
FEW_SLOTS = 1 / 4
"""The share of all slots below which the slots that a prompt may have are few."""
MANY_IDLE = 1 / 4
"""The share of few slots from which on a batch for these runs as a full one does: there may never
be other prompts to fill it. Where most slots hold a prompt, the next prompts fill its batch."""
NO_SLOT = 0
"""In place of how far a slot must reach: for prompts that are scored in one piece."""

Action = PrefillAction | ForkAction | DecodeAction
_Queue = tuple[PrefillBucket, bool]


@dataclass(eq=False)
class _Prompt:
    """A prompt with pieces left to run, and the sequences that it is for."""

    request: ScheduledRequest
    first_sample: int
    num_slots: int
    slots: list[int] = field(default_factory=list)
    """Empty until its first piece runs."""
    length: int = 0


class Scheduler:
    """Prompts that wait and that are under way, slots, and the choice of the next action."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._max_batches = grid.chunks_per_decode or math.inf
        self._waiting: dict[_Queue, dict[int, deque[_Prompt]]] = {}
        """By the bucket of the first piece, and by how far a slot must reach."""
        self._started: dict[_Queue, list[_Prompt]] = {}
        """Prompts that have slots, by the bucket of their next piece."""
        self._forks: deque[ForkAction] = deque()
        self._slots = DecodeSlots(grid)
        self._num_waiting = 0
        self._batches_since_decode = 0
        self._enough = 2 * (len(self._slots) + sum(bucket.batch for bucket in grid.prefill))

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return self._num_waiting

    @property
    def wants_more(self) -> bool:
        """Whether too few requests wait to choose full batches from."""
        return self._num_waiting < self._enough

    def submit(self, request: ScheduledRequest) -> None:
        """Queue a request that fits the grid."""
        bucket = self._grid.fit(
            request.prompt_length, request.max_total_length - request.prompt_length
        )
        if not request.generates:
            is_one_piece = request.prompt_length <= bucket.tokens
            self._wait(_Prompt(request, 0, num_slots=0 if is_one_piece else 1))
            return
        most = self._slots.num_for(request)
        for first in range(0, request.num_sequences, most):
            self._wait(_Prompt(request, first, min(most, request.num_sequences - first)))

    def next_action(self) -> Action | None:
        """What to run next; None when all work is done."""
        if self._forks:
            fork = self._forks.popleft()
            self._slots.put(fork.slot, fork.sequence)
            return fork
        if (chosen := self._choose()) is not None:
            self._batches_since_decode += self._slots.any_live
            queue, batch = chosen
            # before a prompt that ends gives its slot back, which no other row of the call may have
            for prompt in batch:
                if not prompt.length:
                    self._start(queue, prompt)
            return PrefillAction(*queue, tuple(self._next_piece(queue, row) for row in batch))
        self._batches_since_decode = 0
        return self._slots.decode()

    def advance(self, slot: int, num_tokens: int) -> None:
        """Note that a slot's row grew."""
        self._slots.advance(slot, num_tokens)

    def release(self, slot: int) -> None:
        """Free a slot whose row ended."""
        self._slots.release(slot)

    def drain(self) -> list[ScheduledRequest]:
        """Drop all that has no slot yet, unless the request has another sequence in one."""
        in_flight = self._slots.request_numbers
        in_flight |= {prompt.request.number for row in self._started.values() for prompt in row}
        waiting = [
            prompt for lanes in self._waiting.values() for lane in lanes.values() for prompt in lane
        ]
        dropped = {
            p.request.number: p.request for p in waiting if p.request.number not in in_flight
        }
        self._waiting.clear()
        self._num_waiting = 0
        for prompt in waiting:
            if prompt.request.number in in_flight:
                self._wait(prompt)
        return list(dropped.values())

    def _wait(self, prompt: _Prompt) -> None:
        lanes = self._waiting.setdefault(self._queue_of(prompt), {})
        lanes.setdefault(self._reach(prompt), deque()).append(prompt)
        self._num_waiting += 1

    def _queue_of(self, prompt: _Prompt) -> _Queue:
        """The bucket of the prompt's next piece."""
        request = prompt.request
        return self._grid.bucket_of(request.prompt_length, prompt.length), request.is_scored

    def _reach(self, prompt: _Prompt) -> int:
        """How far a slot must reach at least that the prompt's sequences fit into."""
        return (
            self._grid.capacity_for(prompt.request.max_total_length)
            if prompt.num_slots
            else NO_SLOT
        )

    def _choose(self) -> tuple[_Queue, list[_Prompt]] | None:
        """The bucket and the prompts of the next prefill batch, if one is to run now."""
        if not self._num_waiting:
            if not self._started or self._must_decode:
                return None
            queue = min(self._started, key=lambda queue: (-queue[0].tokens, queue[0].length))
            return queue, self._started[queue][: queue[0].batch]
        batches = self._batches()
        urgent = {
            queue: batch
            for queue, batch in batches.items()
            if len(batch) == queue[0].batch or self._has_many_idle(batch[0].request)
        }
        if not batches or (self._must_decode if urgent else self._must_wait(batches)):
            return None
        return min((urgent or batches).items(), key=_oldest)

    def _batches(self) -> dict[_Queue, list[_Prompt]]:
        """The batches that may run next: those with started prompts, and the oldest that waits."""
        free = self._slots.free
        if (oldest := self._oldest_that_waits(free)) is None:
            return {queue: row[: queue[0].batch] for queue, row in self._started.items()}
        queues = dict.fromkeys([*self._started, self._queue_of(oldest)])
        last = oldest.request.number + self._enough
        return {queue: self._batch(queue, list(free), last) for queue in queues}

    @property
    def _must_decode(self) -> bool:
        return self._slots.any_live and self._batches_since_decode >= self._max_batches

    def _has_many_idle(self, request: ScheduledRequest) -> bool:
        """Whether a prompt that only few slots hold waits for no others, as many of these idle."""
        usable = self._slots.num_for(request)
        has_few = usable < FEW_SLOTS * len(self._slots)
        return has_few and self._slots.num_idle_for(request) > MANY_IDLE * usable

    def _must_wait(self, batches: dict[_Queue, list[_Prompt]]) -> bool:
        """Whether batches, none of which is full, wait for more prompts or for more slots."""
        queue, batch = min(batches.items(), key=_oldest)
        oldest = batch[0]
        if not self._slots.any_live or not oldest.num_slots or self._cannot_fill(queue, batch):
            return self._must_decode
        idle, usable = self._slots.num_idle_for(oldest.request), self._slots.num_for(oldest.request)
        return self._batches_since_decode > 0 or idle < IDLE_SHARE * usable

    def _cannot_fill(self, queue: _Queue, batch: list[_Prompt]) -> bool:
        """Whether nothing else waits for a bucket, and more requests were asked for in vain.

        Pieces of prompts may come to it from others.
        """
        lanes = self._waiting.get(queue, {}).values()
        return (
            queue[0].is_whole
            and self.wants_more
            and set(batch).issuperset(chain.from_iterable(lanes))
        )

    def _oldest_that_waits(self, free: list[int]) -> _Prompt | None:
        """The oldest prompt that waits and can start.

        Slots that older prompts can have, but not enough of, are dropped from `free`.
        """
        heads = [lane[0] for lanes in self._waiting.values() for lane in lanes.values()]
        heads.sort(key=lambda prompt: prompt.request.number)
        return next((head for head in heads if self._slots_for(head, free) is not None), None)

    def _batch(self, queue: _Queue, free: list[int], last: int) -> list[_Prompt]:
        """Prompts that can run in a bucket, at most a batch: started ones, then the oldest.

        None that waits is younger than the request numbered `last`.
        """
        batch = self._started.get(queue, [])[: queue[0].batch]
        lanes = self._waiting.get(queue, {})
        if not free:
            lanes = {NO_SLOT: lanes.get(NO_SLOT, ())}
        for prompt in heapq.merge(*lanes.values(), key=lambda prompt: prompt.request.number):
            if len(batch) == queue[0].batch or prompt.request.number > last:
                break
            if (slots := self._slots_for(prompt, free)) is not None:
                batch.append(prompt)
                del free[slots]
        return batch

    def _slots_for(self, prompt: _Prompt, free: list[int]) -> slice | None:
        """The part of `free` that a prompt takes; while it lacks some slots, None, and `free` loses
        those that it could have."""
        first = self._slots.first_for(prompt.request, free)
        if len(free) - first >= prompt.num_slots:
            return slice(first, first + prompt.num_slots)
        del free[first:]
        return None

    def _next_piece(self, queue: _Queue, prompt: _Prompt) -> PromptPiece:
        """Move a prompt on by a piece, from where it waits to where its next piece does."""
        if prompt.length:
            self._started[queue].remove(prompt)
            if not self._started[queue]:
                del self._started[queue]
        request, start = prompt.request, prompt.length
        count = min(queue[0].tokens, request.prompt_length - start)
        prompt.length += count
        if prompt.length < request.prompt_length:
            self._started.setdefault(self._queue_of(prompt), []).append(prompt)
        else:
            self._complete(prompt)
        slot = prompt.slots[0] if prompt.slots else None
        return PromptPiece(slot, ScheduledSequence(request, prompt.first_sample), start, count)

    def _start(self, queue: _Queue, prompt: _Prompt) -> None:
        lanes, reach = self._waiting[queue], self._reach(prompt)
        lanes[reach].popleft()
        if not lanes[reach]:
            del lanes[reach]
        if not lanes:
            del self._waiting[queue]
        self._num_waiting -= 1
        free = self._slots.free
        slots = self._slots_for(prompt, free)
        assert slots is not None
        prompt.slots = free[slots]
        self._slots.claim(prompt.slots)

    def _complete(self, prompt: _Prompt) -> None:
        request, first = prompt.request, prompt.first_sample
        if not request.generates:
            for slot in prompt.slots:
                self._slots.release(slot)
            return
        source, *others = prompt.slots
        self._slots.put(source, ScheduledSequence(request, first))
        self._forks.extend(
            ForkAction(source, slot, ScheduledSequence(request, first + i))
            for i, slot in enumerate(others, start=1)
        )


def _oldest(entry: tuple[_Queue, list[_Prompt]]) -> int:
    _, batch = entry
    return batch[0].request.number
