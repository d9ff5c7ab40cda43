"""A plan for a workload: every grid of the family weighed, the best one held against others.

Knows nothing of options or files. Every second here is a prediction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.planning.candidates import Budget, CandidateGrids, ExpectedRow
from ...compile.planning.cost import CostModel
from ...compile.planning.other_grids import hand_picked
from .sample import PREDICTED, SEARCHED, Sample, SampleError
from .search import MOST_TRIES, Search, Tried, find_best, try_grid


@dataclass(frozen=True)
class Planned:
    """The grid that was chosen, and what stands beside it."""

    search: Search
    others: dict[str, Tried]
    """The plan of a run and hand-picked grids, by name."""
    error: SampleError | None = None
    """The error of the best seconds; None if all rows were simulated."""

    @property
    def best(self) -> Tried:
        return self.search.best


@dataclass(frozen=True)
class Planner:
    """Plans for one workload and cost model."""

    rows: Sequence[ExpectedRow]
    max_position: int
    cost: CostModel
    budget: Budget
    defaults: GridDefaults
    may_chunk: bool = True
    must_chunk: bool = False
    most_tries: int = MOST_TRIES
    on_try: Callable[[Tried], None] = lambda tried: None
    compared: Mapping[str, BucketGrid] = field(default_factory=dict)
    """Grids to hold the plan against, by name."""

    def plan(self) -> Planned:
        """Search, and compare."""
        search = self._search()
        best = search.best.grid
        if not self._predicted.is_whole:
            search = replace(search, best=self._try(best))
        longest = max(row.need.prompt_length for row in self.rows)
        tokens = self.defaults.tokens_per_prefill
        compared = {**self.compared, **hand_picked(best, longest, tokens)}
        others = {name: self._try(grid) for name, grid in compared.items()}
        return Planned(search, others, self._predicted.error(search.best, self.cost))

    def _search(self) -> Search:
        grids = self._grids(self.rows)
        candidates = [] if self.must_chunk else list(grids.of_whole_prompts())
        if self.may_chunk:
            candidates += grids.of_chunks()
        return find_best(
            candidates,
            self._searched.rows,
            self.cost,
            self.budget,
            self.most_tries,
            self.on_try,
            self._searched.scaled,
        )

    @cached_property
    def _searched(self) -> Sample:
        """The rows by which grids are ranked."""
        return self._sample(SEARCHED)

    @cached_property
    def _predicted(self) -> Sample:
        """The rows from which the figures of a grid are predicted."""
        return self._sample(PREDICTED)

    def _sample(self, count: int) -> Sample:
        return Sample(self.rows, self._grids, self.budget, count)

    def _grids(self, rows: Sequence[ExpectedRow]) -> CandidateGrids:
        return CandidateGrids(rows, self.max_position, self.cost, self.budget, self.defaults)

    def _try(self, grid: BucketGrid) -> Tried:
        sample = self._predicted
        return try_grid(grid, sample.rows, self.cost, self.budget, sample.scaled)
