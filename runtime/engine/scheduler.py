"""Decides which graph runs next, as a pure state machine.

The scheduler has no clock, no I/O and no device: the engine drives it, and so does the simulator.
It knows requests by a number and their lengths. A prompt is prefilled piece by piece, directly into
its slot; a whole prompt is one piece. The next action is, in this order:

1. Fork: copy the slot of a complete prompt to the other sequences of its request.
2. Prefill one batch, if one may run:
   - Candidates are the buckets in which started prompts have their next piece, and the bucket of
     the oldest waiting prompt for which there are free slots. A prompt takes the shortest slots
     that are long enough, and no slot that an older prompt still needs.
   - Waiting prompts of the same bucket fill up the batch, except prompts so much younger than the
     oldest waiting prompt that it might wait forever.
   - A full batch goes first, then the batch with the oldest prompt.
   - While sequences decode and requests wait, a batch that is not full waits for a decode call, and
     until `IDLE_SHARE` of the slots that its oldest prompt can use are idle: fewer idle slots cost
     less than dummy rows. There are three exceptions. A batch whose prompts fit only few, long
     slots counts as full when more than `MANY_IDLE` of these are idle. A prompt that needs no slot
     does not wait for slots. A batch of whole prompts does not wait if no other prompt can fill it.
   - At most `chunks_per_decode` batches run in succession while any sequence decodes.
   - When no request waits, waiting gains nothing. The largest pieces run first, and among these the
     shortest span, because prompts continue from there into the other buckets. Then all slots
     decode together.
3. Decode all live slots, over the shortest span that holds them.

Guarantees: the pieces of a prompt and their graphs depend only on its own length; every submitted
sequence decodes exactly once or is dropped by `drain`; a prompt is prefilled once, and again for
each further group of its sequences if it has more sequences than there are slots long enough.
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
    """The slot to write to; None for a prompt that is only scored, in one piece."""
    sequence: ScheduledSequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after this piece."""
        return self.start + self.count == self.sequence.request.prompt_length


@dataclass(frozen=True)
class PrefillAction:
    """Run one prefill batch: its rows in this order, followed by dummy rows."""

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
"""Minimum idle share of the slots that a prompt can use, for a batch to run that is not full."""
FEW_SLOTS = 1 / 4
"""Share of all slots below which the slots that a prompt can use count as few."""
MANY_IDLE = 1 / 4
"""Idle share of few slots above which a batch for these slots runs as if it were full, because no
other prompts may ever come to fill it. If most slots can hold a prompt, later prompts fill the
batch."""
NO_SLOT = 0
"""The needed slot capacity of prompts that take no slot: prompts that are scored in one piece."""

Action = PrefillAction | ForkAction | DecodeAction
_QueueKey = tuple[PrefillBucket, bool]
"""The bucket of a prompt's next piece, and whether the prompt is scored."""


@dataclass(eq=False)
class _Prompt:
    """A prompt with pieces left to run, for some or all sequences of its request."""

    request: ScheduledRequest
    first_sample: int
    num_slots: int
    slots: list[int] = field(default_factory=list)
    """Slots of its sequences; empty until the first piece runs."""
    length: int = 0


