"""The best grid of a family: the most promising candidates simulated, the others bounded.

Branch and bound (Land and Doig 1960): candidates are tried by growing expectation, and one whose
bound is no less than what the best schedule so far takes cannot be better. Where that leaves too
many to try the search ends early, and says by how much an untried one might be better.

A limit of padding is kept by what is simulated, dummy rows included: of the grids within it the
one that takes least is the best. Where one pads too much, those with larger calls come last.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.planning.candidates import Budget, Candidate, ExpectedRow
from ...compile.planning.cost import CostModel
from ...compile.planning.graph_prices import GraphPrices
from ..engine.feeding import feeding_order
from ..errors import NoPlanFits
from .simulator import SimulatedRow, Simulation, simulate

MOST_TRIES = 24
Scaled = Callable[[BucketGrid, Simulation], Simulation]


@dataclass(frozen=True)
class Tried:
    """A grid whose schedule was simulated."""

    grid: BucketGrid
    simulation: Simulation
    build_seconds: float
    """Predicted, of compiling its graphs."""

    @property
    def seconds(self) -> float:
        """Of building and running."""
        return self.build_seconds + self.simulation.seconds

    @property
    def padding(self) -> float:
        """Computed over real prompt tokens."""
        uses = self.simulation.metrics.prefill.values()
        return sum(use.computed_tokens for use in uses) / sum(use.real_tokens for use in uses)


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
    scaled: Scaled = lambda grid, found: found,
) -> Search:
    """The candidate with the least build and run time; raises NoPlanFits if there is none.

    `scaled` scales the result of a sample to all rows.
    """
    every = list(candidates)
    left = deque(sorted(every, key=lambda one: one.expected))
    least_padding = min((one.padding for one in every), default=math.inf)
    best, tried, nearest = None, 0, math.inf
    while left and tried < most_tries:
        candidate = left.popleft()
        if candidate.padding > budget.padding or (best and candidate.bound >= best.seconds):
            continue
        found = try_grid(candidate.grid, rows, cost, budget, scaled)
        tried, nearest = tried + 1, min(nearest, found.padding)
        on_try(found)
        if found.padding > budget.padding:
            left = deque(sorted(left, key=lambda one: calls_are_larger(one.grid, candidate.grid)))
        elif best is None or found.seconds < best.seconds:
            best = found
    if best is None:
        raise NoPlanFits(_nothing_fits(budget, nearest if tried else least_padding, tried))
    bounds = [one.bound for one in left if one.padding <= budget.padding]
    better = [bound for bound in bounds if bound < best.seconds]
    return Search(best, tried, len(every), min(better, default=None))


def calls_are_larger(grid: BucketGrid, other: BucketGrid) -> bool:
    """Whether a grid has the other one's prefill shapes with calls that are no smaller."""
    is_alike = (grid.decode_slots, grid.decode_spans) == (other.decode_slots, other.decode_spans)
    shapes = [[(bucket.length, bucket.tokens) for bucket in one.prefill] for one in (grid, other)]
    if not is_alike or shapes[0] != shapes[1]:
        return False
    pairs = zip(grid.prefill, other.prefill, strict=True)
    return all(bucket.batch >= than.batch for bucket, than in pairs)


def _nothing_fits(budget: Budget, nearest: float, tried: int) -> str:
    if math.isinf(nearest):
        return "no grid is within the budget of memory and graphs, or in chunks as asked."
    return (
        f"expected a grid that computes at most {budget.padding:g} times the prompts' tokens, got "
        f"{nearest:.4f} of the nearest, where {tried} could be tried. Allow more padding, chunks, "
        f"more prefill graphs or more tries."
    )


def try_grid(
    grid: BucketGrid,
    rows: Sequence[ExpectedRow],
    cost: CostModel,
    budget: Budget,
    scaled: Scaled = lambda grid, found: found,
) -> Tried:
    """Simulate one grid, without the decode graphs that save too little in its schedule."""
    fed = as_fed(rows, grid)
    found = scaled(grid, simulate(grid, fed, cost))
    steps = {int(span): use.steps for span, use in found.metrics.decode.items()}
    kept = GraphPrices(cost, budget.graph_seconds).without_idle_spans(grid, steps)
    if kept != grid:
        found = scaled(kept, simulate(kept, fed, cost))
    return Tried(kept, found, budget.build_seconds(kept))


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
