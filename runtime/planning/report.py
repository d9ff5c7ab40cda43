"""What a plan predicts, for people and programs: a summary, report.json, report.html.

Every second is a prediction, and says what it waits for.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compile.bucket_grid import BucketGrid
from ...compile.planning.candidates import num_graphs
from ...compile.planning.cost import CostModel
from ...compile.planning.hardware import Hardware
from ...compile.planning.work import sent_by_axes
from ...sharding.call import Call
from ..batch.disk import Disk, replace_file
from ..counted import counted
from . import pictures
from .layout_report import COLUMNS, compiled_rows, problems, searched_json, tradeoffs_json
from .page import COMPARISON, Picture, compared, page

if TYPE_CHECKING:
    from .layout_ranking import RankedLayout
    from .predict import Prediction
    from .search import Tried

GIGABYTE = 1e9


def summary(prediction: "Prediction") -> str:
    """A page for the terminal."""
    workload, best = prediction.workload, prediction.planned.best
    search, hardware = prediction.planned.search, prediction.cost.hardware
    calibrated = "calibrated" if prediction.cost.calibration else basis(hardware)
    lines = [
        f"workload   {workload.name}: {counted(len(workload.rows), 'row')}, "
        f"{counted(workload.prompt_tokens, 'prompt token')}, "
        f"{counted(workload.output_tokens, 'expected output token')}"
        f"{_refused(workload.num_refused)}",
        f"target     {prediction.plan.target} ({hardware.name}: {calibrated})",
        *_layout_lines(prediction),
        *_limit_lines(prediction),
        "",
        *_graph_lines(prediction),
        "",
        *_comparison_lines(prediction),
        "",
        *_compiled_layout_lines(prediction),
        f"predicted  {best.simulation.seconds:.1f} s to run and {best.build_seconds:.0f} s to "
        f"compile {counted(num_graphs(best.grid), 'graph')}{_slots(best)}",
        *_sample_lines(prediction),
        f"memory     {_gigabytes(prediction)}",
        *_compiled_lines(prediction),
        f"search     {search.tried} of {counted(search.candidates, 'grid')} simulated; none of the "
        f"others can be more than {search.gap:.1%} faster to build and run; "
        f"{prediction.seconds:.1f} s",
    ]
    return "\n".join(lines)


def _slots(best: "Tried") -> str:
    """How full the slots are, of a grid that has some."""
    if not best.grid.decode_slots:
        return ""
    simulation = best.simulation
    return f"; slots {simulation.occupancy:.1%} full, {simulation.tail_seconds:.1f} s of tail"


def _refused(count: int) -> str:
    return f"; left out: {counted(count, 'row')} that no plan can serve" if count else ""


def basis(hardware: Hardware) -> str:
    """What uncalibrated predictions rest on."""
    assumed = hardware.source.startswith("assumed")
    return f"{'assumed' if assumed else 'published'} peaks, not calibrated"


def as_json(prediction: "Prediction") -> dict[str, Any]:
    """The same and more, as one JSON object."""
    workload, planned, cost = prediction.workload, prediction.planned, prediction.cost
    grid, work = planned.best.grid, cost.work
    return {
        "plan": prediction.plan.to_toml(),
        "target": prediction.plan.target,
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
        "searched_layouts": searched_json(prediction.searched),
        "compiled_layouts": {
            "columns": COLUMNS,
            "rows": compiled_rows(prediction.searched),
            "problems": problems(prediction.searched),
        },
        "tradeoffs": tradeoffs_json(prediction.tradeoffs),
        "memory_bytes": {
            "weights": work.parameter_bytes,
            "cache": work.grid_bytes(grid),
            **_temporaries(prediction),
            "device": cost.hardware.memory_bytes,
        },
        "compiled": _compiled(prediction),
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
        use = metrics.prefill.get(f"{bucket}{kind}")
        found.append(
            {
                "graph": f"prefill {bucket}{kind}",
                "calls": use.calls if use else 0,
                "real_tokens": use.real_tokens if use else 0,
                "computed_tokens": use.computed_tokens if use else 0,
                "total_seconds": use.seconds if use else 0.0,
                **_estimate(cost, bucket.call(is_scored=is_scored)),
            }
        )
    for span in grid.decode_spans:
        use = metrics.decode.get(str(span))
        found.append(
            {
                "graph": f"decode span {span}",
                "calls": use.steps if use else 0,
                "real_tokens": use.emitted_tokens if use else 0,
                "computed_tokens": use.computed_tokens if use else 0,
                "total_seconds": use.seconds if use else 0.0,
                **_estimate(cost, grid.decode_call(span)),
            }
        )
    return found


def require_pictures() -> None:
    """Raise ImportError, with the remedy, before a plan is made whose report needs pictures."""
    pictures.matplotlib()


def files_in(folder: Path) -> dict[str, Path]:
    """The files that `write` writes, by description."""
    return {"the report": folder / "report.json", "the page of it": folder / "report.html"}


def write(prediction: "Prediction", folder: Path) -> None:
    """Write report.json and report.html into a folder."""
    report = as_json(prediction)
    content = page(report, _pictures(prediction, report))
    folder.mkdir(parents=True, exist_ok=True)
    disk = Disk()
    text = json.dumps(report, indent=1) + "\n"
    for path, part in zip(files_in(folder).values(), (text, content), strict=True):
        replace_file(disk, path, [part.encode()])


def _pictures(prediction: "Prediction", report: Mapping[str, Any]) -> list[Picture]:
    rows, grid = prediction.workload.rows, prediction.planned.best.grid
    hardware, memory = prediction.cost.hardware, dict(report["memory_bytes"])
    device = memory.pop("device")
    found = [
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
            "This plan and other grids",
            "Predicted seconds of the whole workload, compiling aside.",
            pictures.grids({"this plan": report["predicted"], **report["comparison"]}),
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
        Picture(
            "Memory on each device",
            "What lies there all the time; with the plan compiled, what its largest graph needs "
            "besides. The black line is what the device has.",
            pictures.memory(memory, device),
        ),
    ]
    if points := report["tradeoffs"]:
        found.append(
            Picture(
                "Layouts: latency against throughput",
                "Every point is a layout with a number of decode slots, which doubles along its "
                "line. Further left answers sooner, further up yields more for the same devices; "
                "ringed points, with their slots, are those that no other one beats in both.",
                pictures.tradeoffs(points),
            )
        )
    return found


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


def _graph_lines(prediction: "Prediction") -> list[str]:
    rows = [
        (
            "graph",
            "calls",
            "tokens real / computed",
            "predicted ms a call",
            "waits for",
            "predicted s",
        )
    ]
    for graph in graphs(prediction):
        rows.append(
            (
                graph["graph"],
                str(graph["calls"]),
                f"{graph['real_tokens']} / {graph['computed_tokens']}",
                f"{graph['seconds'] * 1e3:.1f}",
                graph["binds"],
                f"{graph['total_seconds']:.1f}",
            )
        )
    return _table(rows)


def _comparison_lines(prediction: "Prediction") -> list[str]:
    tried = {"this plan": prediction.planned.best, **prediction.planned.others}
    figures = {name: _figures(one) for name, one in tried.items()}
    return _table([COMPARISON, *compared(figures)])


def _layout_lines(prediction: "Prediction") -> list[str]:
    layout = prediction.plan.layout
    if layout is None:
        return []
    ranked = sum(one.bound is not None for one in prediction.layouts)
    of = f", the best of {ranked} that can be ranked" if ranked > 1 else ""
    return [f"layout     {layout.name} ({layout.mesh}){of}"]


def _sample_lines(prediction: "Prediction") -> list[str]:
    """A line with the error of the prediction, if a sample was simulated."""
    error = prediction.planned.error
    return [] if error is None else [f"sample     {error}"]


def _limit_lines(prediction: "Prediction") -> list[str]:
    """A line that says where rows without max_tokens end, if before the model's context."""
    if not (reason := prediction.plan.max_length_reason):
        return []
    limit, context = prediction.plan.buckets.max_length, prediction.cost.work.config.max_position
    return [f"limit      rows without max_tokens end at {limit} tokens of {context}: {reason}"]


