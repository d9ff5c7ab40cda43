"""Make the plan of a workload: search the family of grids, and compare the best grid with others.

Does not know about options or files. All seconds are predictions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from ...compile.planning.candidates import Budget, CandidateGrids
from ...compile.planning.cost import CostModel
from ...compile.planning.other_grids import rule_based
from ...compile.planning.run_bounds import Candidate, ExpectedRow
from ..errors import NoPlanFits
from .sample import ROWS_TO_PREDICT, ROWS_TO_SEARCH, Sample, SampleUncertainty, SimulatedRows
from .search import (
    MAX_SIMULATED_GRIDS,
    SearchResult,
    SimulatedGrid,
    find_best_grid,
    nothing_fits,
    simulate_grid,
)

MAX_FINALISTS = 4
"""The number of grids that are simulated with the rows of predictions, after a search with fewer
rows."""


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
    simulated_rows: dict[int, SimulatedRows] = field(default_factory=dict)
    """The rows that are simulated, by the number that is asked for.

    Planners of the same rows under other layouts may share them, with their schedules.
    """

    def plan(self) -> PlanResult:
        """Search for the best grid."""
        search = self._search()
        whole = search.best.grid
        if self.may_group:
            search = self._with_prefixes(search)
        return PlanResult(search, whole)

    def with_comparison(self, result: PlanResult) -> PlanResult:
        """The result with the grids to compare with the best one, and with its uncertainty."""
        prompts = np.array([row.need.prompt_length for row in self.rows])
        tokens = self.defaults.tokens_per_prefill
        compared = {**self.compared, **rule_based(result.whole, prompts, tokens, self.cost)}
        others = {name: self._predicted(grid) for name, grid in compared.items()}
        uncertainty = self._prediction_sample.uncertainty(result.best, self.cost)
        return replace(result, others=others, uncertainty=uncertainty)

    @property
    def max_rows_simulated(self) -> int:
        """The largest number of rows that `plan` simulates, those of each grid counted."""
        num_searches = 1 + (self.may_group and self.table.shares)
        num_rows = self.max_simulated * len(self._search_sample.rows)
        if not self._search_sample.is_whole:
            num_rows += MAX_FINALISTS * len(self._prediction_sample.rows)
        return num_searches * num_rows

    def _search(self) -> SearchResult:
        grids = self._grids(self.rows, self.table)
        candidates = [] if self.must_chunk else list(grids.whole_prompt_candidates())
        if self.may_chunk:
            candidates += grids.chunk_candidates()
        return self._fastest(candidates)

    def _with_prefixes(self, search: SearchResult) -> SearchResult:
        """The result of the search, or that of the search among grids with planned prefixes."""
        grids = self._grids(self.rows, self.table)
        candidates = list(grids.prefix_candidates(search.best.grid.decode_slots))
        try:
            grouped = self._fastest(candidates)
        except NoPlanFits:
            return search
        best = min(search, grouped, key=lambda result: result.best.seconds)
        return replace(
            best,
            num_simulated=search.num_simulated + grouped.num_simulated,
            num_candidates=search.num_candidates + grouped.num_candidates,
        )

    def _fastest(self, candidates: Sequence[Candidate]) -> SearchResult:
        sample = self._search_sample
        search = find_best_grid(
            candidates,
            sample.schedules,
            self.cost,
            self.budget,
            self.max_simulated,
            lambda simulated: self.on_simulated(simulated, len(sample.rows)),
            sample.scaled,
        )
        return search if sample.is_whole else self._with_finalists(search)

    def _with_finalists(self, search: SearchResult) -> SearchResult:
        """The result with the best of the first grids by the rows of predictions.

        The search ranked the grids by fewer rows, which may also pad less.
        """
        within: list[SimulatedGrid] = []
        paddings: list[float] = []
        for grid in search.ranked:
            if len(within) == MAX_FINALISTS:
                break
            simulated = self._predicted(grid)
            self.on_simulated(simulated, len(self._prediction_sample.rows))
            paddings.append(simulated.padding)
            if simulated.padding <= self.budget.padding:
                within.append(simulated)
        if not within:
            raise NoPlanFits(nothing_fits(self.budget, min(paddings), search.num_simulated))
        return replace(search, best=min(within, key=lambda simulated: simulated.seconds))

    @cached_property
    def _search_sample(self) -> Sample:
        """The rows that rank the candidates."""
        return self._sample(ROWS_TO_SEARCH)

    @cached_property
    def _prediction_sample(self) -> Sample:
        """The rows from which the seconds and calls of a grid are predicted."""
        return self._sample(ROWS_TO_PREDICT)

    def _sample(self, count: int) -> Sample:
        simulated = self.simulated_rows.get(count)
        if simulated is None or simulated.every is not self.rows:
            simulated = SimulatedRows(self.rows, count, self.table)
            self.simulated_rows[count] = simulated
        return Sample(simulated, self._grids)

    def _grids(self, rows: Sequence[ExpectedRow], table: PrefixTable) -> CandidateGrids:
        return CandidateGrids(rows, self.max_position, self.cost, self.budget, self.defaults, table)

    def _predicted(self, grid: BucketGrid) -> SimulatedGrid:
        sample = self._prediction_sample
        return simulate_grid(grid, sample.schedules, self.cost, self.budget, sample.scaled)
