"""The slots of the decode batch for the scheduler: their owners, and the next call's span.

Pure state, without clock or device. Does not know how prompts are written into slots.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from ...compile.grids.bucket_grid import BucketGrid
from .actions import DecodeAction, ScheduledSequence


@dataclass
class _Occupant:
    """The sequence that decodes in a slot."""

    number: int
    length: int
    max_total_length: int


class DecodeSlots:
    """The decode slots: free, claimed for a prompt that is being prefilled, or decoding."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._occupants: dict[int, _Occupant] = {}
        self._prefixes: set[int] = set()
        """Slots that hold shared prefixes."""
        self._capacities = [grid.slot_capacity(slot) for slot in range(grid.decode_slots)]
        self._sorted_capacities = sorted(self._capacities)
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
        return self.num_usable(length) - sum(
            length <= self._capacities[slot] for slot in (*self._occupants, *self._prefixes)
        )

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
        return {occupant.number for occupant in self._occupants.values()}

    def claim(self, slots: list[int]) -> None:
        """Reserve free slots for the sequences of a prompt."""
        for slot in slots:
            self._free.remove(slot)

    def put(self, slot: int, sequence: ScheduledSequence) -> None:
        """Start to decode a sequence whose prompt is complete in the slot."""
        request = sequence.request
        self._occupants[slot] = _Occupant(
            request.number, request.prompt_length, request.max_total_length
        )

    def hold(self, slot: int) -> None:
        """Record that a slot holds a shared prefix, until it is released or continued."""
        self._prefixes.add(slot)

    def unhold(self, slot: int) -> None:
        """Record that a slot no longer holds a shared prefix, as its next pieces run."""
        self._prefixes.remove(slot)

    def advance(self, slot: int, num_tokens: int) -> None:
        """Record that the sequence in a slot grew by some tokens."""
        self._occupants[slot].length += num_tokens

    def release(self, slot: int) -> None:
        """Free a slot that was claimed or that decoded."""
        self._occupants.pop(slot, None)
        self._prefixes.discard(slot)
        insort(self._free, slot, key=self._order)

    def decode(self) -> DecodeAction | None:
        """The decode call of all live slots, over the shortest span that holds them; None if no
        slot is live."""
        if not self._occupants:
            return None
        steps = self._grid.steps_per_call
        length = max(
            min(occupant.length + steps, occupant.max_total_length)
            for occupant in self._occupants.values()
        )
        return DecodeAction(self._grid.span_of(length), self.live)

    def _order(self, slot: int) -> tuple[int, int]:
        return self._capacities[slot], slot
