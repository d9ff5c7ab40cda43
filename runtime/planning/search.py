"""Search for the fastest grid: the most promising candidates are simulated, the others bounded.

The search is branch and bound (Land and Doig 1960). Candidates are simulated by growing expected
seconds. Expected seconds leave out the schedule. So they are corrected by the error that was seen
for the most similar grid: the ratio of its simulated to its expected seconds. A candidate is
skipped if its lower bound is no less than the seconds of the best simulated grid, as it cannot be
better. If too many candidates are left, the search ends early and reports how much faster one of
them might be.

The limit of padding holds for the simulated schedule, dummy rows included: the result is the
fastest grid within the limit. After a grid that pads too much, candidates with larger calls of the
same shapes come last.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from ...compile.planning.candidates import Budget
from ...compile.planning.cost import CostModel
from ...compile.planning.run_bounds import Candidate, ExpectedRow
from ..engine.shared_prefixes import plan_submission
from ..errors import NoPlanFits
from .simulator import Schedule, SimulatedRow, Simulation, schedule

MAX_SIMULATED_GRIDS = 24
MIN_EQUAL = 4
"""The minimum number of the seven properties in which similar grids are equal."""
ScaleToAllRows = Callable[[BucketGrid, Simulation], Simulation]
"""A function that scales the simulation of a sample of the rows to all rows."""


@dataclass(frozen=True)
class SimulatedGrid:
    """A grid and the simulation of its schedule."""

    grid: BucketGrid
    simulation: Simulation
    build_seconds: float
    """Predicted seconds to compile the graphs."""

    @property
    def seconds(self) -> float:
        """Predicted seconds to compile and to run."""
        return self.build_seconds + self.simulation.seconds

    def causes(self, cost: CostModel) -> dict[str, float]:
        """The seconds of the run by cause, the largest first (`Estimate.causes`)."""
        causes = self.simulation.schedule.causes(self.grid, cost)
        # those of a sample are scaled to all rows
        factor = self.simulation.seconds / sum(causes.values())
        ordered = sorted(causes.items(), key=lambda item: -item[1])
        return {cause: factor * seconds for cause, seconds in ordered if seconds}

    @property
    def padding(self) -> float:
        """The ratio of computed to real prompt tokens."""
        metrics = self.simulation.metrics
        uses = metrics.prefill.values()
        real = metrics.saved_tokens + sum(use.real_tokens for use in uses)
        return sum(use.computed_tokens for use in uses) / real


@dataclass(frozen=True)
class SearchResult:
    """The best simulated grid, and a bound for the candidates that were not simulated."""

    best: SimulatedGrid
    num_simulated: int
    num_candidates: int
    min_bound: float | None
    """The smallest lower bound in seconds of the candidates that were not simulated; None if no
    such candidate can be better than `best`."""

    def joined(self, other: "SearchResult") -> "SearchResult":
        """The result of both searches together."""
        best = min(self.best, other.best, key=lambda simulated: simulated.seconds)
        bounds = [b for b in (self.min_bound, other.min_bound) if b and b < best.seconds]
        return SearchResult(
            best,
            self.num_simulated + other.num_simulated,
            self.num_candidates + other.num_candidates,
            min(bounds, default=None),
        )

    @property
    def gap(self) -> float:
        """The largest share of the best grid's seconds that another candidate might save."""
        if self.min_bound is None:
            return 0.0
        return max(0.0, 1 - self.min_bound / self.best.seconds)


class Schedules:
    """The schedules of a job's rows, in the order in which a job submits them to the engine.

    A schedule does not depend on seconds, so a grid has one schedule under all layouts.
    """

    def __init__(self, rows: Sequence[ExpectedRow], table: PrefixTable = NOTHING_SHARED):
        """Prepare the schedules; `table` is what the prompts of `rows` share."""
        self.rows, self.table = rows, table
        self._known: dict[BucketGrid, Schedule] = {}

    def of(self, grid: BucketGrid) -> Schedule:
        """The schedule on a grid."""
        if grid not in self._known:
            needs = [(row.need.prompt_length, row.need.max_tokens) for row in self.rows]
            submission = plan_submission(needs, self.table, grid)
            rows = [self.rows[row] for row in submission.rows]
            planned = submission.planned or [None] * len(rows)
            submitted = [
                SimulatedRow(
                    row.need.prompt_length,
                    row.limit(grid.max_length),
                    (row.output,) * (row.need.num_sequences if row.output else 0),
                    row.ends_on_host,
                    row.need.is_scored,
                    prefix,
                    planned_prefix,
                )
                for row, prefix, planned_prefix in zip(
                    rows, submission.prefixes, planned, strict=True
                )
            ]
            self._known[grid] = schedule(grid, submitted, submission.num_held)
        return self._known[grid]


