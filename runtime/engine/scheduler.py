"""Decides which graph runs next, as a pure state machine.

The scheduler has no clock, no I/O and no device: the engine drives it, and so does the simulator.
It knows requests by a number and their lengths. A prompt is prefilled piece by piece, directly into
its slot; a whole prompt is one piece. A batch has rows for pieces: with chunks, a prompt fills as
many of the rows that are left as it has pieces of the bucket, in order. The next action is, in this
order:

1. Fork: copy the slot of a complete prompt to the other sequences of its request, and a shared
   prefix to the slot of a prompt that begins with it (see `held_prefixes`).
2. Prefill one batch, if one may run:
   - Candidates are the buckets in which started prompts have their next piece, and the bucket of
     the oldest waiting prompt for which there are free slots and pages (see `page_room`). A prompt
     takes no slot that an older prompt still needs.
   - Waiting prompts of the same bucket fill up the batch, except prompts so much younger than the
     oldest waiting prompt that it might wait forever.
   - A batch is full when it has a piece in every row. A full batch goes first, then the batch with
     the oldest prompt.
   - While sequences decode and requests wait, a batch that is not full waits for a decode call, and
     until a share of the slots is idle: fewer idle slots cost less than dummy rows. A slot is idle
     unless it decodes or holds a shared prefix; a row may find a slot but no pages, so as large a
     share of the pages must be idle. There are four exceptions. While prompts wait for shared
     prefixes, a batch counts as full when more than `MOST_IDLE` of the slots are idle. A prompt
     that needs no slot does not wait for slots. A shared prefix does not wait, because other
     prompts wait for it. A batch that no other prompt can fill does not wait.
   - At most `chunks_per_decode` batches run in succession while any sequence decodes.
   - When no request waits, waiting gains nothing. The largest pieces run first, because prompts
     continue from there into the other buckets. Then all slots decode together.
3. Decode all live slots.

Rows that lack pages wait in their slots. If the oldest row lacks pages and no prompt has pieces
left, the youngest rows give their slots back and are queued again, each for itself. If no row can
go on, pieces run.

Guarantees: the pieces of a prompt and their graphs depend only on its own length, whether they are
computed for it or copied; every submitted sequence ends exactly once or is dropped by `drain`; a
prompt is prefilled once, and again for each further group of its sequences if it has more sequences
than there are slots, and for each sequence that gave its slot back.
"""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import replace

from ...compile.grids.bucket_grid import BucketGrid
from .actions import (
    Action,
    DecodeAction,
    ForkAction,
    PrefillAction,
    PromptPiece,
    ScheduledRequest,
    ScheduledSequence,
)
from .decode_slots import DecodeSlots
from .held_prefixes import HeldPrefixes
from .page_room import PageRoom, claim_pages, max_samples
from .waiting_prompts import (
    Prompt,
    PromptQueue,
    WaitingPrompts,
    num_rows,
    number_of,
)

IDLE_SHARE = 1 / 16
"""A batch of whole prompts that is not full runs if this share of the slots is idle."""
CHUNK_IDLE_SHARE = 1 / 8
"""The same share with chunks, where fewer prompts fill a call, so that fewer slots wait."""
MOST_IDLE = 1 / 2
"""Idle share of the slots above which a batch runs as if it were full while prompts wait for shared
prefixes. These prompts come only after more prefill calls, and a decode call would compute few
rows."""


