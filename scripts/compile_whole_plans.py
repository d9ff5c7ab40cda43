"""Compile every graph of whole plans of published models, for hardware that is not present.

For each model and target, `noria plan` chooses a plan from `config.json` and a workload. Then the
target's compiler compiles its graphs one after the other. The record has the seconds and the memory
of each graph on a device. An impossible plan is recorded with the planner's reason. If a model fits
a target only in int8, the record also has the predicted tokens a second there, and on the smallest
slice that holds bfloat16. The record is written after each graph and each prediction, and a later
run continues it, so the script may be stopped at any time.

    nice python scripts/compile_whole_plans.py --output benchmarks/whole_plans

Processor seconds are the sum over all threads of the compiler: on two idle cores the elapsed time
is at least half of them.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import GraphSpec, compile_graph, plan_graphs
from noria.compile.expert_plan import LOSSLESS_EXPERTS
from noria.compile.program_cache import without_program_cache
from noria.compile.target_names import TargetName
from noria.compile.targets import find_target
from noria.runtime.checkpoint import ModelFiles, open_model
from noria.runtime.devices import backends
from noria.runtime.devices.machine import describe_machine
from noria.runtime.errors import NoPlanFits
from noria.runtime.planning.plan_options import PlanOptions
from noria.runtime.planning.prediction import Prediction, predict
from noria.sharding.legality import IllegalLayout

MODELS = Path("benchmarks/models")
WORKLOAD = Path("benchmarks/workloads/uniform-short.csv")
GIGABYTE = 1e9


@dataclass(frozen=True)
class Case:
    """One model on one target."""

    model: str
    target: str
    layout: str
    """Value of `noria plan --layout`: one or more layouts; the planner chooses the best."""
    prefill_graphs: int = 1
    """Upper bound of prefill graphs: with unrolled layers each compiles for minutes."""
    scan_layers: bool = True
    numbers: str = ""
    """The format of weights and cache, or empty for float."""

    @property
    def name(self) -> str:
        how = ", scanned" * self.scan_layers + f", {self.numbers}" * bool(self.numbers)
        return f"{self.model} on {self.target}{how}"


def dense(
    model: str,
    target: str,
    data: int,
    tensor: int,
    prefill_graphs: int = 1,
    scan_layers: bool = True,
) -> Case:
    """Return a case that splits weights over one mesh axis or two, whichever is faster."""
    one = f"weight-stationary-1d@tensor={data * tensor}"
    two = f"weight-stationary-2d@data={data},tensor={tensor}"
    return Case(model, target, f"{one} {two}", prefill_graphs, scan_layers)


def sparse(model: str, target: str, expert: int, tensor: int, scan_layers: bool = True) -> Case:
    """Return a case that splits experts over both mesh axes, and attention over one."""
    layout = f"expert-tensor@data=1,expert={expert},tensor={tensor}"
    return Case(model, target, layout, scan_layers=scan_layers)


UNROLLED = (
    dense("llama-3.1-8b", "tpu:v5e:2x4", 2, 4, 2, scan_layers=False),
    dense("llama-3.1-8b", "gpu:h100:8", 2, 4, 2, scan_layers=False),
    dense("llama-3.1-405b", "tpu:v5e:2x4", 2, 4, scan_layers=False),
    dense("llama-3.1-70b", "tpu:v5e:2x4", 2, 4, scan_layers=False),
    sparse("deepseek-v3", "gpu:h100:8", 2, 4, scan_layers=False),
    dense("llama-3.1-70b", "tpu:v6e:2x4", 2, 4, scan_layers=False),
    dense("llama-3.1-405b", "tpu:v5p:4x4x4", 8, 8, scan_layers=False),
    dense("llama-3.1-70b", "gpu:h100:8", 2, 4, scan_layers=False),
    dense("llama-3.1-70b", "tpu:v5e:4x4", 2, 8, scan_layers=False),
    dense("llama-3.1-405b", "tpu:v5e:16x16", 32, 8, scan_layers=False),
)
"""Cases with unrolled layers. The third to fifth are too large for their targets."""
SCANNED = (
    dense("llama-3.1-8b", "tpu:v5e:2x4", 2, 4, 2),
    dense("llama-3.1-8b", "gpu:h100:8", 2, 4, 2),
    sparse("qwen3-235b-a22b", "tpu:v5p:2x2x4", 4, 4),
    sparse("deepseek-v3", "tpu:v6e:16x16", 64, 4),
    dense("llama-3.1-405b", "tpu:v6e:8x8", 8, 8),
    dense("llama-3.1-70b", "tpu:v5p:2x2x2", 2, 4),
    sparse("qwen3-235b-a22b", "tpu:v5e:8x8", 16, 4),
    sparse("deepseek-v3", "tpu:v5p:4x4x8", 32, 4),
    sparse("deepseek-v3", "tpu:v5e:16x16", 64, 4),
    sparse("qwen3-235b-a22b", "tpu:v6e:4x8", 8, 4),
    sparse("qwen3-235b-a22b", "gpu:h100:8", 2, 4),
    dense("llama-3.1-405b", "tpu:v5e:16x16", 32, 8),
    dense("llama-3.1-405b", "gpu:h100:8", 2, 4),
    dense("llama-3.1-70b", "tpu:v5e:4x4", 2, 8),
    dense("llama-3.1-70b", "tpu:v6e:2x4", 2, 4),
    dense("llama-3.1-70b", "gpu:h100:8", 2, 4),
    dense("llama-3.1-405b", "tpu:v5p:4x4x4", 8, 8),
    dense("llama-3.1-70b", "tpu:v5e:8x16", 16, 8),
    dense("llama-3.1-8b", "tpu:v5p:2x2x2", 2, 4),
    dense("llama-3.1-8b", "tpu:v6e:2x4", 2, 4),
)
NARROW = tuple(
    replace(case, numbers="int8")
    for case in (
        dense("llama-3.1-70b", "tpu:v5e:2x4", 2, 4),
        dense("llama-3.1-405b", "gpu:h100:8", 2, 4),
        sparse("deepseek-v3", "tpu:v5e:16x16", 64, 4),
    )
)
"""Cases that do not fit in float."""
CASES = UNROLLED + SCANNED + NARROW
"""Cases for every model, hardware generation and slice size."""
LADDERS = {
    "llama-3.1-70b": ("tpu:v5e:2x4", "tpu:v5e:4x4"),
    "llama-3.1-405b": ("gpu:h100:8", "gpu:h100:16"),
    "deepseek-v3": ("tpu:v5e:8x8", "tpu:v5e:8x16", "tpu:v5e:16x16"),
}
"""Targets of models in int8 and bfloat16. The first one holds int8 alone; the second one is the
smallest slice that holds bfloat16."""
FORMATS = ("bfloat16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="path without .json and .md")
    parser.add_argument(
        "--only",
        default="",
        help="run only cases whose names contain this text; ', rates' for predictions alone",
    )
    options = parser.parse_args()
    # before jax starts: its CUDA plugin cannot start without a GPU
    backends.prepare_jax("cpu")
    path = options.output.with_suffix(".json")
    report: dict = json.loads(path.read_text("utf-8")) if path.exists() else {"cases": {}}
    command = f"python {sys.argv[0]} --output {options.output}"
    report |= {"command": command, "machine": describe_machine()}

    def keep() -> None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")

    with without_program_cache:
        for case in CASES:
            if options.only in case.name:
                measure(case, report["cases"].setdefault(case.name, {}), keep)
    for model in LADDERS:
        if options.only in f"{model}, rates":
            compare_formats(model, report.setdefault("formats", {}).setdefault(model, {}), keep)


def measure(case: Case, record: dict, keep) -> None:
    """Plan and compile one case, and write the record after each graph."""
    if record.get("is_done"):
        return
    with open_model(str(MODELS / case.model), needs_weights=False) as files:
        try:
            prediction = predict(plan_options(case), files)
        except (NoPlanFits, IllegalLayout) as error:
            record |= {"refused": " ".join(str(error).split()), "is_done": True}
            keep()
            return
        record |= facts(prediction)
        compile_all(case, files, prediction, record, keep)
    record["is_done"] = True
    keep()


def compare_formats(model: str, record: dict, keep) -> None:
    """Predict int8 and bfloat16 on each target."""
    for target in LADDERS[model]:
        for numbers in FORMATS:
            name = f"{target}, {numbers}"
            if name not in record:
                # of all named layouts over all meshes, the planner chooses the best
                case = Case(model, target, "", numbers="" if numbers == "bfloat16" else numbers)
                record[name] = rates(case)
                print(model, name, record[name], flush=True)
                keep()


def rates(case: Case) -> dict:
    """Return the predicted tokens a second of a job, or the planner's refusal."""
    with open_model(str(MODELS / case.model), needs_weights=False) as files:
        try:
            prediction = predict(plan_options(case), files)
        except (NoPlanFits, IllegalLayout):
            return {"refused": True}
    found = facts(prediction)
    seconds = prediction.result.best.simulation.seconds
    chips = TargetName.parse(case.target).num_devices
    return {
        **{key: found[key] for key in ("layout", "decode_slots", "weight_bytes", "cache_bytes")},
        "devices": chips,
        "run_seconds": round(seconds, 1),
        "tokens_per_second": round(prediction.workload.output_tokens / seconds),
    }


