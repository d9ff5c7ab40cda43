"""Write the report of a plan: report.json for programs, report.html for people.

All seconds are predictions; for each graph the report says what limits it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compile.graphs.graph_kinds import DECODE, GraphKey, call_of, kinds_of
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.planning.candidates import working_bytes
from ...compile.planning.work import sent_by_axes
from ...sharding.call import Call
from ..engine.metrics import DecodeUse, PrefillUse, prefill_name
from ..files.disk import Disk, replace_file
from .figures import grid_figures, layout_figures, search_figures
from .page import (
    Picture,
    draw_layouts,
    draw_memory,
    draw_roofline,
    draw_run,
    draw_workload,
    render_page,
)
from .simulator import Timeline
from .summary import held_pages

if TYPE_CHECKING:
    from .prediction import Prediction
    from .search import SimulatedGrid


def to_json(prediction: "Prediction") -> dict[str, Any]:
    """The content of report.json."""
    workload, result, cost = prediction.workload, prediction.result, prediction.cost
    grid, work, layout = result.best.grid, cost.work, prediction.plan.layout
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
        "evidence": prediction.evidence.to_table(),
        "predicted": grid_figures(result.best),
        "sample": result.uncertainty
        and {**asdict(result.uncertainty), "error": str(result.uncertainty)},
        "graphs": graphs(prediction),
        "shared_prefixes": result.best.simulation.metrics.shared_prefixes,
        "comparison": {name: grid_figures(simulated) for name, simulated in result.others.items()},
        "layouts": layout_figures(prediction.searched, prediction.refused),
        "choice": _choice(prediction),
        "held": _held(result.best),
        "memory_bytes": {
            "weights": work.parameter_bytes,
            "cache": work.grid_bytes(grid),
            "page": work.bytes_of_pages(grid.page, grid.window_pages)[0] if grid.page else None,
            "working": _working_bytes(prediction),
            "device": cost.hardware.memory_bytes,
        },
        "search": {
            **search_figures(prediction.searched, prediction.gap),
            "seconds": prediction.seconds,
        },
    }


def _choice(prediction: "Prediction") -> dict[str, Any] | None:
    """The planner's own grid beside a given plan: its seconds, and the keys that differ."""
    if (choice := prediction.choice) is None:
        return None
    given, own = prediction.result.best.grid.to_table(), choice.grid.to_table()
    differences = {key: [given.get(key), own[key]] for key in own if given.get(key) != own[key]}
    return {
        "run_seconds": choice.simulation.seconds,
        "seconds": choice.seconds,
        "differences": differences,
    }


def graphs(prediction: "Prediction") -> list[dict[str, Any]]:
    """The use of each prefill and decode graph, and the seconds of its calls by part."""
    best, cost = prediction.result.best, prediction.cost
    grid, metrics = best.grid, best.simulation.metrics
    entries = []
    for bucket, kind in product(grid.prefill, kinds_of(grid, PrefillBucket)):
        key = GraphKey(kind, bucket)
        is_scored = call_of(grid, key).is_scored
        name = prefill_name(bucket, is_scored=is_scored)
        use, call = metrics.prefill.get(name, PrefillUse()), None
        if grid.chunks and use.calls:
            read = use.read_entries / use.calls
            call = grid.prefill_call(bucket, is_scored=is_scored, entries=read)
        figures = _graph(f"prefill {name}", use, use.real_tokens)
        entries.append(figures | _estimate(prediction, key, call))
    if grid.decode_slots:
        use, step, steps = metrics.decode, None, float(grid.steps_per_call)
        if use.steps:
            step = grid.average_step(use.read_entries / use.steps, use.seen_entries / use.steps)
            # a call ends when no slot has a row any more
            steps = use.steps / use.calls
        figures = _graph(str(DECODE), use, use.emitted_tokens) | {"steps": use.steps}
        estimate = _of_steps(_estimate(prediction, DECODE, step), steps)
        estimate["seconds"] += cost.decode_call_seconds()
        entries.append(figures | estimate)
    return entries


def _of_steps(estimate: Mapping[str, Any], steps: float) -> dict[str, Any]:
    """The figures of a decode call from those of a step; those of its program stay."""
    names = ("flops", "bytes", "seconds", "network_seconds")
    tables = ("sent_bytes", "by_part")
    return {
        **estimate,
        **{name: steps * estimate[name] for name in names},
        **{table: {key: steps * x for key, x in estimate[table].items()} for table in tables},
    }


def _evidence(prediction: "Prediction", key: GraphKey) -> dict[str, Any]:
    """The figures of a graph's program, if the graph was compiled under the chosen layout."""
    calls = prediction.searched[0].compiled.values()
    call = next((call for call in calls if call.graph == key), None)
    figures = call and {
        "bytes_moved": call.moved_bytes,
        "bytes_needed": call.needed_bytes,
        "loop_turns": call.loop_turns,
        "cycles": call.cycles,
        "converted_bytes": call.converted_bytes,
        "copied_bytes": call.copied_bytes,
        "seconds": call.seconds,
        "over_prediction": call.factor,
    }
    return {"compiled": figures}


def _graph(name: str, use: PrefillUse | DecodeUse, real_tokens: int) -> dict[str, Any]:
    """The use of a graph."""
    return {
        "graph": name,
        "calls": use.calls,
        "real_tokens": real_tokens,
        "computed_tokens": use.computed_tokens,
        "total_seconds": use.seconds,
    }


def files_in(folder: Path) -> dict[str, Path]:
    """The files that `write` writes, by description."""
    return {"the report": folder / "report.json", "the page of the report": folder / "report.html"}


