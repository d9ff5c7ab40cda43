"""Shows the grids that the search for a plan simulates, and how much time it may still take.

The search of a layout simulates a limited number of rows, so the time that is left has an upper
bound at the rate so far. Does not know how grids are chosen.
"""

from collections.abc import Callable
from dataclasses import replace

from ..console import plural
from ..progress.progress import Progress
from .planner import Planner, PlanResult
from .search import SimulatedGrid


class SearchProgress:
    """The progress of the search in several layouts."""

    def __init__(self, progress: Progress, num_layouts: int):
        self._progress = progress
        self._layouts_left = num_layouts
        """The layouts whose search has not begun."""
        self._num_grids = 0
        self._num_rows = 0
        """The rows that were simulated so far, those of each grid counted."""
        self.note: Callable[[str], None] = progress.note
        self.finish: Callable[[], None] = progress.finish

    def plan(self, planner: Planner) -> PlanResult:
        """The plan of the next layout; each simulated grid is shown."""
        self._layouts_left -= 1
        max_rows = planner.max_rows_simulated
        end = self._num_rows + max_rows

        def show(simulated: SimulatedGrid, num_rows: int) -> None:
            self._num_grids += 1
            self._num_rows += num_rows
            self.note(f"{simulated.seconds:10.1f} s to compile and run: {_short(simulated)}")
            left = max(0, end - self._num_rows) + self._layouts_left * max_rows
            self._progress.show_search(self._num_grids, self._num_rows, left)

        return replace(planner, on_simulated=show).plan()


def _short(simulated: SimulatedGrid) -> str:
    grid = simulated.grid
    pieces = "chunks" if grid.chunks else "whole prompts"
    return f"{pieces} {', '.join(map(str, grid.prefill))}, {plural(grid.decode_slots, 'slot')}"
