"""The best grid of a family: candidates by their bounds, the most promising ones simulated.

Branch and bound (Land and Doig 1960): candidates are tried by growing bound, and once a bound is no
less than what the best schedule so far takes, none that is left can be better. Where that takes too
many tries the search ends early, and says by how much an untried one might be better.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ...compile.bucket_grid import BucketGrid
from ...compile.planning.candidates import Budget, Candidate, ExpectedRow
from ...compile.planning.cost import CostModel
from ..feeding import feeding_order
from .simulator import SimulatedRow, Simulation, simulate

MOST_TRIES = 24


@dataclass(frozen=True)
class Tried:
    """A grid whose schedule was simulated."""

    grid: BucketGrid
    simulation: Simulation
    build_seconds: float
    """Predicted, of compiling its graphs."""
    tokens: int | None = None
    """As its candidate has them."""

    @property
    def seconds(self) -> float:
        """Of building and running."""
        return self.build_seconds + self.simulation.seconds


@dataclass(frozen=True)
class Search:
    """What was tried, and what the rest can be at best."""

    best: Tried
    tried: int
    candidates: int
    least_bound: float | None
    """Seconds that a candidate which was not tried takes at least; None where all were, or where
    none of the rest can be better."""

    @property
    def gap(self) -> float:
        """By how much a grid of the family might be faster than the best one, at most."""
        if self.least_bound is None:
            return 0.0
        return max(0.0, 1 - self.least_bound / self.best.seconds)


def find_best(
    candidates: Iterable[Candidate],
    rows: Sequence[ExpectedRow],
    cost: CostModel,
    budget: Budget,
    most_tries: int = MOST_TRIES,
    on_try: Callable[[Tried], None] = lambda tried: None,
) -> Search | None:
    """The candidate whose building and running takes least; None without any candidate."""
    by_bound = sorted(candidates, key=lambda candidate: candidate.bound)
    best: Tried | None = None
    for number, candidate in enumerate(by_bound):
        is_hopeless = best is not None and candidate.bound >= best.seconds
        if best is not None and (is_hopeless or number == most_tries):
            bound = None if is_hopeless else candidate.bound
            return Search(best, number, len(by_bound), bound)
        tried = replace(try_grid(candidate.grid, rows, cost, budget), tokens=candidate.tokens)
        on_try(tried)
        if best is None or tried.seconds < best.seconds:
            best = tried
    return best and Search(best, len(by_bound), len(by_bound), None)


def try_grid(
    grid: BucketGrid, rows: Sequence[ExpectedRow], cost: CostModel, budget: Budget
) -> Tried:
    """Simulate one grid."""
    return Tried(grid, simulate(grid, as_fed(rows, grid), cost), budget.build_seconds(grid))


def as_fed(rows: Sequence[ExpectedRow], grid: BucketGrid) -> list[SimulatedRow]:
    """The rows in the order in which a job feeds them to the engine."""
    needs = [(row.need.prompt_length, row.need.max_tokens) for row in rows]
    ordered = (rows[i] for i in feeding_order(needs, grid))
    return [
        SimulatedRow(
            row.need.prompt_length,
            row.limit(grid.max_length),
            (row.output,) * (row.need.num_sequences if row.output else 0),
            row.ends_on_host,
            row.need.is_scored,
        )
        for row in ordered
    ]
