"""The share of a finished job's time that a better plan would have saved, for one line at its end.

The rows that ran are simulated with their real lengths, on the job's grid and on the grids that
`noria plan --from-output` would try first. Both times are predictions of one cost model, so their
ratio says more than either.

Does not know about files. Guarantees: the search takes a small share of the seconds of the run, and
then ends with the best grid so far.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefix_table import PrefixTable
from ...compile.planning.candidates import Budget, Candidate, CandidateGrids
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.run_bounds import ExpectedRow
from ..errors import NoPlanFits
from .sample import longest_rows
from .search import Schedules, SimulatedGrid, find_best_grid, simulate_grid

MIN_RUN_SECONDS = 60.0
"""Seconds of a run below which nothing is said, as little can be saved."""
MIN_SHARE = 0.1
"""The share of a run that a better plan must save to be worth a line."""
SEARCH_SHARE = 0.02
"""The share of the run's seconds that the search may take, up to `MAX_SECONDS`."""
MAX_SECONDS = 6.0
MAX_ROWS = 400
"""The largest number of rows that are simulated."""
MAX_GRIDS = 6
"""The largest number of grids of whole prompts, and of chunks, that are simulated."""
MEMORY_SHARE = 0.9


class _OutOfTime(Exception):
    """The search has used its seconds."""


@dataclass(frozen=True)
class OtherGrids:
    """The grids that the planner would try first for the model of a job."""

    prices: GraphPrices
    """The costs of calls and graphs."""
    defaults: GridDefaults
    """The defaults of derived grids."""
    max_position: int
    """The longest sequence of the model."""

    @property
    def budget(self) -> Budget:
        """The memory of a grid, and the seconds of its graphs."""
        memory = MEMORY_SHARE * self.prices.cost.hardware.memory_bytes
        return Budget(memory_bytes=memory, graph_seconds=self.prices.build)

    def families(
        self, rows: Sequence[ExpectedRow], table: PrefixTable
    ) -> Iterator[Iterator[Candidate]]:
        """The grids for some rows: those of whole prompts, then those of chunks."""
        grids = CandidateGrids(
            rows, self.max_position, self.prices.cost, self.budget, self.defaults, table
        )
        yield grids.whole_prompt_candidates()
        yield grids.chunk_candidates()


def better_plan_note(
    grid: BucketGrid,
    rows: Sequence[ExpectedRow],
    table: PrefixTable,
    others: OtherGrids,
    run_seconds: float,
) -> str | None:
    """One line about a plan that saves much of a run; None for short runs and small shares.

    The arguments are those of `saved_share`, and the seconds of the run.
    """
    if run_seconds < MIN_RUN_SECONDS or not rows:
        return None
    search_seconds = min(SEARCH_SHARE * run_seconds, MAX_SECONDS)
    share = saved_share(grid, rows, table, others, search_seconds=search_seconds)
    if share < MIN_SHARE:
        return None
    return (
        f"a plan for the lengths of these rows is predicted to save {share:.0%} of the run, about "
        f"{share * run_seconds:.0f} s: noria plan --from-output makes it for the next such job"
    )


def saved_share(
    grid: BucketGrid,
    rows: Sequence[ExpectedRow],
    table: PrefixTable,
    others: OtherGrids,
    *,
    search_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """The share of a run's predicted seconds that the best grid found saves; 0 if none saves any.

    Args:
        grid: The grid of the job.
        rows: The rows that ran, with their real outputs.
        table: What their prompts share.
        others: The grids that may be better.
        search_seconds: Seconds after which the search ends.
        clock: The time in seconds.
    """
    step = -(-len(rows) // MAX_ROWS)
    taken = sorted({*range(0, len(rows), step), *longest_rows(rows)})
    sample, shared = [rows[row] for row in taken], table.of_rows(taken)
    schedules, cost, budget = Schedules(sample, shared), others.prices.cost, others.budget
    own = simulate_grid(grid, schedules, cost, budget).simulation.seconds
    found, deadline = [own], clock() + search_seconds

    def note(simulated: SimulatedGrid) -> None:
        found.append(simulated.simulation.seconds)
        if clock() > deadline:
            raise _OutOfTime

    with suppress(_OutOfTime):
        for family in others.families(sample, shared):
            candidates = list(takewhile(lambda _: clock() < deadline, family))
            with suppress(NoPlanFits):
                find_best_grid(candidates, schedules, cost, budget, MAX_GRIDS, note)
    return 1 - min(found) / own