def plan_options(case: Case) -> PlanOptions:
    """Return the options of `noria plan` for a case."""
    return PlanOptions(
        WORKLOAD,
        case.target,
        layout=case.layout or None,
        weights=case.numbers or "float",
        cache=case.numbers or "float",
        chunks="never",
        scan_layers=case.scan_layers,
        max_prefill_graphs=case.prefill_graphs,
        quiet=True,
    )


def facts(prediction: Prediction) -> dict:
    """Return the plan and its predictions for the record."""
    plan, work = prediction.plan, prediction.cost.work
    grid = plan.buckets
    assert plan.layout is not None
    return {
        "layout": f"{plan.layout.name} ({plan.layout.mesh})",
        "prefill": grid.to_table()["prefill"],
        "decode_slots": grid.decode_slots,
        "max_length": grid.max_length,
        "planning_seconds": round(prediction.seconds, 1),
        "predicted_run_seconds": round(prediction.result.best.simulation.seconds, 1),
        "predicted_compile_seconds": round(prediction.result.best.build_seconds, 1),
        "weight_bytes": work.parameter_bytes,
        "cache_bytes": work.grid_bytes(grid),
        "device_bytes": prediction.cost.hardware.memory_bytes,
    }


def compile_all(case: Case, files: ModelFiles, prediction: Prediction, record: dict, keep) -> None:
    """Compile the plan's graphs that the record's `graphs` does not have yet, by name."""
    target, plan = find_target(case.target), prediction.plan
    placement = target.placement(plan.layout)
    config = files.spec.config
    options = plan.model.scan_layers, plan.numbers.cache_codes
    arrangement = placement.arrangement(config, *options)
    definition = AbstractModel(config, arrangement, plan.numbers.weight_rules)
    graphs = plan_graphs(
        definition,
        plan.buckets,
        placement,
        jnp.dtype(plan.numbers.dtype),
        plan.experts or LOSSLESS_EXPERTS,
    )
    done = record.setdefault("graphs", {})
    for graph in graphs:
        if (name := str(graph.key)) not in done:
            done[name] = compiled(graph)
            print(case.name, name, done[name], flush=True)
            keep()


