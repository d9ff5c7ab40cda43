"""Compare predicted with measured seconds, of graph calls and of whole runs, on the CPU.

Runs jobs that the calibration has not seen, each under several plans. Compares their manifests with
the cost model and the simulator, given the actual lengths of the outputs. The plans alternate, as
the speed of a machine drifts; seconds are medians over the rounds.

Example: noria bench --model smollm2 --calibration build/cpu.json
         python scripts/check_predictions.py build/cpu.json --work-dir build/predictions \
             --output benchmarks/predictions
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.default_grid import derive_grid
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.hardware.hardware import hardware_of
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.planning.cost import Calibration, CostModel
from noria.compile.planning.other_grids import powers_of_two, with_lengths
from noria.compile.planning.work import Work
from noria.runtime.checkpoint import open_model
from noria.runtime.devices.machine import describe_machine
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.planning.search import simulate_in_order
from noria.runtime.planning.workload import read_workload

MODEL = "smollm2"
PROMPTS = Path("benchmarks/workloads/peers64.jsonl")
COMMAND = "import sys; from noria.runtime.cli import main; sys.exit(main())"


def main() -> None:
    """Run every job under every plan, and write the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    calibration = Calibration.from_json(json.loads(options.calibration.read_text("utf-8")))
    jobs = [
        PROMPTS,
        write_job(options.work_dir / "mixed.jsonl", rows=48, longest=700, seed=1),
    ]
    plans = [(job, name, grid) for job in jobs for name, grid in grids(job).items()]
    turns = [
        [compare(*plan, calibration, options.work_dir) for plan in plans]
        for _ in range(options.turns)
    ]
    found = [over_turns(runs) for runs in zip(*turns, strict=True)]
    report = {"calibration": calibration.to_json(), "machine": describe_machine(), "runs": found}
    options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    options.output.with_suffix(".md").write_text(markdown(report), "utf-8")
    print(markdown(report))


def write_job(path: Path, *, rows: int, longest: int, seed: int) -> Path:
    """Write a job with random prompt ids, prompt lengths and output lengths."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            prompt = [rng.randrange(1000, 40000) for _ in range(rng.randint(8, longest))]
            body = {"prompt": prompt, "max_tokens": rng.randint(8, 96), "temperature": 0}
            file.write(json.dumps(body) + "\n")
    return path


def grids(job: Path) -> dict[str, BucketGrid]:
    """Return the grids of one job: derived, powers of two with equal slots, and chunks."""
    with open_model(MODEL, needs_weights=False) as files:
        needs = [row.need for row in read_workload(job, files).rows]
        alike = derive_grid(needs, files.spec.config.max_position)
    longest = max(need.prompt_length for need in needs)
    powers = powers_of_two(longest)[-len(alike.prefill) :]
    length = -(-alike.max_length // 64) * 64
    chunks = BucketGrid(length, (PrefillBucket(length, 4, 64),), alike.decode_slots)
    return {
        "derived": alike,
        "powers of two, 24 slots": replace(
            with_lengths(alike, powers, 512, GridDefaults()), decode_slots=24
        ),
        "chunks of 64": chunks,
    }


def compare(
    job: Path, name: str, grid: BucketGrid, calibration: Calibration, work_dir: Path
) -> dict[str, Any]:
    """Run one job under one plan, and predict the same run."""
    stem = f"{job.stem}-{'-'.join(name.replace(',', '').split())}"
    plan = Plan("cpu", PlannedModel(MODEL, ""), Numbers("float32"), grid)
    plan_path, output = work_dir / f"{stem}.toml", work_dir / f"{stem}.jsonl"
    plan_path.write_text(plan.to_toml(), "utf-8")
    arguments = ["-i", job, "-o", output, "--model", MODEL, "--plan", plan_path]
    arguments += ["--restart", "--quiet"]
    subprocess.run([sys.executable, "-c", COMMAND, "batch", *map(str, arguments)], check=True)
    with open_model(MODEL, needs_weights=False) as files:
        workload = read_workload(job, files, output=output)
        work = Work(AbstractModel(files.spec.config), "float32")
    assert workload.manifest is not None
    cost = CostModel(work, hardware_of("cpu", known_hardware()), calibration)
    ran = Plan.from_table(tomllib.loads(workload.manifest["plan"])).buckets
    simulation = simulate_in_order(workload.rows, ran, cost)
    measured, predicted = workload.manifest["generator"], simulation.metrics.report()
    assert predicted["padding"] == measured["padding"]
    return {
        "job": job.stem,
        "plan": name,
        "graphs": list(_graphs(measured["buckets"], predicted["buckets"])),
        "measured_seconds": workload.manifest["run_seconds"],
        "predicted_seconds": simulation.seconds,
    }


def _graphs(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the seconds of each prefill graph's call, and of each decode graph's step."""
    for phase, unit in (("prefill", "calls"), ("decode", "steps")):
        for name, use in measured[phase].items():
            count = use[unit]
            yield {
                "graph": f"{phase} {name}",
                "count": count,
                "measured": use["seconds"] / count,
                "predicted": predicted[phase][name]["seconds"] / count,
            }


