"""The order in which the rows of a job are fed to the engine: one that keeps the job's tail short.

Knows nothing of requests or devices. The simulator feeds a workload in the same order.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from ...compile.grids.bucket_grid import BucketGrid

RowLengths = tuple[int, int | None]
"""Tokens of a prompt, and the most that may follow."""


def submission_order(needs: Sequence[RowLengths], grid: BucketGrid | None = None) -> list[int]:
    """Indices of rows, longest need first; no limit counts as the longest.

    Where a grid has slots of several lengths, the rows of each length come evenly spread, so that
    neither long nor short slots are without rows before the job ends.
    """
    by_need = sorted(range(len(needs)), key=lambda row: _longest_first(*needs[row]))
    if grid is None or grid.span_slots is None:
        return by_need
    lanes: dict[int, list[int]] = defaultdict(list)
    for row in by_need:
        limit = min(grid.max_total_length(*needs[row]), grid.max_length)
        lanes[grid.capacity_for(limit)].append(row)
    place = {
        row: (number + 0.5) / len(lane)
        for lane in lanes.values()
        for number, row in enumerate(lane)
    }
    return sorted(by_need, key=place.__getitem__)


def _longest_first(prompt_length: int, max_tokens: int | None) -> float:
    return -math.inf if max_tokens is None else -(prompt_length + max_tokens)
