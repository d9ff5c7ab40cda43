"""Simulate a job on a grid with the real scheduler, but without a device or a clock.

Every action of the schedule is counted as the engine counts it, and its seconds come from a cost
model. The schedule does not depend on the seconds, so it has prices under any cost model. Given the
output lengths of a real run, the simulated calls, padding and slot occupancy equal those of that
run; the seconds are predictions.

Rows are submitted in the order of a job, a few at a time, as the scheduler asks for them. A stop id
and the length limit end a sequence at their step, on the device. The host finds a stop string after
the call, so a row that ends at a stop string runs to the end of the call.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.grids.prefix_grid import PlannedPrefix
from ...compile.planning.cost import CostModel
from ...compile.planning.work import sum_by_key
from ...sharding.call import Call
from ..engine.actions import (
    DecodeAction,
    ForkAction,
    PrefillAction,
    ReadEntries,
    ScheduledRequest,
    ScheduledSequence,
)
from ..engine.metrics import EngineMetrics, Scale, prefill_name
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
    """The planned prefix with which its prompt begins."""

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
    schedule: "Schedule" = field(default_factory=lambda: Schedule(), repr=False, compare=False)
    """The calls of the rows that were simulated."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of all calls."""
        prefill = sum(use.seconds for use in self.metrics.prefill.values())
        return prefill + self.metrics.decode.seconds

    def scaled(self, scale: Scale) -> "Simulation":
        """The simulation with its counts and times for more rows of the same kind; the tail keeps
        its seconds, and the schedule its calls."""
        return replace(self, metrics=self.metrics.scaled(scale))

    @property
    def occupancy(self) -> float:
        """The share of slot-steps in which the slot held a row."""
        use = self.metrics.decode
        return use.live_tokens / use.computed_tokens if use.computed_tokens else 0.0


class Count(NamedTuple):
    """Numbers of calls and steps, and of the entries of pages in their `ReadEntries`."""

    calls: int = 0
    steps: int = 0
    read: int = 0
    seen: int = 0


Counts = dict[str | None, Count]
"""Counts by name for a prefill graph, whose calls have one step, and those of decode calls by None.
"""


class Held(NamedTuple):
    """The slots and pages that rows, prompts and shared prefixes hold at one time."""

    slots: int = 0
    pages: int = 0
    """0 in a grid without slots."""
    waiting: int = 0
    """The rows that wait for pages in their slots."""


NOTHING_HELD = Held()


class SimulatedCall(NamedTuple):
    """One call of a schedule."""

    graph: str | None
    """The name of a prefill graph; None for decode."""
    steps: int
    """1 for a prefill call."""
    entries: ReadEntries
    held: Held
    """The slots and pages in use during the call."""


