"""A plan for a workload: every grid of the family weighed, the best one held against others.

Knows nothing of options or files. Every second here is a prediction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from ...compile.bucket_grid import BucketGrid
from ...compile.grid_defaults import GridDefaults
from ...compile.planning.candidates import Budget, CandidateGrids, ExpectedRow
from ...compile.planning.compile_time import NO_TIME
from ...compile.planning.cost import CostModel
from ...compile.planning.other_grids import hand_picked
from .sample import PREDICTED, SEARCHED, Sample, SampleError
from .search import MOST_TRIES, Search, Tried, find_best, try_grid


@dataclass(frozen=True)
class Planned:
    """The grid that was chosen, and what stands beside it."""

    search: Search
    others: dict[str, Tried]
    """Hand-picked grids, and the best ones with a prefill graph more or fewer, by name."""
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
        search = self._search(self.budget, self.may_chunk, self.must_chunk)
        best = search.best.grid
        if not self._predicted.is_whole:
            search = replace(search, best=replace(self._try(best), tokens=search.best.tokens))
        longest = max(row.need.prompt_length for row in self.rows)
        tokens = self.defaults.tokens_per_prefill
        compared = {**self.compared, **hand_picked(best, longest, tokens)}
        others = {name: self._try(grid) for name, grid in compared.items()}
        if not best.chunks and search.best.tokens is not None:
            others |= self._neighbours(best, search.best.tokens)
        return Planned(search, others, self._predicted.error(search.best, self.cost))

    def _search(self, budget: Budget, may_chunk: bool, must_chunk: bool) -> Search:
        grids = self._grids(budget, self.rows)
        candidates = [] if must_chunk else list(grids.of_whole_prompts())
        if may_chunk:
            candidates += grids.of_chunks()
        return find_best(
            candidates,
            self._searched.rows,
            self.cost,
            budget,
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
        return Sample(self.rows, partial(self._grids, self.budget), self.budget, count)

    def _grids(self, budget: Budget, rows: Sequence[ExpectedRow]) -> CandidateGrids:
        return CandidateGrids(rows, self.max_position, self.cost, budget, self.defaults)

    def _neighbours(self, best: BucketGrid, tokens: int) -> dict[str, Tried]:
        """The best ladders of one prefill graph fewer and one more."""
        found = {}
        for name, change in (("one graph fewer", -1), ("one graph more", 1)):
            count = len(best.prefill) + change
            if count < 1:
                continue
            # a graph more is wanted here whatever it costs to build
            budget = replace(self.budget, prefill_graphs=count, graph_seconds=NO_TIME)
            grids = self._grids(budget, self.rows)
            prefill = grids.prefill_of(tokens, best.decode_slots)
            if len(prefill) == count:
                found[name] = self._try(replace(best, prefill=prefill))
        return found

    def _try(self, grid: BucketGrid) -> Tried:
        sample = self._predicted
        return try_grid(grid, sample.rows, self.cost, self.budget, sample.scaled)
