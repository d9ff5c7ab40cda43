"""The prompts that wait for slots: in queues of prompts that may run in the same calls, by age.

Pure state. Knows nothing of slots in use or of the choice among queues. Guarantees: the prompts of
a queue come in the order of their requests, whenever they were added.
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, takewhile
from operator import attrgetter
from typing import NamedTuple

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from .actions import ScheduledRequest
from .page_pool import CopiedPage
from .shared_prefixes import SharedPrefix


@dataclass(eq=False)
class Prompt:
    """A prompt, or a shared prefix of prompts, with pieces left to run."""

    request: ScheduledRequest
    """The request; for a prefix, a request that begins with it."""
    num_slots: int
    """The number of its slots: one for each of its sequences, and one for a prefix."""
    first_sample: int = 0
    prefix: SharedPrefix | None = None
    """The prefix that it computes; None for the prompt of a request."""
    base: SharedPrefix | None = None
    """The prefix with which it begins."""
    slots_to_claim: list[int] = field(default_factory=list)
    """The free slots that it gets if the last batch that it was chosen for runs."""
    slots: list[int] = field(default_factory=list)
    """Its slots; empty until its first piece runs."""
    length: int = 0
    """Tokens from the start that are computed, or that come with the copy of its base."""
    num_known: int | None = None
    """For a sequence that gave its slot back, the tokens that it emitted before; else None."""
    copied_pages: list[list[CopiedPage]] = field(default_factory=list)
    """The pages to copy to each of its slots but the first."""

    @property
    def generates(self) -> bool:
        """Whether sequences decode in its slots when it is complete."""
        return self.prefix is None and self.request.generates

    @property
    def end(self) -> int:
        """The length at which its pieces end."""
        return self.request.prompt_length if self.prefix is None else self.prefix.length


number_of = attrgetter("request.number")
"""The number of a prompt's request, which tells its age."""


def num_rows(grid: BucketGrid, prompt: Prompt) -> int:
    """The number of rows that a prompt can fill in one call of its queue."""
    return grid.num_alike(prompt.request.prompt_length, prompt.length, prompt.end)


class PromptQueue(NamedTuple):
    """The prompts that may run in the same prefill calls."""

    bucket: PrefillBucket
    """The bucket of a prompt's next piece."""
    is_scored: bool

    @classmethod
    def of(cls, grid: BucketGrid, prompt: Prompt) -> "PromptQueue":
        """The queue of a prompt's next piece."""
        request = prompt.request
        return cls(grid.bucket_of(request.prompt_length, prompt.length), request.is_scored)


class WaitingPrompts:
    """The prompts by queue, and in a queue those that need slots and the others (a lane each)."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._lanes: dict[PromptQueue, dict[bool, deque[Prompt]]] = {}
        self.count = 0
        """The number of prompts."""

    def __iter__(self) -> Iterator[Prompt]:
        return chain.from_iterable(
            lane for lanes in self._lanes.values() for lane in lanes.values()
        )

    @property
    def heads(self) -> Iterator[Prompt]:
        """The oldest prompt of each lane."""
        return (lane[0] for lanes in self._lanes.values() for lane in lanes.values())

    def by_age(
        self, queue: PromptQueue, has_slot: Callable[[], bool] = lambda: True
    ) -> Iterator[Prompt]:
        """The prompts of a queue, oldest first; those that need slots while `has_slot` is true."""
        lanes = [
            takewhile(lambda _: has_slot(), lane) if needs_slot else iter(lane)
            for needs_slot, lane in self._lanes.get(queue, {}).items()
        ]
        return lanes[0] if len(lanes) == 1 else heapq.merge(*lanes, key=number_of)

    def add(self, prompt: Prompt) -> None:
        """Add a prompt to the queue of its next piece."""
        lanes = self._lanes.setdefault(PromptQueue.of(self._grid, prompt), {})
        lane = lanes.setdefault(bool(prompt.num_slots), deque())
        if lane and number_of(lane[-1]) > number_of(prompt):
            # it waited for a prefix, and younger prompts did not
            lane.insert(bisect_right(lane, number_of(prompt), key=number_of), prompt)
        else:
            lane.append(prompt)
        self.count += 1

    def remove(self, queue: PromptQueue, prompt: Prompt) -> None:
        """Remove a prompt from its queue."""
        lanes, needs_slot = self._lanes[queue], bool(prompt.num_slots)
        # not always the head: an earlier copy in this batch may have queued older prompts
        lanes[needs_slot].remove(prompt)
        if not lanes[needs_slot]:
            del lanes[needs_slot]
        if not lanes:
            del self._lanes[queue]
        self.count -= 1

    def clear(self) -> None:
        """Remove all prompts."""
        self._lanes.clear()
        self.count = 0
