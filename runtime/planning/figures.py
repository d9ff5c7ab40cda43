"""The figures of simulated grids and of layouts, as they stand in report.json.

All seconds are predictions.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...compile.graphs.graph_kinds import graph_keys
from ...compile.planning.candidates import working_bytes
from ...compile.planning.work import sent_by_axes
from .compiled_layouts import PlannedLayout

if TYPE_CHECKING:
    from .layout_ranking import RankedLayout
    from .search import SimulatedGrid


def grid_figures(simulated: "SimulatedGrid") -> dict[str, Any]:
    """The figures of a grid: its shapes, its seconds and its padding."""
    metrics = simulated.simulation.metrics
    padding, prefill = metrics.padding, metrics.prefill.values()
    computed = sum(use.computed_tokens for use in prefill)
    decoded = padding["computed_tokens"] - computed
    table = simulated.grid.to_table()
    return {
        "prefill": table["prefill"],
        "chunk": table["chunk"],
        "decode_slots": simulated.grid.decode_slots,
        "pages": simulated.grid.pages,
        "page": simulated.grid.page,
        "graphs": len(graph_keys(simulated.grid)),
        "run_seconds": simulated.simulation.seconds,
        "build_seconds": simulated.build_seconds,
        "tail_seconds": simulated.simulation.tail_seconds,
        "occupancy": simulated.simulation.occupancy,
        "prefill_seconds": sum(use.seconds for use in prefill),
        "decode_seconds": metrics.decode.seconds,
        "prefill_real_tokens": sum(use.real_tokens for use in prefill),
        "prefill_computed_tokens": computed,
        "prefill_padding": padding["prefill_padding_tokens"] / max(computed, 1),
        "idle_slots": padding["idle_slot_tokens"] / max(decoded, 1),
        **padding,
    }


def layout_figures(
    planned: Sequence[PlannedLayout], refused: Sequence["RankedLayout"]
) -> list[dict[str, Any]]:
    """The layouts in their order, those without a plan last."""
    ranked = [
        {"rank": rank, **_of_layout(one), "findings": []} for rank, one in enumerate(planned, 1)
    ]
    others = [{"rank": None, **_named(one), "findings": list(one.findings)} for one in refused]
    return ranked + others


def search_figures(planned: Sequence[PlannedLayout], gap: float) -> dict[str, Any]:
    """The size of a search, the sizes of slots and calls in it, and what the rest might save."""
    searches = [one.result.search for one in planned]
    grids = [candidate.grid for one in planned for candidate in one.candidates]
    buckets = {bucket for grid in grids for bucket in grid.prefill}
    sizes = {
        "slots": {grid.decode_slots for grid in grids if grid.decode_slots},
        "prompts_per_call": {bucket.batch for bucket in buckets if not bucket.chunk},
        "chunk": {bucket.chunk for bucket in buckets if bucket.chunk},
        "chunks_per_call": {bucket.batch for bucket in buckets if bucket.chunk},
    }
    return {
        "layouts": len(planned),
        "candidates": sum(one.num_candidates for one in searches),
        "simulated": sum(one.num_simulated for one in searches),
        "gap": gap,
        "sizes": {name: sorted(values) for name, values in sizes.items()},
    }


def _named(one: "PlannedLayout | RankedLayout") -> dict[str, Any]:
    return {"name": one.layout and one.layout.name, "mesh": one.layout and one.layout.mesh.sizes}


def _of_layout(planned: PlannedLayout) -> dict[str, Any]:
    """The figures of a layout under its plan."""
    best, work = planned.result.best, planned.cost.work
    causes = best.causes(planned.cost)
    return {
        **_named(planned),
        "seconds": best.seconds,
        "bound": planned.bound,
        **{key: grid_figures(best)[key] for key in _OF_GRID},
        "seconds_by_cause": causes,
        "binds": next(iter(causes)),
        "memory_bytes": {
            "weights": work.parameter_bytes,
            "cache": work.grid_bytes(best.grid),
            "working": working_bytes(work, best.grid),
        },
        "simulated": planned.result.search.num_simulated,
        "grid": best.grid.to_table(),
        "compiled_seconds": planned.compiled_seconds
        if planned.compiled and math.isfinite(planned.compiled_seconds)
        else None,
        "problem": planned.problem,
        "compiled": {
            phase: {
                **asdict(call),
                "graph": str(call.graph),
                "sent": sent_by_axes([call.sent]),
                "factor": call.factor,
                "difference": call.difference,
            }
            for phase, call in planned.compiled.items()
        },
    }


_OF_GRID = ("run_seconds", "build_seconds", "prefill_padding", "idle_slots")
