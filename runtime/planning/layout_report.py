"""Layouts in a plan's report: their plans in order, what compiling changed, and the trade-offs."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...compile.planning.work import sent_by_axes
from .compiled_layouts import PlannedLayout
from .tradeoffs import Tradeoff

MILLISECONDS, MEGABYTE, GIGABYTE = 1e-3, 1e6, 1e9
COLUMNS = (
    "layout", "predicted s", "as compiled s", "place before", "prefill, ms a call",
    "decode, ms a step", "MB sent in them", "needs GB",
)  # fmt: skip


def compiled_rows(searched: Sequence[PlannedLayout]) -> list[tuple[str, ...]]:
    """What compiling told of layouts, the best first; empty where none was compiled."""
    compiled = [one for one in searched if one.compiled or one.problem]
    before = sorted(compiled, key=lambda one: one.seconds)
    return [_row(one, before.index(one) + 1) for one in compiled]


def problems(searched: Sequence[PlannedLayout]) -> list[str]:
    """Why compiled layouts cannot run, a line each."""
    return [f"{one.name}: {one.problem}" for one in searched if one.problem]


def _row(one: PlannedLayout, place: int) -> tuple[str, ...]:
    calls = [one.compiled.get(phase) for phase in ("prefill", "decode")]
    known = [call for call in calls if call is not None]
    return (
        one.name,
        f"{one.seconds:.4g}",
        "cannot run" if one.problem else f"{one.compiled_seconds:.4g}",
        str(place),
        *("" if call is None else f"{call.seconds / MILLISECONDS:.1f}" for call in calls),
        " + ".join(f"{sum(call.sent.values()) / MEGABYTE:.1f}" for call in known),
        f"{max((call.memory_bytes for call in known), default=0) / GIGABYTE:.2f}",
    )


def searched_json(searched: Sequence[PlannedLayout]) -> list[dict[str, Any]]:
    """Layouts that have a plan, the best first."""
    return [
        {
            "name": one.layout and one.layout.name,
            "mesh": one.layout and one.layout.mesh.sizes,
            "grid": one.planned.best.grid.to_table(),
            "seconds": one.seconds,
            "compiled_seconds": one.compiled_seconds
            if one.compiled and math.isfinite(one.compiled_seconds)
            else None,
            "problem": one.problem,
            "compiled": {
                phase: {
                    **asdict(call),
                    "sent": sent_by_axes([call.sent]),
                    "factor": call.factor,
                }
                for phase, call in one.compiled.items()
            },
        }
        for one in searched
    ]


def tradeoffs_json(points: Sequence[Tradeoff]) -> list[dict[str, Any]]:
    """All points, those of the front marked."""
    return [{**asdict(one), "tokens_per_second_a_device": one.per_device} for one in points]