class Scheduler:
    """The waiting and the started prompts, and the choice of the next action.

    Attributes:
      slots: The decode slots, in which the driver records how sequences grow and end.
    """

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._max_batches = grid.chunks_per_decode or math.inf
        self._waiting = WaitingPrompts(grid)
        self._started: dict[PromptQueue, list[Prompt]] = {}
        """Prompts with slots and pieces left to run, by the queue of their next piece."""
        self._copies: deque[ForkAction] = deque()
        """Copies of prefixes that must run before the next prefill call."""
        self._next_prefill: PrefillAction | None = None
        """The prefill call that waits for `_copies`."""
        self._forks: deque[ForkAction] = deque()
        self._ended: list[int] = []
        """Slots of prompts without output whose last piece is in the last prefill call."""
        self.slots = DecodeSlots(grid)
        self._prefixes = HeldPrefixes(self.slots, self._queue)
        self._batches_since_decode = 0
        self._target_waiting = 2 * (len(self.slots) + sum(bucket.batch for bucket in grid.prefill))

    @property
    def num_waiting(self) -> int:
        """The number of prompts that have no slot yet."""
        return self._waiting.count + self._prefixes.num_blocked

    @property
    def wants_more(self) -> bool:
        """Whether more prompts must be submitted so that full batches can be formed."""
        return self.num_waiting < self._target_waiting

    def reserve(self, num_slots: int) -> None:
        """Let shared prefixes hold up to this number of slots at one time."""
        self._prefixes.max_slots = num_slots

    def submit(self, request: ScheduledRequest) -> None:
        """Queue a request. Requests with shared prefixes must come in depth-first order.

        Raises:
          NoBucketFits: The request does not fit the grid.
        """
        bucket = self._grid.fit(
            request.prompt_length, request.max_total_length - request.prompt_length
        )
        base = self._prefixes.enter(request)
        if not request.generates:
            # a piece of a packed call reads its own tokens from pages
            self._add(Prompt(request, num_slots=int(not bucket.is_whole), base=base))
            return
        num_held = self._prefixes.max_slots
        of_group = len(self.slots) // (self._grid.slot_groups or 1)
        # all prefixes may be in one group
        max_slots = min(len(self.slots) - num_held, max(1, of_group - num_held))
        max_slots = min(max_slots, max_samples(self._grid, request.prompt_length, num_held))
        for first in range(0, request.num_sequences, max_slots):
            num_slots = min(max_slots, request.num_sequences - first)
            self._add(Prompt(request, num_slots, first, base=base))

    def next_action(self) -> Action | None:
        """The next action to run; None when all work is done."""
        if self._copies:
            return self._copies.popleft()
        if (prefill := self._next_prefill) is not None:
            self._next_prefill = None
            return prefill
        while self._ended:
            self.slots.release(self._ended.pop())
        if self._forks:
            fork = self._forks.popleft()
            assert fork.sequence is not None
            self.slots.put(fork.slot, fork.sequence)
            return fork
        if (chosen := self._choose()) is not None:
            return self._prefill(*chosen)
        self._batches_since_decode = 0
        if (decode := self._decode()) is not None:
            return decode
        if self._started:
            # all rows wait for pages, which come free when these prompts are complete
            return self._prefill(*self._largest_pieces())
        return self.next_action() if self._prefixes.leave() else None

    def drain(self) -> list[ScheduledRequest]:
        """Drop the requests that have no slot yet; requests with a sequence in a slot stay.

        Returns:
          The dropped requests.
        """
        started = [prompt for prompts in self._started.values() for prompt in prompts]
        in_flight = self.slots.request_numbers
        in_flight |= {prompt.request.number for prompt in started if prompt.prefix is None}
        waiting = [*self._waiting, *self._prefixes.clear()]
        waiting = [prompt for prompt in waiting if prompt.prefix is None]
        dropped = {
            p.request.number: p.request for p in waiting if p.request.number not in in_flight
        }
        for prompt in started:
            if prompt.prefix is not None:
                self._remove(PromptQueue.of(self._grid, prompt), prompt)
                self.slots.release(prompt.slots[0])
        if (prefill := self._next_prefill) is not None:
            # a prefix reads its tokens from a request that may be dropped
            rows = tuple(row for row in prefill.rows if not row.is_of_prefix)
            self._next_prefill = replace(prefill, rows=rows) if rows else None
        self._waiting.clear()
        for prompt in waiting:
            if prompt.request.number in in_flight:
                # its prefix is dropped, so it is computed again
                prompt.base, prompt.length = None, 0
                self._waiting.add(prompt)
        return list(dropped.values())

    def _add(self, prompt: Prompt) -> None:
        """Let the prompt of a request wait for the prefix with which it begins, or for a call."""
        if prompt.base is None:
            self._waiting.add(prompt)
        else:
            self._prefixes.add(prompt)

    def _queue(self, prompt: Prompt) -> None:
        """Queue a prompt that begins with a prefix, or a prefix itself."""
        if prompt.slots:
            self._started.setdefault(PromptQueue.of(self._grid, prompt), []).append(prompt)
        else:
            self._waiting.add(prompt)

    def _prefill(self, queue: PromptQueue, batch: list[Prompt]) -> Action | None:
        """Plan the prefill call of a batch; return the first action that it needs."""
        self._batches_since_decode += self.slots.has_live
        for prompt in batch:
            self._remove(queue, prompt)
        rows: list[PromptPiece] = []
        for prompt in batch:
            rows += self._next_pieces(queue, prompt, queue.bucket.batch - len(rows))
        entries = 0
        if self._grid.chunks:
            entries = sum(self._grid.whole_pages(row.start + row.count) for row in rows)
        self._next_prefill = PrefillAction(queue.bucket, queue.is_scored, tuple(rows), entries)
        return self.next_action()

    def _decode(self) -> DecodeAction | None:
        """The next decode call; sequences that give their slots back for it are queued again."""
        given_back = [] if self._started else self.slots.give_back()
        for _, sequence, num_known in given_back:
            request, sample = sequence
            self._waiting.add(Prompt(request, 1, sample, num_known=num_known))
        decode = self.slots.decode()
        if given_back and decode is not None:
            decode = replace(decode, given_back=tuple(given.slot for given in given_back))
        return decode

    def _largest_pieces(self) -> tuple[PromptQueue, list[Prompt]]:
        """A batch of started prompts with the largest pieces."""
        queue = max(self._started, key=lambda q: q.bucket.tokens)
        return queue, self._started_batch(queue)

    def _started_batch(self, queue: PromptQueue) -> list[Prompt]:
        """The first started prompts of a queue, as many as a call has rows for."""
        batch, num_left = [], queue.bucket.batch
        for prompt in self._started.get(queue, []):
            if num_left <= 0:
                break
            batch.append(prompt)
            num_left -= num_rows(self._grid, prompt)
        return batch

    def _choose(self) -> tuple[PromptQueue, list[Prompt]] | None:
        """The queue and the prompts of the prefill batch to run now; None for no batch."""
        if not self.num_waiting:
            return self._largest_pieces() if self._started and not self._must_decode else None
        batches = self._batches()
        urgent = {
            queue: batch
            for queue, batch in batches.items()
            if sum(num_rows(self._grid, prompt) for prompt in batch) >= queue.bucket.batch
            or self._has_many_idle
        }
        if urgent:
            return None if self._must_decode else min(urgent.items(), key=_number_of_oldest)
        # no other batch overtakes the one that waits for more prompts
        oldest = min(batches.items(), key=_number_of_oldest, default=None)
        return None if oldest is None or self._must_wait(*oldest) else oldest

    def _batches(self) -> dict[PromptQueue, list[Prompt]]:
        """The batches that may run next: started prompts, and that of the oldest waiting prompt."""
        room = PageRoom(self._grid, self.slots, self._prefixes.slot_of)
        oldest, free = self._oldest_that_waits(room)
        queues, last = dict.fromkeys(self._started), -1
        if oldest is not None:
            queues |= {PromptQueue.of(self._grid, oldest): None}
            last = oldest.request.number + self._target_waiting
        return {queue: self._batch(queue, free.copy(), last, room.copy()) for queue in queues}

    @property
    def _must_decode(self) -> bool:
        return self.slots.has_live and self._batches_since_decode >= self._max_batches

    @property
    def _has_many_idle(self) -> bool:
        """Whether so many slots are idle that a batch counts as full."""
        has_most = self.slots.num_idle > MOST_IDLE * len(self.slots)
        return self._prefixes.num_blocked > 0 and has_most and self._has_idle_pages(MOST_IDLE)

    @property
    def _has_enough_idle(self) -> bool:
        """Whether a batch need not wait for more idle slots."""
        share = CHUNK_IDLE_SHARE if self._grid.chunks else IDLE_SHARE
        return self.slots.num_idle >= share * len(self.slots) and self._has_idle_pages(share)

    def _has_idle_pages(self, share: float) -> bool:
        pages = self._grid.pages
        return pages is None or self.slots.num_idle_pages >= share * pages

    def _must_wait(self, queue: PromptQueue, batch: list[Prompt]) -> bool:
        """Whether a batch that is not full waits for more prompts or for more idle slots."""
        oldest = batch[0]
        is_ready = not oldest.num_slots or oldest.prefix is not None
        if not self.slots.has_live or is_ready or self._cannot_fill(queue, batch):
            return self._must_decode
        return self._batches_since_decode > 0 or not self._has_enough_idle

    def _cannot_fill(self, queue: PromptQueue, batch: list[Prompt]) -> bool:
        """Whether no other waiting prompt can fill the batch, and no more requests are submitted.

        Buckets of chunks can be filled by started prompts that reach them later, except those of
        the largest chunk.
        """
        is_first = queue.bucket.is_whole or (
            queue.bucket.tokens == self._grid.chunks[-1] and not self._prefixes.num_blocked
        )
        return is_first and self.wants_more and set(batch).issuperset(self._waiting.by_age(queue))

    def _oldest_that_waits(self, room: PageRoom) -> tuple[Prompt | None, list[int]]:
        """The oldest waiting prompt that can start, if any, and the slots left to take.

        No slot is left if an older prompt waits for slots or pages.
        """
        free = self.slots.free
        for head in sorted(self._waiting.heads, key=number_of):
            if room.slots_for(head, free) is not None:
                return head, free
        return None, free

    def _batch(
        self, queue: PromptQueue, free: list[int], last: int, room: PageRoom
    ) -> list[Prompt]:
        """At most a batch of prompts of a queue: started prompts, then the oldest waiting prompts.

        Waiting prompts younger than the request number `last` are left out.
        """
        batch = self._started_batch(queue)
        num_left = queue.bucket.batch - sum(num_rows(self._grid, prompt) for prompt in batch)
        for prompt in self._waiting.by_age(queue, lambda: bool(free)):
            if num_left <= 0 or prompt.request.number > last:
                break
            if (slots := room.slots_for(prompt, free)) is not None:
                batch.append(prompt)
                num_left -= num_rows(self._grid, prompt)
                prompt.slots_to_claim = free[slots]
                del free[slots]
                room.add(prompt, prompt.slots_to_claim)
        return batch

    def _remove(self, queue: PromptQueue, prompt: Prompt) -> None:
        """Remove a prompt from its queue; one that waits claims slots and a copy of its prefix."""
        if prompt.slots:
            self._started[queue].remove(prompt)
            if not self._started[queue]:
                del self._started[queue]
            return
        self._waiting.remove(queue, prompt)
        prompt.slots = prompt.slots_to_claim
        self.slots.claim(prompt.slots)
        source = None if prompt.base is None else self._prefixes.slot_of(prompt.base)
        copied_pages = tuple(claim_pages(self.slots, prompt, source))
        if source is not None:
            self._prefixes.count_copy(prompt)
            num_copied = prompt.length if prompt.prefix is None else 0
            self._copies.append(ForkAction(source, prompt.slots[0], None, num_copied, copied_pages))

    def _next_pieces(self, queue: PromptQueue, prompt: Prompt, most: int) -> list[PromptPiece]:
        """Return a prompt's next pieces, at most so many, and move the prompt to its next queue."""
        slot = prompt.slots[0] if prompt.slots else None
        sequence = ScheduledSequence(prompt.request, prompt.first_sample)
        is_of_prefix, pieces = prompt.prefix is not None, []
        for _ in range(min(most, num_rows(self._grid, prompt))):
            count = min(queue.bucket.tokens, prompt.end - prompt.length)
            pieces.append(
                PromptPiece(slot, sequence, prompt.length, count, is_of_prefix, prompt.num_known)
            )
            prompt.length += count
        if prompt.length < prompt.end:
            started = self._started.setdefault(PromptQueue.of(self._grid, prompt), [])
            started.insert(bisect_right(started, number_of(prompt), key=number_of), prompt)
        elif is_of_prefix:
            self._prefixes.complete(prompt)
        else:
            self._complete(prompt)
        return pieces

    def _complete(self, prompt: Prompt) -> None:
        """Start to decode a complete prompt, and plan the forks for its other sequences."""
        request, first = prompt.request, prompt.first_sample
        if not request.generates:
            # the call still writes to them
            self._ended += prompt.slots
            return
        source, *others = prompt.slots
        self.slots.put(source, ScheduledSequence(request, first))
        for i, slot in enumerate(others):
            copied_pages = tuple(prompt.copied_pages[i]) if prompt.copied_pages else ()
            sequence = ScheduledSequence(request, first + i + 1)
            self._forks.append(ForkAction(source, slot, sequence, copied_pages=copied_pages))


def _number_of_oldest(entry: tuple[PromptQueue, list[Prompt]]) -> int:
    _, batch = entry
    return batch[0].request.number