def find_best_grid(
    candidates: Iterable[Candidate],
    schedules: Schedules,
    cost: CostModel,
    budget: Budget,
    max_simulated: int = MAX_SIMULATED_GRIDS,
    on_simulated: Callable[[SimulatedGrid], None] = lambda simulated: None,
    scaled: ScaleToAllRows = lambda grid, simulation: simulation,
) -> SearchResult:
    """Find the candidate with the fewest seconds to compile and to run.

    Args:
      budget: The limits. Candidates that cannot be below its seconds are skipped, except that
        there is always a result.
      scaled: Scales a simulation to all rows, if the rows of `schedules` are a sample.

    Raises:
      NoPlanFits: No candidate is within the budget.
    """
    waiting = [_Waiting(candidate) for candidate in candidates]
    num_candidates = len(waiting)
    min_padding = min((one.candidate.padding for one in waiting), default=math.inf)
    best, num_simulated, min_simulated_padding = None, 0, math.inf
    while waiting and num_simulated < max_simulated:
        first = min(waiting, key=_Waiting.order)
        waiting.remove(first)
        candidate = first.candidate
        if candidate.padding > budget.padding or (
            best and candidate.bound >= min(best.seconds, budget.seconds)
        ):
            continue
        simulated = simulate_grid(candidate.grid, schedules, cost, budget, scaled)
        num_simulated += 1
        min_simulated_padding = min(min_simulated_padding, simulated.padding)
        on_simulated(simulated)
        pads_too_much = simulated.padding > budget.padding
        for other in waiting:
            other.learn(first, simulated.seconds)
            other.is_last |= pads_too_much and has_larger_calls(
                other.candidate.grid, candidate.grid
            )
        if not pads_too_much and (best is None or simulated.seconds < best.seconds):
            best = simulated
    if best is None:
        padding = min_simulated_padding if num_simulated else min_padding
        raise NoPlanFits(_nothing_fits(budget, padding, num_simulated))
    left = (one.candidate for one in waiting)
    bounds = [other.bound for other in left if other.padding <= budget.padding]
    better = [bound for bound in bounds if bound < best.seconds]
    return SearchResult(best, num_simulated, num_candidates, min(better, default=None))


@dataclass(eq=False)
class _Waiting:
    """A candidate that was not simulated, and what is known of similar ones."""

    candidate: Candidate
    ratio: float = 1.0
    """The ratio of simulated to expected seconds of the most similar grid that was simulated; 1
    without one."""
    num_equal: int = MIN_EQUAL
    """The number of properties in which it is equal to that grid; without one, the minimum."""
    is_last: bool = False
    """Whether it has larger calls than a grid that pads too much."""

    def __post_init__(self):
        self._properties = _properties(self.candidate.grid)

    def order(self) -> tuple[bool, float]:
        """The key by which candidates are simulated, smallest first."""
        return self.is_last, self.candidate.expected * self.ratio

    def learn(self, other: "_Waiting", seconds: float) -> None:
        """Take the ratio of another candidate, which was simulated, if none is more similar."""
        pairs = zip(self._properties, other._properties, strict=True)
        num_equal = sum(own == of_other for own, of_other in pairs)
        if num_equal >= self.num_equal:
            self.num_equal, self.ratio = num_equal, seconds / other.candidate.expected


def _properties(grid: BucketGrid) -> tuple[object, ...]:
    """The properties by which grids are similar."""
    batches = tuple(bucket.batch for bucket in grid.prefill)
    chunks = tuple(grid.chunks) or (None,)
    return grid.decode_slots, grid.max_length, len(chunks), chunks[0], chunks[-1], batches


def has_larger_calls(grid: BucketGrid, other: BucketGrid) -> bool:
    """Whether a grid has the prefill shapes of another grid, in calls that are no smaller."""
    is_alike = (grid.decode_slots, grid.max_length) == (other.decode_slots, other.max_length)
    shapes = [[(bucket.length, bucket.tokens) for bucket in g.prefill] for g in (grid, other)]
    if not is_alike or shapes[0] != shapes[1]:
        return False
    pairs = zip(grid.prefill, other.prefill, strict=True)
    return all(bucket.batch >= other_bucket.batch for bucket, other_bucket in pairs)


def _nothing_fits(budget: Budget, min_padding: float, num_simulated: int) -> str:
    if math.isinf(min_padding):
        return "no grid is within the budget of memory and graphs, with --chunks as given."
    return (
        f"expected a grid that computes at most {budget.padding:g} times the prompts' tokens, got "
        f"at least {min_padding:.4f} times, with {num_simulated} grids simulated. Allow more "
        f"padding, chunks, more prefill graphs or more tries."
    )


def simulate_grid(
    grid: BucketGrid,
    schedules: Schedules,
    cost: CostModel,
    budget: Budget,
    scaled: ScaleToAllRows = lambda grid, simulation: simulation,
) -> SimulatedGrid:
    """Simulate a grid, and predict the seconds to compile its graphs."""
    simulation = scaled(grid, schedules.of(grid).priced(grid, cost))
    return SimulatedGrid(grid, simulation, budget.graph_seconds.of_grid(grid))


def simulate_in_order(
    rows: Sequence[ExpectedRow],
    grid: BucketGrid,
    cost: CostModel | None,
    table: PrefixTable = NOTHING_SHARED,
) -> Simulation:
    """Simulate rows in the order in which a job submits them to the engine.

    Args:
      rows: The rows.
      grid: The grid.
      cost: Gives the seconds of calls; without it all calls take 0 seconds.
      table: What the prompts of the rows share.
    """
    return Schedules(rows, table).of(grid).priced(grid, cost)
