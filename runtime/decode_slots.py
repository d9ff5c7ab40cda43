"""The slots of the decode batch, as scheduling sees them: who is in them, and the next call's span.

Pure state, without clock or device. Knows nothing of how prompts come into slots.
"""

from bisect import bisect_left
from dataclasses import dataclass

from ..compile.bucket_grid import BucketGrid


@dataclass(frozen=True)
class Job:
    """What scheduling needs to know of one request."""

    number: int
    prompt_length: int
    limit: int
    """Length at which each of its sequences ends; `prompt_length` when nothing is generated."""
    num_sequences: int
    is_scored: bool

    @property
    def generates(self) -> bool:
        """Whether its sequences decode at all."""
        return self.limit > self.prompt_length


@dataclass(frozen=True)
class Sequence:
    """One continuation of a request."""

    job: Job
    sample: int


@dataclass(frozen=True)
class DecodeAction:
    """Run one decode call for the live slots."""

    span: int
    slots: tuple[int, ...]


@dataclass
class _Occupant:
    sequence: Sequence
    length: int


class DecodeSlots:
    """The rows that decode."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        self._occupants: dict[int, _Occupant] = {}
        self._reach = [grid.reach(slot) for slot in range(grid.decode_slots)]
        self._sorted_reach = sorted(self._reach)

    def __len__(self) -> int:
        return len(self._reach)

    @property
    def free(self) -> list[int]:
        """Slots in which nothing decodes."""
        return [slot for slot in range(len(self)) if slot not in self._occupants]

    @property
    def longest_free(self) -> int:
        """How far the longest free slot reaches; 0 without any."""
        return max((self._reach[slot] for slot in self.free), default=0)

    def those_for(self, job: Job, slots: list[int]) -> list[int]:
        """Of these slots those that hold all that a sequence may become, the shortest first."""
        suited = (slot for slot in slots if job.limit <= self._reach[slot])
        return sorted(suited, key=self._reach.__getitem__)

    def num_for(self, job: Job) -> int:
        """Slots, free or not, that hold all that a sequence of a job may become."""
        return self.num_reaching(job.limit)

    def reach(self, slot: int) -> int:
        """The longest row that a slot holds."""
        return self._reach[slot]

    def num_reaching(self, length: int, slots: list[int] | None = None) -> int:
        """Of these slots, or of all, those that hold so many tokens."""
        if slots is None:
            return len(self) - bisect_left(self._sorted_reach, length)
        return sum(self._reach[slot] >= length for slot in slots)

    @property
    def live(self) -> tuple[int, ...]:
        """Slots whose rows decode."""
        return tuple(sorted(self._occupants))

    @property
    def any_live(self) -> bool:
        return bool(self._occupants)

    @property
    def job_numbers(self) -> set[int]:
        """The requests that decode."""
        return {occupant.sequence.job.number for occupant in self._occupants.values()}

    def put(self, slot: int, sequence: Sequence) -> None:
        """Let a sequence decode whose prompt is in its slot."""
        self._occupants[slot] = _Occupant(sequence, sequence.job.prompt_length)

    def advance(self, slot: int, num_tokens: int) -> None:
        """Note that a slot's row grew."""
        self._occupants[slot].length += num_tokens

    def release(self, slot: int) -> None:
        """Free a slot whose row ended."""
        del self._occupants[slot]

    def decode(self) -> DecodeAction | None:
        """The call of all live slots over the shortest span that holds them; None without any."""
        live = self.live
        if not live:
            return None
        return DecodeAction(self._grid.span_of(max(map(self._next_length, live))), live)

    def _next_length(self, slot: int) -> int:
        """Positions that the slot's row may hold after one more call."""
        occupant = self._occupants[slot]
        return min(occupant.length + self._grid.steps_per_call, occupant.sequence.job.limit)
