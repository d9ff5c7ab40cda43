"""Simulate a job on a grid with the real scheduler, but without a device or a clock.

Every action of the schedule is counted as the engine counts it, and its seconds come from a cost
model. Given the output lengths of a real run, the simulated calls, padding and slot occupancy equal
those of that run; the seconds are predictions.

Rows are submitted in the order of a job, a few at a time, as the scheduler asks for them. A stop id
and the length limit end a sequence at their step, on the device. The host finds a stop string after
the call, so a row that ends at a stop string runs to the end of the call.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.grids.prefix_grid import PlannedPrefix
from ...compile.planning.cost import CostModel
from ...sharding.call import Call
from ..engine.actions import (
    DecodeAction,
    ForkAction,
    PrefillAction,
    PrefixAction,
    ScheduledRequest,
    ScheduledSequence,
)
from ..engine.metrics import EngineMetrics
from ..engine.scheduler import Scheduler
from ..engine.shared_prefixes import SharedPrefix


@dataclass(frozen=True)
class SimulatedRow:
    """A row that fits the grid, with the lengths of its outputs."""

    prompt_length: int
    limit: int
    """The total length at which the sequences of the row must end."""
    outputs: tuple[int, ...]
    """Output tokens of each sequence, a stop id included; empty if the row generates nothing."""
    ends_on_host: bool = False
    """Whether a stop string ends the sequences of the row."""
    is_scored: bool = False
    prefix: SharedPrefix | None = None
    """The shared prefix with which its prompt begins."""
    planned_prefix: PlannedPrefix | None = None
    """The planned prefix with which its prompt begins; the lengths do not count it."""

    def request(self, number: int) -> ScheduledRequest:
        """The row as a request of the scheduler."""
        limit = self.limit if self.outputs else self.prompt_length
        num_sequences = max(1, len(self.outputs))
        return ScheduledRequest(
            number,
            self.prompt_length,
            limit,
            num_sequences,
            self.is_scored,
            self.prefix,
            self.planned_prefix,
        )


@dataclass
class Simulation:
    """Calls, padding and seconds of a simulated job."""

    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    tail_seconds: float = 0.0
    """Seconds from the moment at which no row waits any more to the end."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of all calls."""
        calls = [*self.metrics.prefill.values(), *self.metrics.decode.values()]
        return sum(use.seconds for use in calls)

    def scaled(self, factor: float) -> "Simulation":
        """The simulation with all counts and times multiplied by a factor, for more rows of the
        same kind; the tail keeps its seconds."""
        return Simulation(self.metrics.scaled(factor), self.tail_seconds)

    @property
    def occupancy(self) -> float:
        """The share of slot-steps in which the slot held a row."""
        uses = self.metrics.decode.values()
        computed = sum(use.computed_tokens for use in uses)
        return sum(use.live_tokens for use in uses) / computed if computed else 0.0


@dataclass
class _LiveSequence:
    """A sequence in a slot, with the number of tokens that it has emitted."""

    sequence: ScheduledSequence
    emitted: int = 0


def simulate(
    grid: BucketGrid, rows: Sequence[SimulatedRow], cost: CostModel | None, num_held: int = 0
) -> Simulation:
    """Simulate a job.

    Args:
      grid: The grid.
      rows: The rows in the order in which they are submitted.
      cost: Gives the seconds of calls; without it all calls take 0 seconds.
      num_held: The number of slots that may hold shared prefixes at one time.
    """
    run = _Run(grid, rows, cost)
    run.scheduler.reserve(num_held)
    return run.run()