def compiled(graph: GraphSpec) -> dict:
    """Compile one graph; return its seconds and bytes on a device, or the compiler's refusal."""
    started, cpu_started = time.monotonic(), time.process_time()
    try:
        executable, _ = compile_graph(graph)
    except RuntimeError as error:
        # a graph that does not fit a device is a result, not a failure
        return {"refused": str(error).strip().partition("\n")[0]}
    memory = executable.memory_analysis()
    assert memory is not None
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
        "temp_bytes": memory.temp_size_in_bytes,
        "all_bytes": kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
    }


def markdown(report: dict) -> str:
    """Return the record as a Markdown page."""
    machine, cases = report["machine"], report["cases"]
    done = {name: case for name, case in cases.items() if case.get("is_done")}
    lines = [
        "# Whole plans of published models, compiled for hardware that is not present",
        "",
        f"jax {machine['versions']['jax']}; bfloat16, or the format that a name ends with; the "
        f"workload is `{WORKLOAD}`.",
        f"Made by `{report['command']}`.",
        "`noria plan` chooses each plan, and the target's compiler compiles each graph. GB are "
        "those of one device: the compiler's peak while a graph runs.",
        "Minutes are processor time of all graphs and threads of the compiler. Scanned layers run "
        "in a loop over a repeated pattern; other layers are unrolled.",
        "",
        "| model and target | layout | prefill | slots x tokens | weights GB | cache GB | most GB "
        "| of GB | graphs | minutes |",
        "|:--|:--|:--|--:|--:|--:|--:|--:|--:|--:|",
        *(row(name, case) for name, case in done.items() if "graphs" in case),
        "",
        *format_lines(report.get("formats", {})),
        "## Refused",
        "",
        *(f"- {name}: {case['refused']}" for name, case in done.items() if "refused" in case),
        "",
        "## Every graph",
        "",
        "| model and target | graph | processor s | temporaries GB | all GB |",
        "|:--|:--|--:|--:|--:|",
        *(line for name, case in cases.items() for line in graph_rows(name, case)),
    ]
    return "\n".join(lines) + "\n"