class Scheduler:
    """The waiting and the started prompts, the slots, and the choice of the next action."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._max_batches = grid.chunks_per_decode or math.inf
        self._waiting: dict[_QueueKey, dict[int, deque[_Prompt]]] = {}
        """Waiting prompts by queue, and in a queue by the slot capacity that they need (a lane)."""
        self._started: dict[_QueueKey, list[_Prompt]] = {}
        """Prompts with slots and pieces left to run, by the queue of their next piece."""
        self._forks: deque[ForkAction] = deque()
        self._slots = DecodeSlots(grid)
        self._num_waiting = 0
        self._batches_since_decode = 0
        self._target_waiting = 2 * (len(self._slots) + sum(bucket.batch for bucket in grid.prefill))

    @property
    def num_waiting(self) -> int:
        """The number of prompts that have no slot yet."""
        return self._num_waiting

    @property
    def wants_more(self) -> bool:
        """Whether too few prompts wait for full batches to be formed."""
        return self._num_waiting < self._target_waiting

    def submit(self, request: ScheduledRequest) -> None:
        """Queue a request.

        Raises:
          NoBucketFits: The request does not fit the grid.
        """
        bucket = self._grid.fit(
            request.prompt_length, request.max_total_length - request.prompt_length
        )
        if not request.generates:
            is_one_piece = request.prompt_length <= bucket.tokens
            self._wait(_Prompt(request, 0, num_slots=0 if is_one_piece else 1))
            return
        max_slots = self._slots.num_usable(request)
        for first in range(0, request.num_sequences, max_slots):
            self._wait(_Prompt(request, first, min(max_slots, request.num_sequences - first)))

    def next_action(self) -> Action | None:
        """The next action to run; None when all work is done."""
        if self._forks:
            fork = self._forks.popleft()
            self._slots.put(fork.slot, fork.sequence)
            return fork
        if (chosen := self._choose()) is not None:
            self._batches_since_decode += self._slots.has_live
            queue, batch = chosen
            # slots are claimed before any prompt of the batch ends and returns its slot, which no
            # other row of the same call may take
            for prompt in batch:
                if not prompt.length:
                    self._start(queue, prompt)
            return PrefillAction(*queue, tuple(self._next_piece(queue, prompt) for prompt in batch))
        self._batches_since_decode = 0
        return self._slots.decode()

    def advance(self, slot: int, num_tokens: int) -> None:
        """Record that the sequence in a slot grew by some tokens."""
        self._slots.advance(slot, num_tokens)

    def release(self, slot: int) -> None:
        """Free a slot whose sequence ended."""
        self._slots.release(slot)

    def drain(self) -> list[ScheduledRequest]:
        """Drop the requests that have no slot yet; requests with a sequence in a slot stay.

        Returns:
          The dropped requests.
        """
        in_flight = self._slots.request_numbers
        in_flight |= {
            prompt.request.number for prompts in self._started.values() for prompt in prompts
        }
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
        lanes.setdefault(self._needed_capacity(prompt), deque()).append(prompt)
        self._num_waiting += 1

    def _queue_of(self, prompt: _Prompt) -> _QueueKey:
        """The bucket of the prompt's next piece."""
        request = prompt.request
        return self._grid.bucket_of(request.prompt_length, prompt.length), request.is_scored

    def _needed_capacity(self, prompt: _Prompt) -> int:
        """The smallest slot capacity of the grid that fits the prompt's sequences."""
        return (
            self._grid.capacity_for(prompt.request.max_total_length)
            if prompt.num_slots
            else NO_SLOT
        )

    def _choose(self) -> tuple[_QueueKey, list[_Prompt]] | None:
        """The queue and the prompts of the prefill batch to run now; None for no batch."""
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
        return min((urgent or batches).items(), key=_number_of_oldest)

    def _batches(self) -> dict[_QueueKey, list[_Prompt]]:
        """The batches that may run next: started prompts, and the oldest waiting prompt's batch."""
        free = self._slots.free
        if (oldest := self._oldest_that_waits(free)) is None:
            return {queue: prompts[: queue[0].batch] for queue, prompts in self._started.items()}
        queues = dict.fromkeys([*self._started, self._queue_of(oldest)])
        last = oldest.request.number + self._target_waiting
        return {queue: self._batch(queue, list(free), last) for queue in queues}

    @property
    def _must_decode(self) -> bool:
        return self._slots.has_live and self._batches_since_decode >= self._max_batches

    def _has_many_idle(self, request: ScheduledRequest) -> bool:
        """Whether the request fits only few slots and many of these are idle."""
        usable = self._slots.num_usable(request)
        has_few = usable < FEW_SLOTS * len(self._slots)
        return has_few and self._slots.num_idle(request) > MANY_IDLE * usable

    def _must_wait(self, batches: dict[_QueueKey, list[_Prompt]]) -> bool:
        """Whether batches that are not full wait for more prompts or for more idle slots."""
        queue, batch = min(batches.items(), key=_number_of_oldest)
        oldest = batch[0]
        if not self._slots.has_live or not oldest.num_slots or self._cannot_fill(queue, batch):
            return self._must_decode
        idle, usable = self._slots.num_idle(oldest.request), self._slots.num_usable(oldest.request)
        return self._batches_since_decode > 0 or idle < IDLE_SHARE * usable

    def _cannot_fill(self, queue: _QueueKey, batch: list[_Prompt]) -> bool:
        """Whether no other waiting prompt can fill the batch, and no more requests are submitted.

        Buckets of chunks can always be filled, as started prompts may reach them later.
        """
        lanes = self._waiting.get(queue, {}).values()
        return (
            queue[0].is_whole
            and self.wants_more
            and set(batch).issuperset(chain.from_iterable(lanes))
        )

    def _oldest_that_waits(self, free: list[int]) -> _Prompt | None:
        """The oldest waiting prompt that can start.

        Slots reserved for older prompts, which lack some slots, are removed from `free`.
        """
        heads = [lane[0] for lanes in self._waiting.values() for lane in lanes.values()]
        heads.sort(key=lambda prompt: prompt.request.number)
        return next((head for head in heads if self._slots_for(head, free) is not None), None)

    def _batch(self, queue: _QueueKey, free: list[int], last: int) -> list[_Prompt]:
        """At most a batch of prompts of a queue: started prompts, then the oldest waiting prompts.

        Waiting prompts younger than the request number `last` are left out.
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
        """The part of `free` that a prompt takes; None if there are too few long enough slots.

        In the latter case these slots are removed from `free`: they are reserved for the prompt.
        """
        first = self._slots.first_usable(prompt.request, free)
        if len(free) - first >= prompt.num_slots:
            return slice(first, first + prompt.num_slots)
        del free[first:]
        return None

    def _next_piece(self, queue: _QueueKey, prompt: _Prompt) -> PromptPiece:
        """Return a prompt's next piece, and move the prompt to the queue of the piece after it."""
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

    def _start(self, queue: _QueueKey, prompt: _Prompt) -> None:
        """Claim slots for a prompt at the head of its lane."""
        lanes, capacity = self._waiting[queue], self._needed_capacity(prompt)
        lanes[capacity].popleft()
        if not lanes[capacity]:
            del lanes[capacity]
        if not lanes:
            del self._waiting[queue]
        self._num_waiting -= 1
        free = self._slots.free
        slots = self._slots_for(prompt, free)
        assert slots is not None
        prompt.slots = free[slots]
        self._slots.claim(prompt.slots)

    def _complete(self, prompt: _Prompt) -> None:
        """Start to decode a complete prompt, and plan the forks for its other sequences."""
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


def _number_of_oldest(entry: tuple[_QueueKey, list[_Prompt]]) -> int:
    _, batch = entry
    return batch[0].request.number