def over_turns(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of the same run over all rounds."""
    graphs = [
        {**of_graph[0], **_medians(of_graph)}
        for of_graph in zip(*(run["graphs"] for run in runs), strict=True)
    ]
    return {**runs[0], **_medians(runs), "graphs": graphs, "turns": runs}


def _medians(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [name for name in found[0] if name.startswith(("measured", "predicted"))]
    return {name: statistics.median(one[name] for one in found) for name in names}


def error(found: Mapping[str, float], suffix: str = "") -> float:
    """Return the relative error of a prediction."""
    return found[f"predicted{suffix}"] / found[f"measured{suffix}"] - 1


def orders(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return the order of each job's plans, fastest first, as measured and as predicted."""
    for job in dict.fromkeys(run["job"] for run in runs):
        of_job = [run for run in runs if run["job"] == job]
        measured, predicted = (
            "; ".join(run["plan"] for run in sorted(of_job, key=lambda run: run[f"{how}_seconds"]))
            for how in ("measured", "predicted")
        )
        same = "the same" if measured == predicted else predicted
        yield f"- {job}: fastest first {measured}; predicted: {same}."


def markdown(report: Mapping[str, Any]) -> str:
    """Return the page."""
    machine, runs = report["machine"], report["runs"]
    errors = [abs(error(graph)) for run in runs for graph in run["graphs"]]
    whole = [abs(error(run, "_seconds")) for run in runs]
    lines = [
        "# Predicted and measured seconds",
        "",
        f"{machine['processor']}, {machine['cores']} cores, jax {machine['versions']['jax']}, the "
        f"embedded model in float32. Calibrated by `noria bench --model {MODEL} --calibration`, "
        "on other shapes. Made by `scripts/check_predictions.py`: medians of "
        f"{len(runs[0]['turns'])} rounds. Given the outputs' lengths, padding was predicted "
        "exactly in every run.",
        "",
        f"Median error of a call of a graph: {statistics.median(errors):.1%} "
        f"({len(errors)} graphs). Median error of a whole run: {statistics.median(whole):.1%}.",
        "",
        "| job | plan | measured s | predicted s | error |",
        "|:--|:--|--:|--:|--:|",
    ]
    lines += [
        f"| {run['job']} | {run['plan']} | {run['measured_seconds']:.1f} | "
        f"{run['predicted_seconds']:.1f} | {error(run, '_seconds'):+.1%} |"
        for run in runs
    ]
    lines += ["", *orders(runs)]
    lines += ["", "| job | plan | graph | calls | measured ms | predicted ms | error |"]
    lines += ["|:--|:--|:--|--:|--:|--:|--:|"]
    lines += [
        f"| {run['job']} | {run['plan']} | {graph['graph']} | {graph['count']} | "
        f"{graph['measured'] * 1e3:.1f} | {graph['predicted'] * 1e3:.1f} | {error(graph):+.1%} |"
        for run in runs
        for graph in run["graphs"]
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