def _temporaries(prediction: "Prediction") -> dict[str, int]:
    """What the largest compiled graph needs beside weights and cache, where one was compiled."""
    if prediction.compiled is None:
        return {}
    work, grid = prediction.cost.work, prediction.planned.best.grid
    largest = max(prediction.compiled.memory_bytes.values())
    return {"temporaries": max(0, largest - work.parameter_bytes - work.grid_bytes(grid))}


def _compiled_layout_lines(prediction: "Prediction") -> list[str]:
    """Layouts as compiling orders them, where that was asked for."""
    rows = compiled_rows(prediction.searched)
    return [*_table([COLUMNS, *rows]), *problems(prediction.searched), ""] if rows else []


def _compiled(prediction: "Prediction") -> dict[str, Any] | None:
    """What was measured by compiling the plan, by graph."""
    found = prediction.compiled
    if found is None:
        return None
    memory = found.memory_bytes
    return {
        "seconds": found.seconds,
        "graphs": {
            name: {"seconds": seconds, "bytes": memory[name]}
            for name, seconds in found.graph_seconds.items()
        },
    }


def _compiled_lines(prediction: "Prediction") -> list[str]:
    found, device = prediction.compiled, prediction.cost.hardware.memory_bytes
    if found is None:
        return []
    memory = found.memory_bytes
    largest = max(memory, key=lambda name: memory[name])
    needed = memory[largest]
    verdict = "fits" if needed <= device else f"{(needed - device) / GIGABYTE:.2f} GB too many"
    return [
        f"compiled   {counted(len(memory), 'graph')} in {found.seconds:.1f} s, small ones "
        f"included; {largest} needs {needed / GIGABYTE:.2f} GB on each device with all that it is "
        f"given: {verdict}"
    ]


def _gigabytes(prediction: "Prediction") -> str:
    cost, grid = prediction.cost, prediction.planned.best.grid
    parameters = cost.work.parameter_bytes / GIGABYTE
    cache = cost.work.grid_bytes(grid) / GIGABYTE
    return (
        f"weights {parameters:.2f} GB and cache {cache:.2f} GB of "
        f"{cost.hardware.memory_bytes / GIGABYTE:.1f} GB on each device"
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
