"""The progress of the search for a plan: a line for each grid, and a bound for the time left."""

import io
from dataclasses import dataclass

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.planning.planner import Planner, SearchProgress
from noria.runtime.planning.search import SimulatedGrid
from noria.runtime.planning.simulator import Simulation
from noria.runtime.progress.progress import LOG_SECONDS, Progress

GRID = BucketGrid(64, ((16, 2),), 4)
SIMULATED = SimulatedGrid(GRID, Simulation(), build_seconds=9.0)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class FakePlanner(Planner):
    """Simulates two grids of four that it may simulate, each with 10 rows for 6 seconds."""

    rows: tuple = ()
    max_position: int = 64
    cost: object = None
    budget: object = None
    defaults: object = None
    clock: Clock = None
    max_rows_simulated: int = 40

    def plan(self):
        for _ in range(2):
            self.clock.seconds += 6.0
            self.on_simulated(SIMULATED, 10)
        return "plan"


def shown(*, is_quiet: bool = False) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock, is_quiet=is_quiet)
    search = SearchProgress(progress)
    plans = [search.plan(FakePlanner(clock=clock), layouts_left=left) for left in (1, 0)]
    assert plans == ["plan", "plan"]
    search.finish()
    return stream.getvalue().splitlines()


def test_each_grid_has_a_line_and_the_time_left_is_that_of_the_rows_left():
    """A layout that ends early leaves less than expected: 20 rows instead of 30 and 40."""
    grid = "       9.0 s to compile and run: whole prompts 16x2, 4 slots"
    left = [0.6 * rows for rows in (30 + 40, 20 + 40, 30, 20)]
    lines = [
        line
        for i, seconds in enumerate(left, start=1)
        for line in (
            grid,
            f"search: {i} grid{'s' * (i > 1)} simulated  ETA at most 0:{seconds:02.0f}",
        )
    ]
    assert LOG_SECONDS < 6.0
    assert shown() == lines


def test_a_quiet_search_shows_nothing():
    assert shown(is_quiet=True) == []
