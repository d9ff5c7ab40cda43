"""The order in which a job submits its rows to the engine, chosen to keep the job's tail short.

Does not know about requests or devices. The simulator uses the same order.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from ...compile.grids.bucket_grid import BucketGrid

RowLengths = tuple[int, int | None]
"""The tokens of a prompt, and the maximum number of output tokens; None for no limit."""


def submission_order(rows: Sequence[RowLengths], grid: BucketGrid | None = None) -> list[int]:
    """Indices of rows, longest maximum length first; rows without a limit count as the longest.

    If the grid has slots of several capacities, the rows for each capacity are spread evenly over
    the job, so that neither long nor short slots run out of rows before its end.
    """
    longest_first = sorted(range(len(rows)), key=lambda row: _longest_first(*rows[row]))
    if grid is None or grid.span_slots is None:
        return longest_first
    rows_by_capacity: dict[int, list[int]] = defaultdict(list)
    for row in longest_first:
        max_total_length = min(grid.max_total_length(*rows[row]), grid.max_length)
        rows_by_capacity[grid.capacity_for(max_total_length)].append(row)
    position = {
        row: (number + 0.5) / len(equal_rows)
        for equal_rows in rows_by_capacity.values()
        for number, row in enumerate(equal_rows)
    }
    return sorted(longest_first, key=position.__getitem__)


def _longest_first(prompt_length: int, max_tokens: int | None) -> float:
    """The sort key of a row: its negative maximum length."""
    return -math.inf if max_tokens is None else -(prompt_length + max_tokens)