@dataclass
class Schedule:
    """The calls of a simulated job, without seconds."""

    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    """All counters."""
    prefill_calls: dict[str, Call] = field(default_factory=dict)
    """The shape of each prefill graph, by its name in `metrics`."""
    counts_before_tail: Counts = field(default_factory=dict)
    """The calls and steps until no row waits."""
    calls: list[SimulatedCall] = field(default_factory=list)
    """All calls that take time, in order."""
    held_at_end: Held = NOTHING_HELD
    """The slots and pages in use after the last call."""

    @property
    def counts(self) -> Counts:
        """The counts of each prefill graph, and of decode calls if there are any."""
        counts: Counts = {
            name: Count(use.calls, use.calls, use.read_entries, use.read_entries)
            for name, use in self.metrics.prefill.items()
        }
        if (use := self.metrics.decode).calls:
            counts[None] = Count(use.calls, use.steps, use.read_entries, use.seen_entries)
        return counts

    def priced(self, grid: BucketGrid, cost: CostModel | None) -> Simulation:
        """The schedule with seconds.

        Args:
          grid: The grid of the schedule.
          cost: Gives the seconds of calls; without it all calls take 0 seconds.
        """
        metrics = self.metrics.scaled(Scale())
        seconds = self._seconds(self.counts, grid, cost)
        for name, use in metrics.prefill.items():
            use.seconds = seconds[name]
        metrics.decode.seconds = seconds.get(None, 0.0)
        before_tail = sum(self._seconds(self.counts_before_tail, grid, cost).values())
        return Simulation(metrics, sum(seconds.values()) - before_tail, self)

    def call_seconds(self, grid: BucketGrid, cost: CostModel) -> list[float]:
        """The seconds of each of `calls`; those of a graph's first call include its extra seconds.

        The arguments are those of `priced`. It prices all calls of a graph at their average number
        of entries, so the sums may differ a little.
        """
        seconds, known = [], set()
        for call in self.calls:
            count = Count(1, call.steps, *call.entries)
            shape = self._shape(call.graph, count, grid)
            first_call = 0.0 if call.graph in known else cost.first_call_seconds(shape)
            known.add(call.graph)
            seconds.append(first_call + _seconds_of(shape, count, cost))
        return seconds

    def causes(self, grid: BucketGrid, cost: CostModel) -> dict[str, float]:
        """The seconds of all calls by cause, as in `Estimate`, first calls included."""
        pairs: list[tuple[str, float]] = []
        for name, count in self.counts.items():
            shape = self._shape(name, count, grid)
            causes = cost.estimate(shape).causes
            pairs += ((cause, count.steps * seconds) for cause, seconds in causes.items())
            of_calls = _seconds_of(shape, count._replace(steps=0), cost)
            pairs.append(("calls", cost.first_call_seconds(shape) + of_calls))
        return sum_by_key(pairs)

    def _seconds(
        self, counts: Counts, grid: BucketGrid, cost: CostModel | None
    ) -> dict[str | None, float]:
        """Seconds of these calls and steps, first calls included, by name of the graph."""
        if cost is None:
            return dict.fromkeys(counts, 0.0)
        shapes = {name: self._shape(name, count, grid) for name, count in counts.items()}
        return {
            name: cost.first_call_seconds(call) + _seconds_of(call, counts[name], cost)
            for name, call in shapes.items()
        }

    def _shape(self, name: str | None, count: Count, grid: BucketGrid) -> Call:
        """The average shape of calls of a prefill graph, or of the steps of decode."""
        if name is None:
            return grid.average_step(count.read / count.steps, count.seen / count.steps)
        call = self.prefill_calls[name]
        return call if call.entries is None else replace(call, entries=count.read / count.calls)


def _seconds_of(shape: Call, count: Count, cost: CostModel) -> float:
    """The seconds of so many calls of a shape, without the extra seconds of the first one."""
    of_call = cost.decode_call_seconds() if shape.phase == "decode" else 0.0
    return count.calls * of_call + count.steps * cost.seconds(shape)


class _SlotCounts:
    """The decode calls that the sequences in the slots still take."""

    def __init__(self, num_slots: int):
        self.num_calls_B = np.zeros(num_slots, np.int64)
        """The calls up to the end of the sequence; all calls before the last emit every step."""
        self.last_B = np.zeros(num_slots, np.int64)
        """The tokens that its last call emits, those past a stop string included."""
        self.cut_B = np.zeros(num_slots, np.int64)
        """The tokens that it emits past a stop string."""
        self.num_known_B = np.zeros(num_slots, np.int64)
        """The tokens that it emits again, as it emitted them before it gave a slot back."""


def schedule(grid: BucketGrid, rows: Sequence[SimulatedRow], num_held: int = 0) -> Schedule:
    """The schedule of a job.

    Args:
      grid: The grid.
      rows: The rows in the order in which they are submitted.
      num_held: The number of slots that may hold shared prefixes at one time.
    """
    run = _Run(grid, rows)
    run.scheduler.reserve(num_held)
    return run.run()


