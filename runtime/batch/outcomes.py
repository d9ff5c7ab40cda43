"""Counts the rows of a job by outcome, and sums their figures.

Does not know how rows run or where they are stored.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .journal import JournalRow

_BY_CODE = "errors_by_code"
PERCENTILES = (50, 90, 95, 99)


def count_outcomes(
    codes: Iterable[str | None],
    *,
    num_kept: int,
    num_repeated: int,
    num_dropping: int,
    num_at_max_length: int,
    num_stopping: int,
) -> dict[str, Any]:
    """The numbers of rows by outcome.

    Args:
        codes: The error code of every row; None for a result.
        num_kept: Rows that earlier runs of the job finished.
        num_repeated: Rows that were answered with the output of an equal row.
        num_dropping: Rows with a result although expert choices were dropped.
        num_at_max_length: Rows without `max_tokens` that ended at the plan's `max_length`.
        num_stopping: Rows with samples that a rule stopped early.
    """
    counts = Counter(codes)
    num_ok = counts.pop(None, 0)
    return {
        "total": num_ok + counts.total(),
        "ok": num_ok,
        "errors": counts.total(),
        _BY_CODE: {str(code): counts[code] for code in sorted(counts, key=str)},
        "kept_from_earlier_runs": num_kept,
        "repeated": num_repeated,
        "ok_with_dropped_choices": num_dropping,
        "ok_at_max_length": num_at_max_length,
        "ok_with_stopped_samples": num_stopping,
    }


def add_outcomes(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of the row counts of several parts."""
    codes = sum((Counter(rows[_BY_CODE]) for rows in parts), Counter())
    by_code = dict(sorted(codes.items()))
    return {
        key: by_code if key == _BY_CODE else sum(rows[key] for rows in parts) for key in parts[0]
    }


def total(finished: Sequence[JournalRow], name: str) -> int:
    """The sum of a figure over rows; rows without it count as zero."""
    return int(sum(row.metrics.get(name, 0) for row in finished))


def spread(finished: Sequence[JournalRow], name: str) -> dict[str, float] | None:
    """Mean and percentiles of a figure over the rows that have it, from all runs of the job."""
    values = sorted(row.metrics[name] for row in finished if name in row.metrics)
    if not values:
        return None
    # nearest rank, so that every percentile is the figure of a row
    ranks = {f"p{p}": values[-(-p * len(values) // 100) - 1] for p in PERCENTILES}
    return {"mean": statistics.fmean(values), **ranks}
