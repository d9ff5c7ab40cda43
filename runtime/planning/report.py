"""The report of a plan, for people and programs: report.json and report.html.

Every second is a prediction, and says what it waits for.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.planning.candidates import num_graphs
from ...compile.planning.cost import CostModel
from ...compile.planning.hardware import Hardware
from ...compile.planning.work import sent_by_axes
from ...sharding.call import Call
from ..engine.metrics import DecodeUse, PrefillUse
from ..files.disk import Disk, replace_file
from . import pictures
from .compiled_layouts import PlannedLayout
from .page import Picture, page

if TYPE_CHECKING:
    from .layout_ranking import RankedLayout
    from .predict import Prediction
    from .search import Tried


def basis(hardware: Hardware) -> str:
    """What uncalibrated predictions rest on."""
    assumed = hardware.source.startswith("assumed")
    return f"{'assumed' if assumed else 'published'} peaks, not calibrated"


def as_json(prediction: "Prediction") -> dict[str, Any]:
    """The same and more, as one JSON object."""
    workload, planned, cost = prediction.workload, prediction.planned, prediction.cost
    grid, work, layout = planned.best.grid, cost.work, prediction.plan.layout
    return {
        "plan": prediction.plan.to_toml(),
        "target": prediction.plan.target,
        "layout": layout and f"{layout.name} ({layout.mesh})",
        "limit": _limit(prediction),
        "workload": {
            "name": workload.name,
            "rows": len(workload.rows),
            "refused": workload.num_refused,
            "prompt_tokens": workload.prompt_tokens,
            "expected_output_tokens": workload.output_tokens,
        },
        "hardware": {"name": cost.hardware.name, **cost.hardware.to_table()},
        "calibration": cost.calibration and cost.calibration.to_json(),
        "basis": "a calibration" if cost.calibration else basis(cost.hardware),
        "predicted": _figures(planned.best),
        "sample": planned.error and {**asdict(planned.error), "error": str(planned.error)},
        "graphs": graphs(prediction),
        "comparison": {name: _figures(tried) for name, tried in planned.others.items()},
        "layouts": [_ranked(one) for one in prediction.layouts],
        "searched_layouts": _searched(prediction.searched),
        "memory_bytes": {
            "weights": work.parameter_bytes,
            "cache": work.grid_bytes(grid),
            "device": cost.hardware.memory_bytes,
        },
        "search": {
            "candidates": planned.search.candidates,
            "simulated": planned.search.tried,
            "gap": planned.search.gap,
            "seconds": prediction.seconds,
        },
    }


def graphs(prediction: "Prediction") -> list[dict[str, Any]]:
    """Every prefill and decode graph: use, and where the seconds of a call go."""
    best, cost = prediction.planned.best, prediction.cost
    grid, metrics = best.grid, best.simulation.metrics
    found = []
    for bucket, is_scored in product(grid.prefill, grid.prefill_kinds):
        kind = " scored" * is_scored
        use = metrics.prefill.get(f"{bucket}{kind}", PrefillUse())
        figures = _graph(f"prefill {bucket}{kind}", use, use.calls, use.real_tokens)
        call, name = (
            bucket.call(is_scored=is_scored),
            CompiledGraphs.prefill_name(bucket, is_scored),
        )
        found.append(figures | _estimate(cost, call) | _evidence(prediction, name))
    for span in grid.graph_spans:
        use = metrics.decode.get(str(span), DecodeUse())
        name, call = CompiledGraphs.decode_name(span), grid.decode_call(span)
        figures = _graph(name, use, use.steps, use.emitted_tokens)
        found.append(figures | _estimate(cost, call) | _evidence(prediction, name))
    return found


def _evidence(prediction: "Prediction", name: str) -> dict[str, Any]:
    """Evidence of the program of a graph, if that of the chosen layout was compiled."""
    calls = prediction.searched[0].compiled.values()
    call = next((call for call in calls if call.graph == name), None)
    if call is None:
        return {"compiled": None}
    found = {
        "bytes_moved": call.moved_bytes,
        "bytes_needed": call.needed_bytes,
        "loop_turns": call.loop_turns,
        "cycles": call.cycles,
        "converted_bytes": call.converted_bytes,
        "copied_bytes": call.copied_bytes,
        "seconds": call.seconds,
        "over_prediction": call.factor,
    }
    return {"compiled": found}


def _graph(name: str, use: PrefillUse | DecodeUse, calls: int, real_tokens: int) -> dict[str, Any]:
    return {
        "graph": name,
        "calls": calls,
        "real_tokens": real_tokens,
        "computed_tokens": use.computed_tokens,
        "total_seconds": use.seconds,
    }


def files_in(folder: Path) -> dict[str, Path]:
    """The files that `write` writes, by description."""
    return {"the report": folder / "report.json", "the page of it": folder / "report.html"}


def write(prediction: "Prediction", report: Mapping[str, Any], folder: Path) -> None:
    """Write report.json and report.html into a folder, from a prediction and its JSON."""
    content = page(report, _pictures(prediction, report))
    folder.mkdir(parents=True, exist_ok=True)
    disk = Disk()
    text = json.dumps(report, indent=1) + "\n"
    for path, part in zip(files_in(folder).values(), (text, content), strict=True):
        replace_file(disk, path, [part.encode()])


def _pictures(prediction: "Prediction", report: Mapping[str, Any]) -> list[Picture]:
    rows, grid = prediction.workload.rows, prediction.planned.best.grid
    hardware = prediction.cost.hardware
    return [
        Picture(
            "Rows and buckets",
            f"Where the workload's rows lie, and where the plan cuts them. {_padded(grid)}",
            pictures.workload(
                [row.need.prompt_length for row in rows],
                [row.output for row in rows],
                [bucket.length for bucket in grid.prefill],
            ),
        ),
        Picture(
            "Graphs under the roofline",
            "The line is what peaks allow. Under its slope a graph waits for memory, under its "
            "flat part for arithmetic; one far below it waits for the network, or is known from a "
            "calibration to be slower. What is above it was measured to be faster than its peaks.",
            pictures.roofline(
                report["graphs"], hardware.peak(prediction.plan.numbers.dtype), hardware.memory_rate
            ),
        ),
    ]


def _padded(grid: BucketGrid) -> str:
    """What the lines over the rows mean."""
    if not grid.chunks:
        return "A prompt is padded to the next line on its right."
    return (
        f"A prompt comes in pieces of {' and '.join(map(str, grid.chunks))} tokens, and is padded "
        f"by {grid.chunks[0] - 1} at most; a piece sees as much of its slot as the next line on "
        f"its right says."
    )


def _ranked(one: "RankedLayout") -> dict[str, Any]:
    return {
        "name": one.layout and one.layout.name,
        "mesh": one.layout and one.layout.mesh.sizes,
        "bound_of_sample": one.bound,
        "findings": list(one.findings),
    }


def _estimate(cost: CostModel, call: Call) -> dict[str, Any]:
    parts, estimate = cost.work.parts(call), cost.estimate(call)
    return {
        "flops": sum(part.flops for part in parts),
        "bytes": sum(part.bytes for part in parts),
        "sent_bytes": sent_by_axes(part.sent for part in parts),
        "seconds": estimate.seconds,
        "first_call_seconds": cost.first_call_seconds(call),
        "network_seconds": estimate.limits["network"],
        "by_part": dict(estimate.parts),
        "binds": estimate.binds,
    }


def _figures(tried: "Tried") -> dict[str, Any]:
    padding = tried.simulation.metrics.report()["padding"]
    prefill = tried.simulation.metrics.prefill.values()
    decode = tried.simulation.metrics.decode.values()
    computed = sum(use.computed_tokens for use in prefill)
    decoded = padding["computed_tokens"] - computed
    table = tried.grid.to_table()
    return {
        "prefill": table["prefill"],
        "chunk": table["chunk"],
        "decode_slots": tried.grid.decode_slots,
        "decode_spans": list(tried.grid.decode_spans),
        "decode_graphs": list(tried.grid.graph_spans),
        "graphs": num_graphs(tried.grid),
        "run_seconds": tried.simulation.seconds,
        "build_seconds": tried.build_seconds,
        "tail_seconds": tried.simulation.tail_seconds,
        "occupancy": tried.simulation.occupancy,
        "prefill_seconds": sum(use.seconds for use in prefill),
        "decode_seconds": sum(use.seconds for use in decode),
        "prefill_real_tokens": sum(use.real_tokens for use in prefill),
        "prefill_computed_tokens": computed,
        "prefill_padding": padding["prefill_padding_tokens"] / max(computed, 1),
        "idle_slots": padding["idle_slot_tokens"] / max(decoded, 1),
        **padding,
    }


def _limit(prediction: "Prediction") -> str:
    """The end of rows without max_tokens, if it is before the model's context."""
    if not (reason := prediction.plan.max_length_reason):
        return ""
    limit, context = prediction.plan.buckets.max_length, prediction.cost.work.config.max_position
    return f"rows without max_tokens end at {limit} tokens of {context}: {reason}"


def _searched(searched: Sequence[PlannedLayout]) -> list[dict[str, Any]]:
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
                    "difference": call.difference,
                }
                for phase, call in one.compiled.items()
            },
        }
        for one in searched
    ]
