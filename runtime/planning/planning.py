"""A plan for a workload: every grid of the family weighed, the best one held against others.

Knows nothing of options or files. Every second here is a prediction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...compile.bucket_grid import BucketGrid
from ...compile.default_grid import GridDefaults
from ...compile.planning.candidates import Budget, CandidateGrids, ExpectedRow
from ...compile.planning.compile_time import NO_TIME
from ...compile.planning.cost import CostModel
from ...compile.planning.other_grids import hand_picked
from .search import MOST_TRIES, Search, Tried, find_best, try_grid


@dataclass(frozen=True)
class Planned:
    """The grid that was chosen, and what stands beside it."""

    search: Search
    others: dict[str, Tried]
    """Hand-picked grids, and the best ones with a prefill graph more or fewer, by name."""

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
        longest = max(row.need.prompt_length for row in self.rows)
        tokens = self.defaults.tokens_per_prefill
        compared = {**self.compared, **hand_picked(best, longest, tokens)}
        others = {name: self._try(grid) for name, grid in compared.items()}
        if not best.chunks and search.best.tokens is not None:
            others |= self._neighbours(best, search.best.tokens)
        return Planned(search, others)

    def _search(self, budget: Budget, may_chunk: bool, must_chunk: bool) -> Search:
        grids = CandidateGrids(self.rows, self.max_position, self.cost, budget, self.defaults)
        candidates = [] if must_chunk else list(grids.of_whole_prompts())
        if may_chunk:
            candidates += grids.of_chunks()
        return find_best(candidates, self.rows, self.cost, budget, self.most_tries, self.on_try)

    def _neighbours(self, best: BucketGrid, tokens: int) -> dict[str, Tried]:
        """The best ladders of one prefill graph fewer and one more."""
        found = {}
        for name, change in (("one graph fewer", -1), ("one graph more", 1)):
            count = len(best.prefill) + change
            if count < 1:
                continue
            # a graph more is wanted here whatever it costs to build
            budget = replace(self.budget, prefill_graphs=count, graph_seconds=NO_TIME)
            grids = CandidateGrids(self.rows, self.max_position, self.cost, budget, self.defaults)
            prefill = grids.prefill_of(tokens)
            if len(prefill) == count:
                found[name] = self._try(replace(best, prefill=prefill))
        return found

    def _try(self, grid: BucketGrid) -> Tried:
        return try_grid(grid, self.rows, self.cost, self.budget)
