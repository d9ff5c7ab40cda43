"""Counts the rows of a job by outcome, and sums their figures.

Does not know how rows run or where they are stored.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..rows.results import CUT, STOPPED_SAMPLES, TEXTS_CUT, TOKENS_LEFT
from .job_runs import runs_of, sums_of_runs
from .journal import JournalRow

_BY_CODE = "errors_by_code"
_SAMPLES = (STOPPED_SAMPLES, TOKENS_LEFT)
_TOTALS = ("prompt_tokens", CUT, TEXTS_CUT, "output_tokens", *_SAMPLES, "compiles_during_run")
PERCENTILES = (50, 90, 95, 99)


def count_outcomes(codes: Iterable[str | None]) -> dict[str, Any]:
    """The numbers of rows by outcome, from the error code of every row; None is a result."""
    counts = Counter(codes)
    num_ok = counts.pop(None, 0)
    return {
        "total": num_ok + counts.total(),
        "ok": num_ok,
        "errors": counts.total(),
        _BY_CODE: {str(code): counts[code] for code in sorted(counts, key=str)},
    }


def add_outcomes(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of the row counts of several parts."""
    codes = sum((Counter(rows[_BY_CODE]) for rows in parts), Counter())
    by_code = dict(sorted(codes.items()))
    return {
        key: by_code if key == _BY_CODE else sum(rows[key] for rows in parts) for key in parts[0]
    }


def add_figures(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of tokens, runs and ignored keys over the manifests of parts or stages."""
    runs = [run for manifest in manifests for run in runs_of(manifest)]
    ignored = sum((Counter(m.get("ignored_keys", ())) for m in manifests), Counter())
    return {
        # parts of an earlier noria do not count cut texts
        **{key: sum(manifest.get(key, 0) for manifest in manifests) for key in _TOTALS},
        **sums_of_runs(runs),
        "ignored_keys": dict(ignored),
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