class _Run:
    """The state of one simulated job."""

    def __init__(self, grid: BucketGrid, rows: Sequence[SimulatedRow], cost: CostModel | None):
        self._grid, self._rows, self._cost = grid, rows, cost
        self.scheduler = Scheduler(grid)
        self._live: dict[int, _LiveSequence] = {}
        self._result = Simulation()
        self._called: set[Call] = set()
        self._calls: dict[tuple[PrefillBucket, bool], Call] = {}
        """Prefill calls by bucket and scoring."""

    def run(self) -> Simulation:
        waiting = deque(enumerate(self._rows))
        seconds_at_last_row = None
        while True:
            while waiting and self.scheduler.wants_more:
                number, row = waiting.popleft()
                self.scheduler.submit(row.request(number))
            if seconds_at_last_row is None and not waiting and not self.scheduler.num_waiting:
                seconds_at_last_row = self._result.seconds
            if (action := self.scheduler.next_action()) is None:
                break
            self._carry_out(action)
        self._result.tail_seconds = self._result.seconds - (seconds_at_last_row or 0.0)
        return self._result

    def _carry_out(self, action: object) -> None:
        match action:
            case PrefillAction(rows=rows):
                self._count_prefill(action)
                for row in rows:
                    if row.slot is not None and row.is_last and row.sequence.request.generates:
                        self._live[row.slot] = _LiveSequence(row.sequence)
            case PrefixAction(count=count) if count:
                prefixes = self._grid.prefixes
                assert prefixes is not None
                seconds = self._seconds(prefixes.call)
                self._result.metrics.count_prefix(prefixes, count, seconds=seconds)
            case ForkAction(slot=slot, sequence=sequence, num_copied=num_copied):
                self._result.metrics.count_fork(num_copied)
                if sequence is not None:
                    self._live[slot] = _LiveSequence(sequence)
            case DecodeAction():
                self._decode(action)

    def _count_prefill(self, action: PrefillAction) -> None:
        bucket = action.bucket
        if (call := self._calls.get(key := (bucket, action.is_scored))) is None:
            call = self._grid.prefill_call(bucket, is_scored=action.is_scored)
            self._calls[key] = call
        self._result.metrics.count_prefill(
            bucket,
            is_scored=action.is_scored,
            rows=len(action.rows),
            real_tokens=sum(row.count for row in action.rows),
            prefix_tokens=sum(row.count for row in action.rows if row.is_of_prefix),
            computed_tokens=call.num_tokens,
            seconds=self._seconds(call),
            shared_tokens=action.shared_tokens,
        )

    def _decode(self, action: DecodeAction) -> None:
        slots = self._grid.decode_slots
        emitted = {slot: self._emits(self._live[slot]) for slot in action.slots}
        steps = max(emitted.values())
        call = self._grid.decode_call(action.span)
        self._result.metrics.count_decode(
            action.span,
            steps=steps,
            emitted=sum(emitted.values()),
            live_slots=len(action.slots),
            slots=slots,
            seconds=self._seconds(call, steps),
        )
        for slot, count in emitted.items():
            self._advance(slot, count)

    def _seconds(self, call: Call, steps: int = 1) -> float:
        if self._cost is None:
            return 0.0
        first = 0.0 if call in self._called else self._cost.first_call_seconds(call)
        self._called.add(call)
        of_call = self._cost.decode_call_seconds() if call.phase == "decode" else 0.0
        return first + of_call + steps * self._cost.seconds(call)

    def _emits(self, live: _LiveSequence) -> int:
        """The number of tokens that the next call emits, also after a stop string."""
        row = self._rows[live.sequence.request.number]
        length = row.limit - row.prompt_length
        if not row.ends_on_host:
            length = row.outputs[live.sequence.sample]
        return min(self._grid.steps_per_call, length - live.emitted)

    def _advance(self, slot: int, count: int) -> None:
        live = self._live[slot]
        live.emitted += count
        wanted = self._rows[live.sequence.request.number].outputs[live.sequence.sample]
        if live.emitted < wanted:
            self.scheduler.slots.advance(slot, count)
            return
        self._result.metrics.cut_tokens += live.emitted - wanted
        self.scheduler.slots.release(slot)
        del self._live[slot]
