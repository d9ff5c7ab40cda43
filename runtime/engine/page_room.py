"""Decides which prompts may start, and gives them their pages.

A prompt starts if the pages of all its slots are free and, beyond them, more pages are free than
the sequences with slots are expected to take (see `growth`). It takes all its pages when it starts,
so prefill never waits for pages. If no sequence has a slot, or the pool has pages for the longest
rows in all slots, only its own pages must be free.

A sequence that gave its slot back also waits until the tokens that it had would find pages.

Knows nothing of queues or of the order of prompts. Guarantees: a prompt that is alone finds its
pages, however many pages held prefixes have.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from .actions import ScheduledSequence
from .decode_slots import DecodeSlots
from .page_pool import CopiedPage
from .shared_prefixes import SharedPrefix
from .waiting_prompts import Prompt


class PageRoom:
    """The free pages of each group of slots as they are, for prompts that may start together."""

    def __init__(
        self, grid: BucketGrid, slots: DecodeSlots, slot_of: Callable[[SharedPrefix], int]
    ):
        self._grid, self._slots, self._slot_of = grid, slots, slot_of
        self._pool = pool = slots.pool
        self._num_free_G, self._growth_G = pool.num_free_G, slots.expected_pages_G
        self._is_empty_G = slots.growth.is_empty_G(pool.num_groups)

    def copy(self) -> "PageRoom":
        """The same room, for other prompts."""
        room = object.__new__(PageRoom)
        room.__dict__ |= {
            name: x.copy() if isinstance(x, np.ndarray) else x for name, x in vars(self).items()
        }
        return room

    def slots_for(self, prompt: Prompt, free: list[int]) -> slice | None:
        """The part of `free` that a prompt takes; None if there are too few slots or pages.

        In the latter case, all slots are removed from `free`: they are reserved for the prompt. All
        its slots are in one group: that of its prefix if it has room, else of those that have room
        the one with the most free pages.
        """
        if not prompt.num_slots:
            return slice(0, 0)
        groups = np.argsort(self._growth_G - self._num_free_G, kind="stable").tolist()
        if prompt.base is not None:
            own = self._pool.group_of(self._slot_of(prompt.base))
            groups.sort(key=lambda group: group != own)
        for group in groups:
            # slots of a group follow each other
            first = bisect_left(free, group, key=self._pool.group_of)
            end = bisect_left(free, group + 1, key=self._pool.group_of)
            if end - first < prompt.num_slots:
                continue
            if self._holds(prompt, group):
                return slice(first, first + prompt.num_slots)
        del free[:]
        return None

    def add(self, prompt: Prompt, slots: list[int]) -> None:
        """Count the pages of a prompt that starts in these slots."""
        if not slots:
            return
        group = self._pool.group_of(slots[0])
        self._num_free_G[group] -= self._num_pages_of(prompt, group)
        if prompt.generates:
            # the pages that each of its sequences is expected to take after the prompt
            total = self._slots.growth.expected_length(prompt.request, prompt.num_known or 0)
            later = self._grid.num_pages(total) - self._grid.num_pages(prompt.request.prompt_length)
            self._growth_G[group] += prompt.num_slots * later
            self._is_empty_G[group] = False

    def _holds(self, prompt: Prompt, group: int) -> bool:
        """Whether there are enough pages for a prompt to start in a group."""
        needed, num_free = self._num_pages_of(prompt, group), self._num_free_G[group]
        has_all = (self._grid.pages or 0) >= self._grid.most_pages
        if has_all or self._is_empty_G[group]:
            return needed <= num_free
        if prompt.num_known is not None:
            request = prompt.request
            length = request.prompt_length + prompt.num_known + self._grid.steps_per_call
            needed = self._grid.num_pages(min(length, request.max_total_length))
        return num_free - needed > self._growth_G[group]

    def _num_pages_of(self, prompt: Prompt, group: int) -> int:
        """The number of pages that the slots of a prompt take in a group.

        Those of its prefix are shared if the prefix is in the same group.
        """
        grid, length = self._grid, _length_of(prompt)
        assert grid.page is not None
        num_shared = 0
        if prompt.base is not None and self._pool.group_of(self._slot_of(prompt.base)) == group:
            num_shared = prompt.base.length // grid.page
        num_copied = (prompt.num_slots - 1) * (length % grid.page > 0)
        return grid.num_pages(length) - num_shared + num_copied


def max_samples(grid: BucketGrid, prompt_length: int, num_held: int) -> int:
    """The maximum number of sequences that share a prompt, so that its pages are always found.

    Args:
      grid: A grid with slots.
      prompt_length: The length of the prompt.
      num_held: The number of slots that may hold shared prefixes.
    """
    assert grid.pages is not None and grid.page is not None
    of_others = num_held * grid.num_pages(grid.max_length) + prompt_length // grid.page
    return max(1, grid.pages // (grid.slot_groups or 1) - of_others)


def claim_pages(slots: DecodeSlots, prompt: Prompt, source: int | None) -> list[CopiedPage]:
    """Give the slots of a prompt all its pages; does nothing for a prompt without slots.

    Args:
      slots: The decode slots.
      prompt: The prompt. The pages to copy to its other slots are written into it.
      source: The slot of the prefix with which it begins; None if it begins with none.

    Returns:
      The pages of the prefix to copy to the first slot.
    """
    if not prompt.slots:
        return []
    pool, (first, *others) = slots.pool, prompt.slots
    copied = []
    if source is not None:
        assert prompt.base is not None
        copied = pool.share(source, first, prompt.base.length)
    length = _length_of(prompt)
    pool.take(first, length)
    prompt.copied_pages = [pool.share(first, slot, length) for slot in others]
    if prompt.generates:
        for i, slot in enumerate(prompt.slots):
            sequence = ScheduledSequence(prompt.request, prompt.first_sample + i)
            slots.begin(slot, sequence, prompt.num_known or 0)
    return copied


def _length_of(prompt: Prompt) -> int:
    """The length for which a prompt takes pages: its own, or that of the last in its slot."""
    return prompt.request.prompt_length if prompt.prefix is None else prompt.prefix.max_length
