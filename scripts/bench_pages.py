"""Plan workloads by the planner's simulator, beside the plans of caches without pages.

For each target and workload, `noria plan` makes a plan. The record has the predicted seconds of the
run, without builds, and its slots. Nothing runs and nothing is compiled: the seconds come from the
tables of hardware, where reads of pages are assumed. The figures of plans whose slots had places of
their own are kept from the record: noria made such plans before, and makes them no more. A run of
one target keeps the record of the others.

    nice python scripts/bench_pages.py benchmarks/workloads/*.csv --output benchmarks/pages
    nice python scripts/bench_pages.py benchmarks/workloads/*.csv --only gpu:h200:1 \\
        --output benchmarks/pages
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noria.runtime.checkpoint import open_model
from noria.runtime.devices.machine import describe_machine
from noria.runtime.errors import NoPlanFits
from noria.runtime.planning.plan_options import PlanOptions
from noria.runtime.planning.prediction import Prediction, predict

MODELS = Path("benchmarks/models")
PAGE = 64
CASES = (
    ("llama-3.1-8b", "gpu:h100:1"),
    ("llama-3.1-8b", "gpu:h200:1"),
    ("llama-3.1-8b", "tpu:v5e:2x4"),
    ("llama-3.1-8b", "tpu:v6e:2x2"),
    ("llama-3.1-70b", "tpu:v5e:4x4"),
)
"""The models and their targets."""
TRIES = 24
"""The largest number of grids that are simulated for a layout."""
HEAD = (
    "| workload | rows | s without | s with | without / with | slots without | with | "
    "tokens a slot without | pages | s of decode without | with | layout without | with |\n"
    "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|:--|:--|"
)


def main() -> None:
    """Make the plans of all cases, and write JSON and a page after each of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", metavar="TARGET", help="the only target to plan for")
    parser.add_argument("--tries", type=int, default=TRIES)
    options = parser.parse_args()
    path = options.output.with_suffix(".json")
    known = json.loads(path.read_text("utf-8"))["cases"] if path.is_file() else []
    found = {(one["target"], one["workload"]): one for one in known}
    for model, target in CASES:
        if options.only not in (None, target):
            continue
        for workload in options.workloads:
            before = found.get((target, workload.stem), {}).get("without", {})
            one = compare(model, target, workload, options.tries, before)
            found[target, workload.stem] = one
            print(f"{target}: {row(one)}", file=sys.stderr, flush=True)
            write(options.output, options.tries, list(found.values()))


def write(output: Path, tries: int, cases: Sequence[dict[str, Any]]) -> None:
    """Write the record and its page."""
    order = [target for _, target in CASES]
    cases = sorted(cases, key=lambda one: order.index(one["target"]))
    record = {"machine": describe_machine(), "tries": tries, "page": PAGE, "cases": cases}
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    output.with_suffix(".md").write_text(page_of(record), "utf-8")


def compare(
    model: str, target: str, workload: Path, tries: int, before: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of the plan of one workload, beside those of a plan without pages."""
    plan = planned(model, PlanOptions(workload, target, page=PAGE, tries=tries, quiet=True))
    case = {"model": model, "target": target, "workload": workload.stem}
    return {**case, "without": before, "with": plan}


def planned(model: str, options: PlanOptions) -> dict[str, Any]:
    """Return the figures of one plan, or the reason why there is none."""
    with open_model(str(MODELS / model), needs_weights=False) as files:
        try:
            return figures(predict(options, files))
        except NoPlanFits as error:
            return {"refused": str(error)}


def figures(prediction: Prediction) -> dict[str, Any]:
    """Return the figures of a plan that the table shows, and those that explain them."""
    best, plan = prediction.result.best, prediction.plan
    grid, metrics = plan.buckets, best.simulation.metrics
    return {
        "rows": len(prediction.workload.rows),
        "seconds": best.simulation.seconds,
        "decode_seconds": metrics.decode.seconds,
        "build_seconds": best.build_seconds,
        "occupancy": best.simulation.occupancy,
        "layout": plan.layout and f"{plan.layout.name} ({plan.layout.mesh})",
        "prefill": grid.to_table()["prefill"],
        "chunk": grid.to_table()["chunk"],
        "decode_slots": grid.decode_slots,
        "max_length": grid.max_length,
        "pages": grid.pages,
        "cache_bytes": prediction.cost.work.grid_bytes(grid),
        "evidence": prediction.evidence.costs,
        "gap": prediction.result.search.gap,
    }


def row(one: dict[str, Any]) -> str:
    """Return the line of a workload on a target."""
    without, paged = one["without"], one["with"]
    if not without:
        # no plan without pages was made
        nothing = ("seconds", "decode_slots", "max_length", "decode_seconds")
        without = {**paged, **dict.fromkeys(nothing, math.nan)}
    if refused := [plan["refused"] for plan in (without, paged) if "refused" in plan]:
        return f"| {one['workload']} | {' '.join(refused)} |"
    layouts = (plan["layout"] or "one device" for plan in (without, paged))
    return (
        f"| {one['workload']} | {without['rows']} | {without['seconds']:.1f} | "
        f"{paged['seconds']:.1f} | {without['seconds'] / paged['seconds']:.2f} | "
        f"{without['decode_slots']} | {paged['decode_slots']} | {without['max_length']} | "
        f"{paged['pages']} | {without['decode_seconds']:.1f} | {paged['decode_seconds']:.1f} | "
        f"{' | '.join(layouts)} |"
    )


def page_of(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    cases, machine = record["cases"], record["machine"]
    lines = [
        "# Plans without and with a cache of pages",
        "",
        "Predicted seconds of simulated runs, without builds; nothing ran. Made by "
        "`python scripts/bench_pages.py benchmarks/workloads/*.csv --output benchmarks/pages`",
        f"with jax {machine['versions']['jax']}, {record['tries']} grids simulated for each "
        f"layout, and pages of {record['page']} entries.",
        "",
        "`without`: every slot has a place for a row of the greatest length, or of one of several "
        "lengths; noria makes such plans",
        "no more, so these figures are of the record before. `with`: rows take pages as they grow. "
        "A step then costs the entries",
        "that its rows hold, in whole pages. The rate of these reads is assumed.",
    ]
    for model, target in dict.fromkeys((one["model"], one["target"]) for one in cases):
        own = [one for one in cases if (one["model"], one["target"]) == (model, target)]
        evidence = next((one["with"]["evidence"] for one in own if "evidence" in one["with"]), "")
        lines += [
            "",
            f"## {model} on {target}",
            "",
            *([f"Prices: {evidence}.", ""] * bool(evidence)),
        ]
        lines += [HEAD, *map(row, own)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
