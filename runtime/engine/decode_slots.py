"""The slots of the decode batch, as scheduling sees them: who has them, and the next call's span.

Pure state, without clock or device. Knows nothing of how prompts come into slots.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from ...compile.grids.bucket_grid import BucketGrid


@dataclass(frozen=True)
class ScheduledRequest:
    """What scheduling needs to know of one request."""

    number: int
    prompt_length: int
    max_total_length: int
    """Length at which each of its sequences ends; `prompt_length` when nothing is generated."""
    num_sequences: int
    is_scored: bool

    @property
    def generates(self) -> bool:
        """Whether its sequences decode at all."""
        return self.max_total_length > self.prompt_length


@dataclass(frozen=True)
class ScheduledSequence:
    """One continuation of a request."""

    request: ScheduledRequest
    sample: int


@dataclass(frozen=True)
class DecodeAction:
    """Run one decode call for the live slots."""

    span: int
    slots: tuple[int, ...]


@dataclass
class _Occupant:
    number: int
    length: int
    max_total_length: int


class DecodeSlots:
    """Slots that are free, that are claimed for prompts on their way, and that decode."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._occupants: dict[int, _Occupant] = {}
        self._reach = [grid.slot_capacity(slot) for slot in range(grid.decode_slots)]
        self._sorted_reach = sorted(self._reach)
        # the shortest first, so that a row takes the shortest slot that holds it
        self._free = sorted(range(len(self._reach)), key=self._order)

    def __len__(self) -> int:
        return len(self._reach)

    @property
    def free(self) -> list[int]:
        """Slots that nobody has, the shortest first."""
        return self._free.copy()

    def first_for(self, request: ScheduledRequest, free: list[int]) -> int:
        """The index in `free`, shortest first, of the first slot that holds a job's sequences."""
        return bisect_left(free, request.max_total_length, key=self._reach.__getitem__)

    def num_for(self, request: ScheduledRequest) -> int:
        """Slots, free or not, that hold all that a sequence of a request may become."""
        return len(self) - bisect_left(self._sorted_reach, request.max_total_length)

    def num_idle_for(self, request: ScheduledRequest) -> int:
        """Slots that hold all that its sequences may become, and in which nothing decodes."""
        return self.num_for(request) - sum(
            request.max_total_length <= self._reach[slot] for slot in self._occupants
        )

    @property
    def live(self) -> tuple[int, ...]:
        """Slots whose rows decode."""
        return tuple(sorted(self._occupants))

    @property
    def any_live(self) -> bool:
        return bool(self._occupants)

    @property
    def request_numbers(self) -> set[int]:
        """The requests that decode."""
        return {occupant.number for occupant in self._occupants.values()}

    def claim(self, slots: list[int]) -> None:
        """Take free slots for the sequences of a prompt."""
        for slot in slots:
            self._free.remove(slot)

    def put(self, slot: int, sequence: ScheduledSequence) -> None:
        """Let a sequence decode whose prompt is in its slot."""
        request = sequence.request
        self._occupants[slot] = _Occupant(
            request.number, request.prompt_length, request.max_total_length
        )

    def advance(self, slot: int, num_tokens: int) -> None:
        """Note that a slot's row grew."""
        self._occupants[slot].length += num_tokens

    def release(self, slot: int) -> None:
        """Free a slot, whether its row decoded or not."""
        self._occupants.pop(slot, None)
        insort(self._free, slot, key=self._order)

    def decode(self) -> DecodeAction | None:
        """The call of all live slots over the shortest span that holds them; None without any."""
        if not self._occupants:
            return None
        steps = self._grid.steps_per_call
        length = max(min(x.length + steps, x.max_total_length) for x in self._occupants.values())
        return DecodeAction(self._grid.span_of(length), self.live)

    def _order(self, slot: int) -> tuple[int, int]:
        return self._reach[slot], slot
