"""The pages of the cache: which are free, which belong to each slot, and which must be cleared.

A slot takes pages as its row grows. Slots share pages whose entries are all in common; a page that
is filled in part is copied, because each row goes on in its own. Where a layout splits slots into
groups on different devices, each group has its own equal part of the pages. A slot then shares
pages within its group, and gets copies of those of other groups.

Pure state, without device. Does not know about requests, nor when a slot may take pages.
Guarantees: a page is free, or as many slots as its count says have it; which page is taken depends
on the order of calls alone; a page that may hold non-finite numbers is cleared, or written as a
whole by a copy, before a row uses it again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid


class CopiedPage(NamedTuple):
    """A page whose entries are copied to another; a source past the last page clears it."""

    source_page: int
    page: int


class PagePool:
    """The pages of a grid.

    Args:
      grid: The grid; one without slots has no pages.

    Attributes:
      table: The pages of each slot in the order of its entries, `[slots, pages of the longest
        row]`; the rest of a row is the number after the last page.
      held_B: The number of pages of each slot.
    """

    def __init__(self, grid: BucketGrid):
        self._grid, self._page, self.no_page = grid, grid.page or 1, grid.pages or 0
        longest = grid.num_pages(grid.max_length) if grid.decode_slots else 1
        self.table = np.full((grid.decode_slots, longest), self.no_page, np.int32)
        self.held_B = np.zeros(grid.decode_slots, np.int64)
        self._num_users = np.zeros(self.no_page, np.int64)
        """The number of slots that have each page."""
        self.num_groups = grid.slot_groups or 1
        size = self.no_page // self.num_groups
        self._free = [list(range(i * size, (i + 1) * size))[::-1] for i in range(self.num_groups)]
        """The free pages of each group; the last one is taken first."""
        self._unclean: set[int] = set()
        """Pages, free or not, that may hold non-finite numbers."""
        self._to_clear: dict[int, None] = {}
        """Unclean pages that were taken, in this order, and are not cleared yet."""

    @property
    def num_free(self) -> int:
        """The number of pages that no slot has."""
        return sum(map(len, self._free))

    @property
    def num_taken(self) -> int:
        """The number of pages that slots have, each counted once."""
        return self.no_page - self.num_free

    @property
    def num_free_G(self) -> np.ndarray:
        """The number of pages of each group that no slot has."""
        return np.array([len(pages) for pages in self._free])

    def group_of(self, slots: Any) -> Any:
        """The group of a slot, or of each slot of an array."""
        return slots * self.num_groups // len(self.table)

    def num_missing(
        self, length_B: np.ndarray, slots: np.ndarray | slice = slice(None)
    ) -> np.ndarray:
        """The number of pages that slots lack to hold numbers of positions, at least 0."""
        return np.maximum(-(-length_B // self._page) - self.held_B[slots], 0)

    def num_pages_without(self, is_kept_B: np.ndarray) -> int:
        """The number of pages that slots have, without those of the slots that are kept."""
        if not self.held_B[~is_kept_B].any():
            return 0
        kept, others = np.unique(self.table[is_kept_B]), np.unique(self.table[~is_kept_B])
        return len(np.setdiff1d(others, np.append(kept, self.no_page)))

    def take(self, slot: int, length: int) -> None:
        """Give a slot the pages that it lacks to hold a number of positions; they must be free."""
        first, end = int(self.held_B[slot]), self._grid.num_pages(length)
        if end <= first:
            return
        pages = [self._take_one(slot) for _ in range(end - first)]
        for page in self._unclean.intersection(pages) if self._unclean else ():
            self._unclean.remove(page)
            self._to_clear[page] = None
        self.table[slot, first:end] = pages
        self.held_B[slot] = end

    def share(self, source: int, slot: int, length: int) -> list[CopiedPage]:
        """Give a slot without pages the first entries of another slot.

        Args:
          source: The other slot.
          slot: The slot.
          length: The number of entries. Full pages of a slot in the same group are shared.

        Returns:
          The pages of the source to copy before the slot is used, and the slot's own pages to which
          they are copied.
        """
        assert not self.held_B[slot]
        num_shared, end = length // self._page, self._grid.num_pages(length)
        if self.group_of(source) != self.group_of(slot):
            num_shared = 0
        shared = self.table[source, :num_shared]
        self.table[slot, :num_shared] = shared
        self._num_users[shared] += 1
        copied = []
        for index in range(num_shared, end):
            page = self._take_one(slot)
            # the copy writes all of it
            self._unclean.discard(page)
            self.table[slot, index] = page
            copied.append(CopiedPage(int(self.table[source, index]), page))
        self.held_B[slot] = end
        return copied

    def release(self, slot: int) -> None:
        """Give the pages of a slot back; those that no other slot has become free."""
        pages = self.table[slot, : self.held_B[slot]]
        self._num_users[pages] -= 1
        freed = pages[self._num_users[pages] == 0].tolist()
        self._free[self.group_of(slot)] += freed[::-1]
        if self._to_clear:
            for page in freed:
                if page in self._to_clear:
                    del self._to_clear[page]
                    self._unclean.add(page)
        self.table[slot] = self.no_page
        self.held_B[slot] = 0

    def mark_unclean(self, pages: np.ndarray) -> None:
        """Record that pages may hold non-finite numbers; numbers past the last page are ignored."""
        self._unclean.update(pages[pages < self.no_page].tolist())
        self._unclean.difference_update(self._to_clear)

    def pages_to_clear(self) -> list[int]:
        """The unclean pages that were taken; the caller clears them before the next call."""
        pages = list(self._to_clear)
        self._to_clear.clear()
        return pages

    def rows(self, slots: Sequence[int | None], num_pages: int) -> np.ndarray:
        """The first pages of some slots, `[slots, num_pages]`; None for a row without pages."""
        page_BN = np.full((len(slots), num_pages), self.no_page, np.int32)
        for row, slot in enumerate(slots):
            if slot is not None:
                page_BN[row] = self.table[slot, :num_pages]
        return page_BN

    def _take_one(self, slot: int) -> int:
        page = self._free[self.group_of(slot)].pop()
        self._num_users[page] = 1
        return page
