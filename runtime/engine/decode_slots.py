"""The slots of the decode batch for the scheduler: their owners, and the rows of the next call.

In a plan with prefixes, rows that begin with the same planned prefix are in groups, of which a call
has a fixed number. Rows that find no place in a group wait.

Pure state, without clock or device. Does not know how prompts are queued, nor how they are written
into slots. Guarantees: a row with a planned prefix decodes only in a group; a row decodes only
while it has the pages for all steps of the call, and the oldest row finds them when the youngest
rows give theirs back.
"""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefix_grid import PlannedPrefix
from .actions import DecodeAction, ReadEntries, ScheduledSequence, SharedGroup
from .growth import Growth
from .page_pool import PagePool


class GivenBack(NamedTuple):
    """A slot that a sequence gave back before it ended."""

    slot: int
    sequence: ScheduledSequence
    num_known: int
    """The tokens that the sequence has emitted."""


class DecodeSlots:
    """The decode slots: free, claimed for a prompt that is being prefilled, or decoding.

    Attributes:
      pool: The pages of the slots.
      growth: The expected growth of rows.
    """

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self.pool = PagePool(grid)
        self.growth = Growth(grid)
        self._occupants: dict[int, ScheduledSequence] = {}
        """The sequence that decodes in a slot."""
        self._length_B = np.zeros(grid.decode_slots, np.int64)
        """The lengths of the sequences that decode."""
        self._max_length_B = np.zeros(grid.decode_slots, np.int64)
        """The lengths at which sequences end; 0 for a slot that does not decode."""
        self._prefixes: set[int] = set()
        """Slots that hold shared prefixes."""
        self._free = list(range(grid.decode_slots))

    def __len__(self) -> int:
        return self._grid.decode_slots

    @property
    def free(self) -> list[int]:
        """The free slots, in order."""
        return self._free.copy()

    @property
    def num_taken(self) -> int:
        """The number of slots that are not free."""
        return len(self) - len(self._free)

    @property
    def num_idle(self) -> int:
        """The number of slots that neither decode nor hold a prefix."""
        return len(self) - len(self._occupants) - len(self._prefixes)

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
        return {sequence.request.number for sequence in self._occupants.values()}

    @property
    def expected_pages_G(self) -> np.ndarray:
        """The pages that rows with slots of each group are expected to take from now on."""
        return self._expected_pages_B().reshape(self.pool.num_groups, -1).sum(axis=1)

    @property
    def num_idle_pages(self) -> int:
        """The pages that no row and no prefix has, and that no row is expected to take.

        As in `num_idle`, those of prompts that are not complete are idle.
        """
        is_live_B = self._max_length_B > 0
        is_kept_B = is_live_B.copy()
        is_kept_B[list(self._prefixes)] = True
        of_prompts = self.pool.num_pages_without(is_kept_B)
        return int(self.pool.num_free + of_prompts - self._expected_pages_B()[is_live_B].sum())

    def forget_growth(self) -> None:
        """Forget how long the sequences of an earlier run were; no slot is in use."""
        self.growth = Growth(self._grid)

    def claim(self, slots: list[int]) -> None:
        """Reserve free slots for the sequences of a prompt."""
        for slot in slots:
            self._free.remove(slot)

    def begin(self, slot: int, sequence: ScheduledSequence, num_known: int) -> None:
        """Record which sequence will decode in a claimed slot.

        Args:
          slot: The slot.
          sequence: The sequence.
          num_known: The tokens that it emitted before it gave another slot back.
        """
        self._length_B[slot] = sequence.request.prompt_length
        self.growth.begin(slot, sequence, num_known)

    def put(self, slot: int, sequence: ScheduledSequence) -> None:
        """Start to decode a sequence whose prompt is complete in the slot."""
        request = sequence.request
        self._occupants[slot] = sequence
        self._length_B[slot] = request.prompt_length
        self._max_length_B[slot] = request.max_total_length

    def hold(self, slot: int) -> None:
        """Record that a slot holds a shared prefix, until it is released or continued."""
        self._prefixes.add(slot)

    def unhold(self, slot: int) -> None:
        """Record that a slot holds no shared prefix any more, as a longer one continues in it."""
        self._prefixes.remove(slot)

    def advance(self, slots: int | np.ndarray, num_tokens: int | np.ndarray) -> None:
        """Record that the sequences in one or several slots grew by some tokens each."""
        self._length_B[slots] += num_tokens

    def read_entries(
        self, slots: np.ndarray, num_tokens_B: np.ndarray, groups: Sequence[SharedGroup] = ()
    ) -> ReadEntries:
        """The entries in whole pages that rows read in a call.

        Args:
          slots: The slots that decode, which have not been advanced.
          num_tokens_B: The number of tokens that each of them emits, one a step.
          groups: The groups of rows that read a planned prefix.
        """
        length_B = self._length_B[slots]
        before, after = (_sum_of_pages(n, self._grid) for n in (length_B, length_B + num_tokens_B))
        seen, saved = int((after - before).sum()), 0
        num_tokens = dict(zip(slots.tolist(), num_tokens_B.tolist(), strict=True)) if groups else {}
        for group in groups:
            reads = [num_tokens[slot] for slot in group.slots]
            saved += group.num_pages * (sum(reads) - max(reads))
        return ReadEntries(seen - saved * (self._grid.page or 0), seen)

    def release(self, slot: int) -> None:
        """Free a slot that was claimed or that decoded, because its sequence ended."""
        if slot in self._occupants:
            self.growth.end(slot, int(self._length_B[slot]))
        self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        self.growth.leave(slot)
        self.pool.release(slot)
        self._occupants.pop(slot, None)
        self._prefixes.discard(slot)
        self._max_length_B[slot] = 0
        insort(self._free, slot)

    def give_back(self) -> list[GivenBack]:
        """Let the youngest rows give their slots back until the oldest row finds pages to grow.

        This holds in each group of slots with pages of its own.
        """
        given: list[GivenBack] = []
        if not self._occupants:
            return given
        slots = self.growth.by_age(np.array(self.live))
        group_B = self.pool.group_of(slots)
        for group in np.unique(group_B).tolist():
            given += self._give_back(group, slots[group_B == group].tolist())
        return given

    def _give_back(self, group: int, slots: list[int]) -> list[GivenBack]:
        """Let rows of a group, of which the oldest comes first, give their slots back."""
        given: list[GivenBack] = []
        oldest, *others = slots
        needed = int(self._num_missing(np.array([oldest]))[0])
        while needed > self.pool.num_free_G[group] and others:
            slot = others.pop()
            num_known = self.growth.num_known(slot, int(self._length_B[slot]))
            given.append(GivenBack(slot, self._occupants[slot], num_known))
            self._free_slot(slot)
        return given

    def decode(self) -> DecodeAction | None:
        """The decode call of the live slots; None if no slot is live.

        Rows for which pages lack wait, and so do rows with a planned prefix that find no place in a
        group. It is None if all of them wait.
        """
        if not self._occupants:
            return None
        slots, groups = self._grouped(self._grow())
        if not slots:
            return None
        length = int(self._next_length(np.array(slots)).max())
        num_waiting = len(self._occupants) - len(slots)
        return DecodeAction(slots, length, num_waiting, groups=groups)

    def _grouped(self, slots: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[SharedGroup, ...]]:
        """The slots whose rows find a place in a group, oldest first, or need none; the groups."""
        if (prefixes := self._grid.prefixes) is None:
            return slots, ()
        per_part = prefixes.groups // self.pool.num_groups
        groups: dict[int, list[int]] = {}
        num_pages: dict[int, int] = {}
        newest: dict[tuple[int, PlannedPrefix, bool], int] = {}
        num_used, goes_on = Counter[int](), []
        for slot in self.growth.by_age(np.array(slots)).tolist():
            request = self._occupants[slot].request
            prefix = request.planned_prefix
            if prefix is not None and (pages := self._grid.prefix_pages(prefix.length)):
                # scored prompts run in other graphs, so the bits of their entries may differ
                key = part, *_ = self.pool.group_of(slot), prefix, request.is_scored
                if key not in newest or len(groups[newest[key]]) == prefixes.rows:
                    if num_used[part] == per_part:
                        continue
                    newest[key] = part * per_part + num_used[part]
                    num_used[part] += 1
                groups.setdefault(newest[key], []).append(slot)
                num_pages[newest[key]] = pages
            goes_on.append(slot)
        return tuple(sorted(goes_on)), tuple(
            SharedGroup(number, tuple(in_group), num_pages[number])
            for number, in_group in groups.items()
        )

    def _grow(self) -> tuple[int, ...]:
        """Give the rows their pages for the next call, oldest first; return those that have them.

        A row that finds too few pages keeps younger rows of its group from taking any.
        """
        slots = self.growth.by_age(np.array(self.live))
        missing = self._num_missing(slots)
        goes_on, group_B = missing == 0, self.pool.group_of(slots)
        for group, num_free in enumerate(self.pool.num_free_G):
            of_group = group_B == group
            goes_on[of_group] |= np.cumsum(missing[of_group]) <= num_free
        growing = goes_on & (missing > 0)
        length_B = self._next_length(slots[growing])
        for slot, length in zip(slots[growing].tolist(), length_B.tolist(), strict=True):
            self.pool.take(slot, length)
        return tuple(sorted(slots[goes_on].tolist()))

    def _expected_pages_B(self) -> np.ndarray:
        """The number of pages that the row in each slot is expected to take from now on."""
        return self.pool.num_missing(self.growth.expected_length_B(self._length_B))

    def _next_length(self, slots: np.ndarray) -> np.ndarray:
        """The lengths of rows after the next call, if they do not end."""
        next_length = self._length_B[slots] + self._grid.steps_per_call
        return np.minimum(next_length, self._max_length_B[slots])

    def _num_missing(self, slots: np.ndarray) -> np.ndarray:
        """The number of pages that rows must take for the next call."""
        return self.pool.num_missing(self._next_length(slots), slots)


def _sum_of_pages(length_B: np.ndarray, grid: BucketGrid) -> np.ndarray:
    """The entries in whole pages that a row reads in all steps up to a length, from the first on.

    The step that makes a row n positions long reads the pages of n positions.
    """
    assert grid.page is not None
    num_full, rest = np.divmod(length_B, grid.page)
    return grid.page * (grid.page * num_full * (num_full + 1) // 2 + rest * (num_full + 1))
