"""A sample of a workload, simulated instead of all rows if there are too many.

Rows are sorted by limit, sequences, scoring, and lengths of prompt and output. The middle row of
every group of neighbours is taken, so each stratum has its share. The rows that decide the lengths
of a plan are added. The seconds of the sample are scaled to all rows by the ratio of their bounds
(a ratio estimator: Cochran 1977, "Sampling Techniques", ch. 6). The bound of all rows includes
rare long rows with their weight, though few of these are simulated. The seconds of the tail do not
grow with the number of rows. Counts of prefill are scaled by the tokens of all prompts over those
of the sample, and counts of decode by the tokens of outputs.

The uncertainty is estimated from parts: every fourth row of the sample forms a part. It is twice
the largest relative difference between a part and the whole sample, for the chosen grid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from ...compile.planning.candidates import CandidateGrids
from ...compile.planning.cost import CostModel
from ...compile.planning.run_bounds import ExpectedRow
from ..engine.metrics import Scale
from .search import Schedules, SimulatedGrid, simulate_in_order
from .simulator import Simulation

ROWS_TO_SIMULATE = 10_000
"""The number of sampled rows."""
MIN_RATIO = 2
"""A sample is taken of a workload with more than this many times its rows; else all rows are
simulated."""
NUM_PARTS = 4


@dataclass(frozen=True)
class SampleUncertainty:
    """The uncertainty of a prediction that is made from a sample."""

    rows: int
    """The number of rows that were simulated."""
    relative: float
    """The relative error of the seconds, up or down."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows simulated instead of all, and calls and tokens scaled: seconds "
            f"within {self.relative:.1%}, twice the largest difference between the sample and one "
            f"of its {NUM_PARTS} parts"
        )


Bounds = Callable[[Sequence[ExpectedRow], PrefixTable], CandidateGrids]
"""Makes the candidate grids and their bounds, from rows and what they share."""


class SimulatedRows:
    """The rows of a workload that are simulated: all of them, or a sample of about `count`.

    Attributes:
      every: All rows.
      is_whole: Whether all rows are simulated.
      rows: The simulated rows.
      table: What the prompts of the simulated rows share.
      schedules: Their schedules, which do not depend on layouts.
    """

    def __init__(
        self, every: Sequence[ExpectedRow], count: int, table: PrefixTable = NOTHING_SHARED
    ):
        self.every, self.every_table = every, table
        self.is_whole = len(every) <= MIN_RATIO * count
        self.rows, self.table = every, table
        if not self.is_whole:
            taken = _sampled(every, len(every) / count)
            self.rows, self.table = [every[row] for row in taken], table.of_rows(taken)
        self.schedules = Schedules(self.rows, self.table)


class Sample:
    """Simulated rows, whose seconds are scaled to all rows by the bounds under one layout."""

    def __init__(self, simulated: SimulatedRows, bounds: Bounds):
        self.is_whole, self.rows, self.table = simulated.is_whole, simulated.rows, simulated.table
        self.schedules = simulated.schedules
        self._bounds = bounds
        if not self.is_whole:
            self._all_bounds = bounds(simulated.every, simulated.every_table)
            self._sample_bounds = bounds(self.rows, self.table)
            of_all, of_sample = map(_num_tokens, (simulated.every, self.rows))
            self._prompts, self._outputs = (
                every / max(sampled, 1) for every, sampled in zip(of_all, of_sample, strict=True)
            )

    def scaled(self, grid: BucketGrid, simulation: Simulation) -> Simulation:
        """The simulation of the sample, scaled to all rows."""
        if self.is_whole:
            return simulation
        return self._scaled(grid, simulation, self._sample_bounds)

    def uncertainty(self, best: SimulatedGrid, cost: CostModel) -> SampleUncertainty | None:
        """The uncertainty of the prediction for a grid; None if all rows were simulated."""
        if self.is_whole:
            return None
        differences = []
        for i in range(NUM_PARTS):
            taken = [*range(i, len(self.rows), NUM_PARTS), *longest_rows(self.rows)]
            rows = [self.rows[row] for row in taken]
            table = self.table.of_rows(taken)
            simulation = simulate_in_order(rows, best.grid, cost, table)
            seconds = self._scaled(best.grid, simulation, self._bounds(rows, table)).seconds
            differences.append(abs(seconds / best.simulation.seconds - 1))
        return SampleUncertainty(len(self.rows), 2 * max(differences))

    def _scaled(
        self, grid: BucketGrid, simulation: Simulation, bounds: CandidateGrids
    ) -> Simulation:
        """A simulation, scaled to all rows; `bounds` has the bounds for the simulated rows."""
        ratio = self._all_bounds.run_seconds(grid) / bounds.run_seconds(grid)
        growing = simulation.seconds - simulation.tail_seconds
        seconds = (growing * ratio + simulation.tail_seconds) / simulation.seconds
        return simulation.scaled(Scale(seconds, self._prompts, self._outputs))


def _num_tokens(rows: Sequence[ExpectedRow]) -> tuple[int, int]:
    """The tokens of all prompts, and of all outputs."""
    outputs = sum(row.output * row.need.num_sequences for row in rows)
    return sum(row.need.prompt_length for row in rows), outputs


def _sampled(rows: Sequence[ExpectedRow], step: float) -> list[int]:
    """The middle row of every `step` neighbours, in the order of the module docstring.

    The rows are in the order of the workload, because rows of equal shape are submitted in it. The
    longest rows come last.
    """
    ordered = sorted(range(len(rows)), key=lambda row: _sort_key(rows[row]))
    middles = sorted(ordered[int(step * (i + 0.5))] for i in range(int(len(rows) / step)))
    return [*middles, *longest_rows(rows)]


def _sort_key(row: ExpectedRow) -> tuple[int, ...]:
    need = row.need
    limit = -1 if need.max_tokens is None else need.max_tokens
    return limit, need.num_sequences, need.is_scored, need.prompt_length, row.output


def longest_rows(rows: Sequence[ExpectedRow]) -> list[int]:
    """The rows that decide the lengths of a plan."""
    lengths = (
        lambda row: rows[row].limit(0),
        lambda row: rows[row].need.prompt_length + rows[row].output,
        lambda row: rows[row].need.prompt_length,
    )
    return [max(range(len(rows)), key=length) for length in lengths]
