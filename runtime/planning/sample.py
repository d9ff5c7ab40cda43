"""A sample of a workload, simulated in place of all rows where there are too many.

Rows are sorted by limit, sequences, scoring, and lengths of prompt and output. The middle one of
every group of neighbours is taken, so each stratum has its share. The rows that decide the lengths
of a plan are added. The seconds of the sample are scaled to all rows by the ratio of their bounds
(a ratio estimator: Cochran 1977, "Sampling Techniques", ch. 6). The bound of all rows counts every
one, so rare long rows have their weight though few are simulated. Seconds of the tail do not grow
with the rows.

The error is estimated from parts: every fourth row of the sample forms a part. It is twice the
largest relative difference between a part and the whole sample, for the chosen grid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.planning.candidates import Budget, CandidateGrids, ExpectedRow
from ...compile.planning.cost import CostModel
from .search import Tried, as_fed
from .simulator import Simulation, simulate

MOST_SIMULATED = 20_000
"""The largest number of rows that are all simulated."""
SEARCHED = 2_000
"""The number of sampled rows that rank grids, if there are more than `MOST_SIMULATED` rows."""
PREDICTED = 10_000
"""The number of sampled rows from which the chosen grid and its neighbours are predicted."""
PARTS = 4


@dataclass(frozen=True)
class SampleError:
    """The error of a prediction that is made from a sample."""

    rows: int
    """The number of rows that were simulated."""
    relative: float
    """The relative error of the seconds, up or down."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows simulated for all: seconds within {self.relative:.1%}, twice the "
            f"largest difference of {PARTS} parts of them"
        )


Bounds = Callable[[Sequence[ExpectedRow]], CandidateGrids]
"""A function from rows to the family of grids that has bounds for them."""


class Sample:
    """The rows of a workload that are simulated in place of all."""

    def __init__(self, every: Sequence[ExpectedRow], bounds: Bounds, budget: Budget, count: int):
        self.is_whole = len(every) <= MOST_SIMULATED
        self.rows = every if self.is_whole else _taken(every, len(every) / count)
        self._bounds, self._budget = bounds, budget
        if not self.is_whole:
            self._of_all, self._of_sample = bounds(every), bounds(self.rows)

    def scaled(self, grid: BucketGrid, found: Simulation) -> Simulation:
        """The simulation of the sample, scaled to all rows."""
        return found if self.is_whole else self._scaled(grid, found, self._of_sample)

    def error(self, best: Tried, cost: CostModel) -> SampleError | None:
        """The error of the prediction for a grid; None if all rows were simulated."""
        if self.is_whole:
            return None
        differences = []
        for i in range(PARTS):
            rows = [*self.rows[i::PARTS], *deciding(self.rows)]
            found = simulate(best.grid, as_fed(rows, best.grid), cost)
            seconds = self._scaled(best.grid, found, self._bounds(rows)).seconds
            differences.append(abs(seconds / best.simulation.seconds - 1))
        return SampleError(len(self.rows), 2 * max(differences))

    def _scaled(self, grid: BucketGrid, found: Simulation, of_part: CandidateGrids) -> Simulation:
        build = self._budget.build_seconds(grid)
        ratio = (self._of_all.bound(grid) - build) / (of_part.bound(grid) - build)
        growing = found.seconds - found.tail_seconds
        return found.scaled((growing * ratio + found.tail_seconds) / found.seconds)


def _taken(rows: Sequence[ExpectedRow], step: float) -> list[ExpectedRow]:
    """The middle row of every `step` neighbours, in the order of the module docstring.

    The result is in the order of the workload, in which rows of equal need are fed.
    """
    ordered = sorted(range(len(rows)), key=lambda row: _asked(rows[row]))
    middles = sorted(ordered[int(step * (i + 0.5))] for i in range(int(len(rows) / step)))
    return [*(rows[middle] for middle in middles), *deciding(rows)]


def _asked(row: ExpectedRow) -> tuple[int, ...]:
    need = row.need
    limit = -1 if need.max_tokens is None else need.max_tokens
    return limit, need.num_sequences, need.is_scored, need.prompt_length, row.output


def deciding(rows: Sequence[ExpectedRow]) -> list[ExpectedRow]:
    """The rows that decide the lengths of a plan."""
    return [
        max(rows, key=lambda row: row.limit(0)),
        max(rows, key=lambda row: row.need.prompt_length + row.output),
        max(rows, key=lambda row: row.need.prompt_length),
    ]
