"""The groups of decode slots that share a planned prefix, and the prefix of each group.

The slots of a grid without prefixes are one group with the empty prefix. Pure state; does not know
how prompts are queued.

Guarantees: the prefix of a group changes only while none of its slots is taken.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefix_grid import PlannedPrefix
from .decode_slots import DecodeSlots

ENOUGH_ROWS = 1 / 2
"""Number of waiting rows, as a share of the slots of a group, for which a second group gets the
same prefix."""


class WaitingRows(NamedTuple):
    """The rows that wait for a group with their prefix."""

    num_slots: int
    """The number of slots that they need."""
    num_slots_of_oldest: int
    """The number of slots that the oldest of them needs."""


class PrefixGroups:
    """The prefix of each group of slots; all groups begin with the empty prefix."""

    def __init__(self, grid: BucketGrid, slots: DecodeSlots):
        num_groups = 1 if grid.prefixes is None else grid.prefixes.groups
        self._slots = slots
        self._prefixes: list[PlannedPrefix | None] = [None] * num_groups
        self.size = len(slots) // num_groups
        """The number of slots of a group."""

    def free(self, prefix: PlannedPrefix | None) -> list[int]:
        """The free slots, shortest first, of the group with this prefix that has most of them."""
        if len(self._prefixes) == 1:
            return self._slots.free if self._prefixes[0] == prefix else []
        free = self._free_by_group()
        groups = [group for group, other in enumerate(self._prefixes) if other == prefix]
        return max((free[group] for group in groups), key=len, default=[])

    def group_of(self, slot: int) -> int:
        """The group of a slot."""
        return slot // self.size

    def assign(
        self, waiting: Mapping[PlannedPrefix | None, WaitingRows]
    ) -> tuple[int, PlannedPrefix | None] | None:
        """Give a group without rows the prefix of rows that wait.

        The first prefix that no group has comes first, then the first one whose groups are full and
        that many rows wait for.

        Args:
          waiting: The rows that wait for each prefix, by age of the oldest row.

        Returns:
          The group and its new prefix; None if no group changes.
        """
        free = self._free_by_group()
        unused = [
            group
            for group, prefix in enumerate(self._prefixes)
            if prefix not in waiting and len(free[group]) == self.size
        ]
        if not unused:
            return None
        new = [prefix for prefix in waiting if prefix not in self._prefixes]
        new += [
            prefix
            for prefix, rows in waiting.items()
            if rows.num_slots >= ENOUGH_ROWS * self.size
            and len(self.free(prefix)) < rows.num_slots_of_oldest
        ]
        if not new:
            return None
        self._prefixes[unused[0]] = new[0]
        return unused[0], new[0]

    def _free_by_group(self) -> list[list[int]]:
        free: list[list[int]] = [[] for _ in self._prefixes]
        for slot in self._slots.free:
            free[self.group_of(slot)].append(slot)
        return free