class _Run:
    """The state of one simulated job."""

    def __init__(self, grid: BucketGrid, rows: Sequence[SimulatedRow]):
        self._grid, self._rows = grid, rows
        self.scheduler = Scheduler(grid)
        self._result = Schedule()
        self._result.metrics.grid = grid
        self._counts = _SlotCounts(grid.decode_slots)
        self._calls: dict[tuple[PrefillBucket, bool], Call] = {}
        """Prefill calls by bucket and scoring."""

    def run(self) -> Schedule:
        waiting = deque(enumerate(self._rows))
        is_tail = False
        while True:
            while waiting and self.scheduler.wants_more:
                number, row = waiting.popleft()
                self.scheduler.submit(row.request(number))
            if not (is_tail or waiting or self.scheduler.num_waiting):
                is_tail = True
                self._result.counts_before_tail = self._result.counts
            if (action := self.scheduler.next_action()) is None:
                self._result.held_at_end = self._held()
                return self._result
            self._carry_out(action)

    def _carry_out(self, action: object) -> None:
        match action:
            case PrefillAction(rows=rows):
                self._count_prefill(action)
                for row in rows:
                    if row.slot is not None and row.is_last and row.sequence.request.generates:
                        self._start(row.slot, row.sequence, row.num_known or 0)
            case ForkAction(slot=slot, sequence=sequence, num_copied=num_copied):
                self._result.metrics.count_fork(num_copied)
                if sequence is not None:
                    self._start(slot, sequence)
            case DecodeAction():
                self._decode(action)

    def _count_prefill(self, action: PrefillAction) -> None:
        bucket = action.bucket
        name = prefill_name(bucket, is_scored=action.is_scored)
        if (call := self._calls.get(key := (bucket, action.is_scored))) is None:
            call = self._grid.prefill_call(bucket, is_scored=action.is_scored)
            self._calls[key] = self._result.prefill_calls[name] = call
        self._result.metrics.count_prompts(action)
        entries = ReadEntries(action.read_entries, action.read_entries)
        self._result.calls.append(SimulatedCall(name, 1, entries, self._held()))

    def _held(self, num_waiting: int = 0) -> Held:
        slots = self.scheduler.slots
        return Held(slots.num_taken, slots.pool.num_taken, num_waiting)

    def _start(self, slot: int, sequence: ScheduledSequence, num_known: int = 0) -> None:
        """Note how many decode calls a sequence takes."""
        row, steps = self._rows[sequence.request.number], self._grid.steps_per_call
        wanted = row.outputs[sequence.sample]
        # a stop string ends a row after the call, and the device goes on up to the limit
        length = row.limit - row.prompt_length if row.ends_on_host else wanted
        num_calls = max(1, -(-wanted // steps))
        emitted = min(num_calls * steps, length)
        counts = self._counts
        counts.num_calls_B[slot] = num_calls
        counts.last_B[slot] = emitted - (num_calls - 1) * steps
        counts.cut_B[slot] = emitted - wanted
        counts.num_known_B[slot] = num_known

    def _decode(self, action: DecodeAction) -> None:
        slots, steps, counts = np.array(action.slots), self._grid.steps_per_call, self._counts
        counts.num_calls_B[slots] -= 1
        is_last = counts.num_calls_B[slots] == 0
        emitted_B = np.where(is_last, counts.last_B[slots], steps)
        run_steps = int(emitted_B.max())
        known_B = np.minimum(counts.num_known_B[slots], emitted_B)
        counts.num_known_B[slots] -= known_B
        num_known = int(known_B.sum())
        entries = self.scheduler.slots.read_entries(slots, emitted_B, action.groups)
        self._result.calls.append(
            SimulatedCall(None, run_steps, entries, self._held(action.num_waiting))
        )
        metrics, ending = self._result.metrics, slots[is_last]
        metrics.count_decode(
            steps=run_steps,
            emitted=int(emitted_B.sum()) - num_known,
            live_slots=len(slots),
            slots=self._grid.decode_slots,
            read=entries,
        )
        metrics.count_waits(action.num_waiting, num_known)
        metrics.cut_tokens += int(counts.cut_B[ending].sum())
        self.scheduler.slots.advance(slots, emitted_B)
        for slot in ending.tolist():
            self.scheduler.slots.release(slot)


@dataclass(frozen=True)
class Timeline:
    """The calls of a run, and what is held: during each call, and after the last one.

    The calls follow each other without gaps.
    """

    end_T: np.ndarray
    """The moments in seconds: 0, and the end of each call."""
    is_decode_C: np.ndarray
    """Whether a call is one of decode; others are of prefill."""
    slots_T: np.ndarray
    pages_T: np.ndarray
    """0 in a grid without pages."""
    waiting_T: np.ndarray
    """The rows that wait for pages in their slots."""

    @classmethod
    def of(cls, schedule: Schedule, grid: BucketGrid, cost: CostModel) -> "Timeline":
        """The timeline of a schedule; the arguments are those of `Schedule.priced`."""
        seconds_C = np.array(schedule.call_seconds(grid, cost))
        held = [*(call.held for call in schedule.calls), schedule.held_at_end]
        slots_T, pages_T, waiting_T = np.array(held).T
        end_T = np.concatenate([[0.0], np.cumsum(seconds_C)])
        is_decode_C = np.array([call.graph is None for call in schedule.calls], bool)
        return cls(end_T, is_decode_C, slots_T, pages_T, waiting_T)

    def share_of_decode(self, edge_N: np.ndarray) -> np.ndarray:
        """The share of decode in the seconds between each two neighbours of some moments."""
        seconds_C = np.where(self.is_decode_C, np.diff(self.end_T), 0.0)
        of_decode_T = np.concatenate([[0.0], np.cumsum(seconds_C)])
        return np.diff(np.interp(edge_N, self.end_T, of_decode_T)) / np.diff(edge_N)
