"""The slots of the decode batch for the scheduler: their owners, groups, and the next call's span.

In a plan with prefixes, the slots are in equal groups, and the rows in the slots of a group begin
with the same planned prefix. The slots of a grid without prefixes are one group with the empty
prefix.

Pure state, without clock or device. Does not know how prompts are queued, nor how they are written
into slots. Guarantees: the prefix of a group changes only while none of its slots is taken.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefix_grid import PlannedPrefix
from .actions import DecodeAction, ScheduledSequence

ENOUGH_ROWS = 1 / 2
"""Number of waiting rows, as a share of the slots of a group, for which a second group gets the
same prefix."""


class DecodeSlots:
    """The decode slots: free, claimed for a prompt that is being prefilled, or decoding."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._occupants: dict[int, int] = {}
        """The number of the request that decodes in a slot."""
        self._length_B = np.zeros(grid.decode_slots, np.int64)
        """The lengths of the sequences that decode."""
        self._max_length_B = np.zeros(grid.decode_slots, np.int64)
        """The lengths at which sequences end; 0 for a slot that does not decode."""
        self._prefixes: set[int] = set()
        """Slots that hold shared prefixes."""
        self._capacities = [grid.slot_capacity(slot) for slot in range(grid.decode_slots)]
        self._sorted_capacities = sorted(self._capacities)
        self._idle = Counter(self._capacities)
        """The number of slots of each capacity that neither decode nor hold a prefix."""
        # shortest first, so that a sequence takes the shortest slot that holds it
        self._free = sorted(range(len(self._capacities)), key=self._order)

    def __len__(self) -> int:
        return len(self._capacities)

    @property
    def free(self) -> list[int]:
        """The free slots, shortest first."""
        return self._free.copy()

    def first_usable(self, length: int, free: list[int]) -> int:
        """The index in `free`, shortest first, of the first slot that holds a total length."""
        return bisect_left(free, length, key=self._capacities.__getitem__)

    def num_usable(self, length: int) -> int:
        """The number of slots, free or not, that hold a total length."""
        return len(self) - bisect_left(self._sorted_capacities, length)

    def num_idle(self, length: int) -> int:
        """The number of slots that hold a total length, and neither decode nor hold a prefix."""
        return sum(count for capacity, count in self._idle.items() if length <= capacity)

    @property
    def live(self) -> tuple[int, ...]:
        """The slots that decode, in order."""
        return tuple(sorted(self._occupants))

    @property
    def has_live(self) -> bool:
        """Whether any slot decodes."""
        return bool(self._occupants)

    @property
    def request_numbers(self) -> set[int]:
        """The numbers of the requests that decode."""
        return set(self._occupants.values())

    def claim(self, slots: list[int]) -> None:
        """Reserve free slots for the sequences of a prompt."""
        for slot in slots:
            self._free.remove(slot)

    def put(self, slot: int, sequence: ScheduledSequence) -> None:
        """Start to decode a sequence whose prompt is complete in the slot."""
        request = sequence.request
        self._occupants[slot] = request.number
        self._length_B[slot] = request.prompt_length
        self._max_length_B[slot] = request.max_total_length
        self._idle[self._capacities[slot]] -= 1

    def hold(self, slot: int) -> None:
        """Record that a slot holds a shared prefix, until it is released or continued."""
        self._prefixes.add(slot)
        self._idle[self._capacities[slot]] -= 1

    def unhold(self, slot: int) -> None:
        """Record that a slot holds no shared prefix any more, as a longer one continues in it."""
        self._prefixes.remove(slot)
        self._idle[self._capacities[slot]] += 1

    def advance(self, slots: int | list[int], num_tokens: int) -> None:
        """Record that the sequences in one or several slots grew by some tokens each."""
        self._length_B[slots] += num_tokens

    def release(self, slot: int) -> None:
        """Free a slot that was claimed or that decoded."""
        if self._occupants.pop(slot, None) is not None or slot in self._prefixes:
            self._idle[self._capacities[slot]] += 1
        self._prefixes.discard(slot)
        self._max_length_B[slot] = 0
        insort(self._free, slot, key=self._order)

    def decode(self) -> DecodeAction | None:
        """The decode call of all live slots, over the shortest span that holds them; None if no
        slot is live."""
        if not self._occupants:
            return None
        length_B = np.minimum(self._length_B + self._grid.steps_per_call, self._max_length_B)
        length = int(length_B.max())
        return DecodeAction(self._grid.span_of(length), self.live, length)

    def _order(self, slot: int) -> tuple[int, int]:
        return self._capacities[slot], slot


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

        The prefix is one that no group has, if there is any. Else it is one that many rows wait
        for, and whose groups have too few free slots for the oldest of these rows. Of several, the
        first in `waiting` is taken.

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
