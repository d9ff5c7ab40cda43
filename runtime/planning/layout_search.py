"""Search plans under several layouts: the best ones exactly, one grid of each slower layout.

Layouts are searched in the order of their lower bounds. A layout whose bound is no less than the
seconds of the best ones so far cannot be among them: a single grid is simulated, so that it has
predicted seconds, too. Knows nothing of reports. All seconds are predictions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.planning.cost import CostModel
from ...sharding.layout import Layout
from ...sharding.legality import IllegalLayout
from ..errors import NoPlanFits
from ..plans.plan_checks import read_stored
from ..progress.progress import Progress
from .compiled_layouts import PlannedLayout
from .layout_ranking import RankedLayout, Ranking, suggest_fitting_plan
from .plan_options import PlanOptions
from .planner import Planner, SearchProgress
from .sample import ROWS_TO_SIMULATE, SimulatedRows
from .workload import Workload

NUM_BEST = 3
"""The number of layouts whose best plans are found; more if more are to be compiled."""
PLAN_OF_RUN = "plan of the run"


@dataclass(frozen=True)
class LayoutSearch:
    """Searches the plans of one workload under several layouts."""

    options: PlanOptions
    ranking: Ranking
    workload: Workload

    def plans(
        self, ranked: Sequence[RankedLayout]
    ) -> tuple[list[PlannedLayout], list[RankedLayout]]:
        """The layouts with their plans, the fastest first, and those without a plan.

        Raises:
          NoPlanFits: No layout has a plan; the message has the reasons.
        """
        fitting = [one for one in ranked if one.bound is not None]
        refused = [one for one in ranked if one.bound is None]
        if not fitting:
            reasons, remedy = "".join(map(str, ranked)), suggest_fitting_plan(self.ranking, ranked)
            raise NoPlanFits(f"no layout can serve this:{reasons}{remedy}")
        planned: list[PlannedLayout] = []
        progress = SearchProgress(Progress(is_quiet=self.options.quiet))
        for index, one in enumerate(fitting):
            if one.layout is not None:
                progress.note(f"{one.name}:")
            limit = self._limit(planned)
            left = sum((other.bound or 0.0) < limit for other in fitting[index + 1 :])
            try:
                planned.append(self._planned(one, limit, progress, left))
            except (NoPlanFits, IllegalLayout) as error:
                refused.append(replace(one, findings=(str(error),), candidates=()))
                progress.note(f"{one.name}: {error}")
        progress.finish()
        if not planned:
            reasons = (f"{one.name}: {' '.join(one.findings)}" for one in refused)
            raise NoPlanFits(f"no plan fits. {' '.join(reasons)}")
        return sorted(planned, key=lambda layout_plan: layout_plan.seconds), refused

    def planner(self, layout: Layout | None, cost: CostModel) -> Planner:
        """The planner of the workload under a layout."""
        options, ranking, workload = self.options, self.ranking, self.workload
        return Planner(
            workload.rows,
            ranking.config.max_position,
            cost,
            ranking.budget_under(cost),
            ranking.defaults(layout),
            may_chunk=ranking.may_chunk,
            must_chunk=ranking.must_chunk,
            max_simulated=options.tries,
            compared=_grids_of_run(workload),
            table=workload.prefixes,
            may_group=options.chunks != "always" and options.max_length is None,
            simulated_rows=self._simulated_rows,
        )

    @cached_property
    def _simulated_rows(self) -> SimulatedRows:
        return SimulatedRows(self.workload.rows, ROWS_TO_SIMULATE, self.workload.prefixes)

    def _limit(self, planned: Sequence[PlannedLayout]) -> float:
        """The seconds that a layout must be below to be one of the best."""
        num_best = max(NUM_BEST, self.options.compile_layouts)
        if len(planned) < num_best:
            return math.inf
        return sorted(one.seconds for one in planned)[num_best - 1]

    def _planned(
        self, ranked: RankedLayout, limit: float, progress: SearchProgress, layouts_left: int
    ) -> PlannedLayout:
        layout, cost = ranked.layout, ranked.cost
        assert cost is not None
        planner = self.planner(layout, cost)
        budget = replace(planner.budget, seconds=limit)
        planner = replace(planner, candidates=ranked.candidates, budget=budget)
        result = progress.plan(planner, layouts_left)
        self.ranking.require(layout, result.best.grid)
        return PlannedLayout(layout, cost, result, ranked.candidates)


def _grids_of_run(workload: Workload) -> dict[str, BucketGrid]:
    """The grid of the finished job whose output is given; empty without one.

    A grid with prefixes is left out, as a sample of the rows does not show all of them.
    """
    if workload.manifest is None:
        return {}
    grid = read_stored(workload.manifest["plan"]).buckets
    return {PLAN_OF_RUN: grid} if grid.prefixes is None else {}
