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
from .sample import ROWS_TO_PREDICT, ROWS_TO_SEARCH, Sample, SampleUncertainty
from .search import MAX_SIMULATED_GRIDS, SearchResult, SimulatedGrid, find_best_grid, simulate_grid


@dataclass(frozen=True)
class PlanResult:
    """The chosen grid, and the grids that it is compared with."""

    search: SearchResult
    others: dict[str, SimulatedGrid]
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
    on_simulated: Callable[[SimulatedGrid], None] = lambda simulated: None
    table: PrefixTable = NOTHING_SHARED
    """The common beginnings of the rows."""
    may_group: bool = False
    """Whether groups of slots may share planned prefixes."""
    compared: Mapping[str, BucketGrid] = field(default_factory=dict)
    """Grids to compare with the best one, by name."""

    def plan(self) -> PlanResult:
        """Search for the best grid, and simulate the grids to compare with it."""
        search = self._search()
        whole = search.best.grid
        if self.may_group:
            search = self._with_prefixes(search)
        best = search.best.grid
        if not self._prediction_sample.is_whole:
            search = replace(search, best=self._simulate(best))
        prompts = np.array([row.need.prompt_length for row in self.rows])
        tokens = self.defaults.tokens_per_prefill
        compared = {**self.compared, **rule_based(whole, prompts, tokens, self.cost)}
        others = {name: self._simulate(grid) for name, grid in compared.items()}
        uncertainty = self._prediction_sample.uncertainty(search.best, self.cost)
        return PlanResult(search, others, uncertainty)

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
        return find_best_grid(
            candidates,
            self._search_sample.rows,
            self.cost,
            self.budget,
            self.max_simulated,
            self.on_simulated,
            self._search_sample.scaled,
            self._search_sample.table,
        )

    @cached_property
    def _search_sample(self) -> Sample:
        """The rows that rank the candidates."""
        return self._sample(ROWS_TO_SEARCH)

    @cached_property
    def _prediction_sample(self) -> Sample:
        """The rows from which the seconds and calls of a grid are predicted."""
        return self._sample(ROWS_TO_PREDICT)

    def _sample(self, count: int) -> Sample:
        return Sample(self.rows, self._grids, count, self.table)

    def _grids(self, rows: Sequence[ExpectedRow], table: PrefixTable) -> CandidateGrids:
        return CandidateGrids(rows, self.max_position, self.cost, self.budget, self.defaults, table)

    def _simulate(self, grid: BucketGrid) -> SimulatedGrid:
        sample = self._prediction_sample
        return simulate_grid(grid, sample.rows, self.cost, self.budget, sample.scaled, sample.table)
