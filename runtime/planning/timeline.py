"""A simulated run in predicted time: its calls, and what rows hold during each of them.

Knows nothing of pictures. Guarantees: the calls follow each other without gaps, and what is held
is as the scheduler of the simulated run has it.
"""

from dataclasses import dataclass

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.planning.cost import CostModel
from .simulator import Schedule


@dataclass(frozen=True)
class Timeline:
    """The calls of a run, and what is held: during each call, and after the last one."""

    end_T: np.ndarray
    """The moments in seconds: 0, and the end of each call."""
    is_decode_C: np.ndarray
    """Whether a call is one of decode; others are of prefill."""
    slots_T: np.ndarray
    pages_T: np.ndarray
    """0 in a grid without pages."""
    waiting_T: np.ndarray
    """The rows that wait for pages in their slots."""

    @classmethod
    def of(cls, schedule: Schedule, grid: BucketGrid, cost: CostModel) -> "Timeline":
        """The timeline of a schedule; the arguments are those of `Schedule.priced`."""
        seconds_C = np.array(schedule.call_seconds(grid, cost))
        held = [*(call.held for call in schedule.calls), schedule.held_at_end]
        slots_T, pages_T, waiting_T = np.array(held).T
        end_T = np.concatenate([[0.0], np.cumsum(seconds_C)])
        is_decode_C = np.array([call.graph is None for call in schedule.calls], bool)
        return cls(end_T, is_decode_C, slots_T, pages_T, waiting_T)

    def share_of_decode(self, edge_N: np.ndarray) -> np.ndarray:
        """The share of decode in the seconds between each two neighbours of some moments."""
        seconds_C = np.where(self.is_decode_C, np.diff(self.end_T), 0.0)
        of_decode_T = np.concatenate([[0.0], np.cumsum(seconds_C)])
        return np.diff(np.interp(edge_N, self.end_T, of_decode_T)) / np.diff(edge_N)