def row(name: str, case: dict) -> str:
    """Return the line of a compiled plan."""
    graphs = {graph: one for graph, one in case["graphs"].items() if "refused" not in one}
    most = max(one["all_bytes"] for one in graphs.values())
    is_whole = len(graphs) == len(case["graphs"]) and most <= case["device_bytes"]
    cells = [
        name,
        case["layout"],
        " ".join(f"{length}x{rows}" for length, rows in case["prefill"]),
        f"{case['decode_slots']} x {case['max_length']}",
        gigabytes(case["weight_bytes"]),
        gigabytes(case["cache_bytes"]),
        gigabytes(most) + ("" if is_whole else ", does not fit"),
        gigabytes(case["device_bytes"]),
        str(len(graphs)),
        f"{sum(one['cpu_seconds'] for one in graphs.values()) / 60:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def format_lines(formats: dict) -> list[str]:
    """Return the table of predicted rates in int8 and in bfloat16."""
    header = "| model and target | weights and cache | layout | slots | tokens/s | a device |"
    return [
        "## Predicted rates in int8 and in bfloat16",
        "",
        "Output tokens a second of the whole job, prefill included, as `noria plan` predicts them "
        "from published peaks, with the best of all",
        "layouts. For each model: the smallest slice that holds int8, and the smallest one that "
        "holds bfloat16. 16 GPUs count as if one switch joined them. **Nothing was run.**",
        "",
        header,
        "|:--|:--|:--|--:|--:|--:|",
        *(
            rate_row(f"{model} on {target} | {numbers}", formats[model][f"{target}, {numbers}"])
            for model in formats
            for target in LADDERS[model]
            for numbers in FORMATS
            if f"{target}, {numbers}" in formats[model]
        ),
        "",
    ]


def rate_row(name: str, found: dict) -> str:
    """Return the line of a prediction."""
    if "refused" in found:
        return f"| {name} | does not fit | | | |"
    rate = found["tokens_per_second"]
    each = f"{rate:,} | {rate / found['devices']:.0f}"
    return f"| {name} | {found['layout']} | {found['decode_slots']} | {each} |"


def graph_rows(name: str, case: dict) -> list[str]:
    """Return the lines of a case's graphs that are compiled so far."""
    return [
        f"| {name} | {graph} | {found['refused']} | | |"
        if "refused" in found
        else f"| {name} | {graph} | {found['cpu_seconds']:.1f} | {gigabytes(found['temp_bytes'])} "
        f"| {gigabytes(found['all_bytes'])} |"
        for graph, found in case.get("graphs", {}).items()
    ]


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / GIGABYTE:.2f}"


if __name__ == "__main__":
    main()
