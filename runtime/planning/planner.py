"""Make the plan of a workload: search the family of grids, and compare the best grid with others.

Does not know about options or files. All seconds are predictions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefix_choice import with_prefixes
from ...compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from ...compile.planning.candidates import Budget, Candidate, CandidateGrids
from ...compile.planning.cost import CostModel
from ...compile.planning.other_grids import rule_based
from ...compile.planning.run_bounds import ExpectedRow
from ..console import plural
from ..errors import NoPlanFits
from ..progress.progress import Progress
from .sample import ROWS_TO_SIMULATE, Sample, SampleUncertainty, SimulatedRows
from .search import (
    MAX_SIMULATED_GRIDS,
    SearchResult,
    SimulatedGrid,
    find_best_grid,
    simulate_grid,
)


@dataclass(frozen=True)
class PlanResult:
    """The chosen grid, and the grids that it is compared with."""

    search: SearchResult
    whole: BucketGrid
    """The best grid without planned prefixes."""
    others: Mapping[str, SimulatedGrid] = field(default_factory=dict)
    """Other grids by name: the plan of an earlier run, and grids that follow a rule."""
    uncertainty: SampleUncertainty | None = None
    """The uncertainty of the best grid's seconds; None if all rows were simulated."""

    @property
    def best(self) -> SimulatedGrid:
        """The chosen grid."""
        return self.search.best


@dataclass(frozen=True)
class Planner:
    """Makes the plan of one workload under one cost model."""

    rows: Sequence[ExpectedRow]
    max_position: int
    cost: CostModel
    budget: Budget
    defaults: GridDefaults
    may_chunk: bool = True
    must_chunk: bool = False
    max_simulated: int = MAX_SIMULATED_GRIDS
    on_simulated: Callable[[SimulatedGrid, int], None] = lambda simulated, num_rows: None
    """Called with each simulated grid of the search, and with the number of simulated rows."""
    table: PrefixTable = NOTHING_SHARED
    """The common beginnings of the rows."""
    may_group: bool = False
    """Whether groups of slots may share planned prefixes."""
    compared: Mapping[str, BucketGrid] = field(default_factory=dict)
    """Grids to compare with the best one, by name."""
    candidates: Sequence[Candidate] | None = None
    """The candidate grids of the rows; None to make them."""
    simulated_rows: SimulatedRows | None = None
    """The rows to simulate, with their schedules, which planners of the same rows share."""

    def plan(self) -> PlanResult:
        """Search for the best grid."""
        search = self._refined(self._search())
        whole = search.best.grid
        if self.may_group:
            search = self._with_prefixes(search)
        return PlanResult(search, whole)

    def with_comparison(self, result: PlanResult) -> PlanResult:
        """The result with the grids to compare with the best one, and with its uncertainty."""
        by_rule = rule_based(result.whole, self.rows, self.defaults, self.cost)
        compared = {**self.compared, **by_rule}
        sample = self._sample
        others = {
            name: simulate_grid(grid, sample.schedules, self.cost, self.budget, sample.scaled)
            for name, grid in compared.items()
        }
        uncertainty = sample.uncertainty(result.best, self.cost)
        return replace(result, others=others, uncertainty=uncertainty)

    @property
    def max_rows_simulated(self) -> int:
        """The largest number of rows that `plan` simulates, those of each grid counted."""
        num_searches = 1 + (self.may_group and self.table.shares)
        return num_searches * self.max_simulated * len(self._sample.rows)

    def _search(self) -> SearchResult:
        candidates = self.candidates
        if candidates is None:
            candidates = self._grids(self.rows, self.table).candidates(
                may_chunk=self.may_chunk, must_chunk=self.must_chunk
            )
        return self._best_of(candidates, self.max_simulated, self.budget.seconds)

    def _refined(self, search: SearchResult) -> SearchResult:
        """The result of the search, or a faster grid near it; the tries that are left are used."""
        if search.best.seconds > self.budget.seconds:
            return search
        grids, tried = self._grids(self.rows, self.table), {search.best.grid}
        while (left := self.max_simulated - search.num_simulated) > 0:
            near = [
                candidate
                for candidate in grids.near(search.best.grid)
                if candidate.bound < search.best.seconds and candidate.grid not in tried
            ]
            tried |= {candidate.grid for candidate in near}
            if not near:
                break
            try:
                found = self._best_of(near, left, search.best.seconds)
            except NoPlanFits:
                break
            is_better = found.best.seconds < search.best.seconds
            search = search.joined(found)
            if not is_better:
                break
        return search

    def _best_of(
        self, candidates: Sequence[Candidate], max_simulated: int, limit: float
    ) -> SearchResult:
        """The best of some candidates for the rows of the sample."""
        sample = self._sample
        return find_best_grid(
            candidates,
            sample.schedules,
            self.cost,
            replace(self.budget, seconds=limit),
            max_simulated,
            lambda simulated: self.on_simulated(simulated, len(sample.rows)),
            sample.scaled,
        )

    def _with_prefixes(self, search: SearchResult) -> SearchResult:
        """The result of the search, or the same grid with planned prefixes if that is faster."""
        grid, sample, best = search.best.grid, self._sample, search.best
        prompts = np.array([row.need.prompt_length for row in self.rows])
        grouped = with_prefixes(grid, self.table, prompts)
        for other in grouped:
            simulated = simulate_grid(
                other, sample.schedules, self.cost, self.budget, sample.scaled
            )
            self.on_simulated(simulated, len(sample.rows))
            best = min(best, simulated, key=lambda simulated: simulated.seconds)
        num_tried = len(grouped)
        return replace(
            search,
            best=best,
            num_simulated=search.num_simulated + num_tried,
            num_candidates=search.num_candidates + num_tried,
        )

    @cached_property
    def _sample(self) -> Sample:
        simulated = self.simulated_rows
        if simulated is None or simulated.every is not self.rows:
            simulated = SimulatedRows(self.rows, ROWS_TO_SIMULATE, self.table)
        return Sample(simulated, self._grids)

    def _grids(self, rows: Sequence[ExpectedRow], table: PrefixTable) -> CandidateGrids:
        return CandidateGrids(rows, self.max_position, self.cost, self.budget, self.defaults, table)


class SearchProgress:
    """The progress of the search in several layouts.

    The search of a layout simulates a limited number of rows, so the time that is left has an upper
    bound at the rate so far.
    """

    def __init__(self, progress: Progress):
        self._progress = progress
        self._num_grids = 0
        self._num_rows = 0
        """The rows that were simulated so far, those of each grid counted."""
        self.note: Callable[[str], None] = progress.note
        self.finish: Callable[[], None] = progress.finish

    def plan(self, planner: Planner, layouts_left: int = 0) -> PlanResult:
        """The plan of the next layout, before those that are left; shows each simulated grid."""
        max_rows = planner.max_rows_simulated
        end = self._num_rows + max_rows

        def show(simulated: SimulatedGrid, num_rows: int) -> None:
            self._num_grids += 1
            self._num_rows += num_rows
            self.note(f"{simulated.seconds:10.1f} s to compile and run: {_short(simulated)}")
            left = max(0, end - self._num_rows) + layouts_left * max_rows
            self._progress.show_search(self._num_grids, self._num_rows, left)

        return replace(planner, on_simulated=show).plan()


def _short(simulated: SimulatedGrid) -> str:
    grid = simulated.grid
    pieces = "chunks" if grid.chunks else "whole prompts"
    return f"{pieces} {', '.join(map(str, grid.prefill))}, {plural(grid.decode_slots, 'slot')}"
