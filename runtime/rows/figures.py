"""The table of figures: what makes each figure of a manifest, and how those of parts combine.

A figure of rows is made from the figures of single rows, which the journal keeps, so a job that was
stopped counts rows of all its runs. Does not know about files or models.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

DROPPED = "dropped_expert_choices"
"""The key of the number of dropped expert choices, in output lines and in the journal."""
REPEATED = "repeated"
"""The key in a row's figures that says that the row got the output of another row."""
PERCENTILES = (50, 90, 95, 99)


class Figure(NamedTuple):
    """The entry of a figure."""

    name: str
    """Its key in the manifest; the table `rows` has the figures whose unit is rows."""
    unit: str
    over_rows: Literal["sum", "count", "spread"] | None = None
    """Whether it is the sum of a figure of rows, the number of rows that have one, or its mean and
    percentiles; None if it comes from runs or from the counters of the last run."""
    row_key: str = ""
    """The key of the figure of a row, if it is not its own key."""
    over_parts: Literal["sum", "runs", "stated"] = "sum"
    """Whether the figure of parts or stages is their sum, is made from all their runs, or is stated
    for each of them alone."""
    of_answer: Callable[[Mapping[str, Any], bool], float | None] | None = None
    """Reads the figure of a row from the body of its answer, and whether the row has a limit; None
    if the body does not show it."""
    shown: str = ""
    """The words after it in the line that sums up a job; empty if it is not shown there."""

    @property
    def zero(self) -> Any:
        """The figure of no rows."""
        return {} if self.unit == "rows by key" else 0


def _ends_at_max_length(body: Mapping[str, Any], has_limit: bool) -> float | None:
    reasons = [choice["finish_reason"] for choice in body.get("choices", ())]
    return None if has_limit else reasons.count("length") or None


FIGURES = (
    Figure("kept_from_earlier_runs", "rows"),
    Figure("repeated", "rows", "count", REPEATED),
    Figure(
        "ok_with_dropped_choices", "rows", "count", DROPPED,
        of_answer=lambda body, _: body.get("noria", {}).get(DROPPED),
        shown="with dropped choices of experts",
    ),
    Figure(
        "ok_at_max_length", "rows", "count", "at_max_length",
        of_answer=_ends_at_max_length,
        shown="without max_tokens ended at the plan's max_length",
    ),
    Figure(
        "ok_with_stopped_samples", "rows", "count", "stopped_samples",
        shown="with samples that stopped early",
    ),
    Figure("ignored_keys", "rows by key"),
    Figure("prompt_tokens", "tokens", "sum", of_answer=lambda x, _: x["usage"]["prompt_tokens"]),
    Figure(
        "output_tokens", "tokens", "sum",
        of_answer=lambda body, _: body["usage"].get("completion_tokens", 0),
    ),
    Figure("prompt_tokens_cut", "tokens", "sum"),
    Figure("texts_cut", "texts", "sum"),
    Figure("stopped_samples", "samples", "sum"),
    Figure("tokens_left", "tokens", "sum"),
    Figure("time_to_first_token_seconds", "seconds", "spread", "time_to_first_token", "stated"),
    Figure("inter_token_latency_seconds", "seconds", "spread", "inter_token_latency", "stated"),
    Figure("end_to_end_latency_seconds", "seconds", "spread", "latency", "stated"),
    Figure(
        "output_tokens_per_second_per_row", "tokens/s", "spread", "output_tokens_per_second",
        "stated",
    ),
    Figure("compiles_during_run", "programs"),
    Figure("generator", "counters of the last run", over_parts="stated"),
    Figure("bundle", "executables", over_parts="stated"),
    *(
        Figure(f"{name}_seconds", "seconds", over_parts="runs")
        for name in ("scan", "load", "build", "run", "wall", "elapsed")
    ),
    Figure("output_tokens_per_second", "tokens/s", over_parts="runs"),
    Figure("price", "of price_per_hour", over_parts="runs"),
)  # fmt: skip
OF_ROWS = tuple(figure for figure in FIGURES if figure.unit == "rows")
OTHERS = tuple(figure for figure in FIGURES if figure.unit != "rows")


def figures_over_rows(
    figures: Sequence[Figure], rows: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """The figures that are made from the figures of rows."""
    return {
        x.name: _OVER_ROWS[x.over_rows](rows, x.row_key or x.name) for x in figures if x.over_rows
    }


def figures_of_answer(body: Mapping[str, Any], *, has_limit: bool) -> dict[str, float]:
    """The figures of a row that the body of its answer shows; times are not among them."""
    if "usage" not in body:
        return {}
    read = ((x.row_key or x.name, x.of_answer and x.of_answer(body, has_limit)) for x in FIGURES)
    return {key: value for key, value in read if value is not None}


def add(values: Sequence[Any]) -> Any:
    """The sum of numbers, or the sums of tables of numbers."""
    if values and isinstance(values[0], Mapping):
        return dict(sorted(sum(map(Counter, values), Counter()).items()))
    return sum(values)


def _spread(rows: Sequence[Mapping[str, float]], key: str) -> dict[str, float] | None:
    """Mean and percentiles of a figure over the rows that have it."""
    values = sorted(row[key] for row in rows if key in row)
    if not values:
        return None
    # nearest rank, so that every percentile is the figure of a row
    ranks = {f"p{p}": values[-(-p * len(values) // 100) - 1] for p in PERCENTILES}
    return {"mean": statistics.fmean(values), **ranks}


_OVER_ROWS = {
    # rows without a figure count as zero
    "sum": lambda rows, key: int(sum(row.get(key, 0) for row in rows)),
    "count": lambda rows, key: sum(key in row for row in rows),
    "spread": _spread,
}