def write(prediction: "Prediction", report: Mapping[str, Any], folder: Path) -> None:
    """Write report.json and report.html into a folder, from a prediction and its JSON."""
    content = render_page(report, _pictures(prediction, report))
    folder.mkdir(parents=True, exist_ok=True)
    disk = Disk()
    text = json.dumps(report, indent=1) + "\n"
    for path, part in zip(files_in(folder).values(), (text, content), strict=True):
        replace_file(disk, path, [part.encode()])


def _pictures(prediction: "Prediction", report: Mapping[str, Any]) -> list[Picture]:
    rows, grid = prediction.workload.rows, prediction.result.best.grid
    hardware = prediction.cost.hardware
    return [
        *_picture_of_layouts(report),
        Picture(
            "Memory of a device by kind",
            "The working memory of graphs is that of compiled graphs (--compile-layouts), or "
            "estimated from shapes.",
            draw_memory(bytes_by_kind(grid, report)),
        ),
        _picture_of_run(prediction, report),
        Picture(
            "Rows and buckets",
            f"The lengths of the workload's rows, and those of the plan's graphs. {_padding(grid)}",
            draw_workload(
                [row.need.prompt_length for row in rows],
                [row.output for row in rows],
                [bucket.length for bucket in grid.prefill],
            ),
        ),
        Picture(
            "Graphs under the roofline",
            "The line is the limit that the peaks set. A graph under its slope waits for memory, "
            "a graph under its flat part for arithmetic. A graph far below the line waits for the "
            "network, or was measured to be slower by a calibration; a graph above the line was "
            "measured to be faster than the peaks.",
            draw_roofline(
                report["graphs"], hardware.peak(prediction.plan.numbers.dtype), hardware.memory_rate
            ),
        ),
    ]


def _picture_of_layouts(report: Mapping[str, Any]) -> list[Picture]:
    """The layouts with a plan, if there are several."""
    ranked = [layout for layout in report["layouts"] if layout["rank"] is not None]
    if len(ranked) < 2:
        return []
    caption = (
        "The seconds of the run under each layout's plan: reads of weights and of the cache, "
        "products, attention, and collectives by kind and mesh axes. Layouts are in the order of "
        "the seconds to compile and to run."
    )
    return [Picture("Layouts by cause of their seconds", caption, draw_layouts(ranked))]


def _picture_of_run(prediction: "Prediction", report: Mapping[str, Any]) -> Picture:
    best, sample = prediction.result.best, prediction.result.uncertainty
    timeline = Timeline.of(best.simulation.schedule, best.grid, prediction.cost)
    caption = (
        "What rows, prompts and shared prefixes hold during each call, and how the time is divided "
        "between prefill and decode."
    )
    if best.grid.pages is not None:
        caption += f" {held_pages(report).capitalize()}."
    if sample is not None:
        caption += f" The run is that of the {sample.rows} simulated rows."
    png = draw_run(timeline, best.grid.decode_slots, best.grid.pages)
    return Picture("The run in time", caption, png)


def _held(best: "SimulatedGrid") -> dict[str, int]:
    """The most that rows hold, and how often they wait and are replayed for lack of pages.

    Waits are counted once for each row and decode call.
    """
    held = [call.held for call in best.simulation.schedule.calls]
    pages = best.simulation.metrics.pages
    return {
        "slots": max(one.slots for one in held),
        "pages": max(one.pages for one in held),
        "waits": pages.waits,
        "replays": pages.replays,
    }


def _working_bytes(prediction: "Prediction") -> float:
    """The bytes that a graph needs beside weights and cache, at most: compiled, or estimated."""
    compiled = prediction.searched[0].compiled.values()
    work, grid = prediction.cost.work, prediction.result.best.grid
    if not compiled:
        return working_bytes(work, grid)
    largest = max(call.memory_bytes for call in compiled)
    return max(0.0, largest - work.parameter_bytes - work.grid_bytes(grid))


def bytes_by_kind(grid: BucketGrid, report: Mapping[str, Any]) -> dict[str, float]:
    """The bytes of a device by kind of memory."""
    memory = report["memory_bytes"]
    cache, working = memory["cache"], memory["working"]
    free = max(0.0, memory["device"] - memory["weights"] - cache - working)
    kinds = {"weights": memory["weights"], "working": working, "free": free}
    if grid.pages is None or grid.page is None:
        return {**kinds, "cache": cache}
    pool, held = (memory["page"] * n for n in (grid.pages, report["held"]["pages"]))
    # beside the pool, slots have pages for windows
    return {**kinds, "held": held, "unused": pool - held, "cache": cache - pool}


def _padding(grid: BucketGrid) -> str:
    """The meaning of the lines over the rows."""
    if not grid.chunks:
        return "A prompt is padded to the next line on its right."
    return (
        f"A prompt is prefilled in chunks of {' and '.join(map(str, grid.chunks))} tokens, and "
        f"padded by at most {grid.chunks[0] - 1}."
    )


def _estimate(prediction: "Prediction", key: GraphKey, call: Call | None = None) -> dict[str, Any]:
    """The predicted seconds of a graph's call with their causes, and the figures of its program.

    `call` is the shape of an average call; None if all calls are alike.
    """
    cost, call = prediction.cost, call or call_of(prediction.result.best.grid, key)
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
        **_evidence(prediction, key),
    }


def _limit(prediction: "Prediction") -> str:
    """The length at which rows without max_tokens end, if it is below the model's context."""
    if not (reason := prediction.plan.max_length_reason):
        return ""
    limit, context = prediction.plan.buckets.max_length, prediction.cost.work.config.max_position
    return f"rows without max_tokens end at {limit} tokens of {context}: {reason}"
