"""`noria plan`: choose buckets for a workload, on a target that need not be there.

Reads the lengths of a workload, weighs every grid of the family by its predicted seconds, and
writes the best as a plan that `noria batch --plan` runs; a report beside it says why. Weights are
not read, and nothing is compiled unless asked for.
"""

import argparse
import json
import math
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout_files import read_layout_table
from ..run_config import ConfigError

if TYPE_CHECKING:
    from ...compile.bucket_grid import BucketGrid
    from ...compile.plan import Plan
    from ...compile.planning.cost import CostModel
    from ...compile.planning.hardware import Hardware
    from ...modelzoo.config import DecoderConfig
    from ...sharding.layout import Layout
    from ..checkpoint import ModelFiles
    from .planning import Planned
    from .search import Tried
    from .workload import Workload

SECONDS_PER_LAYER = {"cpu": 0.2, "gpu": 0.1, "tpu": 0.1}
"""Of compiling one graph with unrolled layers on two cores, measured on models of 30 to 80 layers;
`--seconds-per-graph` says it better."""
PLAN_OF_RUN = "plan of the run"
MEMORY_SHARE = 0.9
"""Of a device's memory for weights and cache; the rest is for what a graph needs meanwhile."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("--model", required=True, help="directory (config.json will do), .gguf file, or smollm2")
    add("--workload", type=Path, required=True, help="batch file, or CSV of token counts")
    add("-o", "--output", type=Path, required=True, help="the plan, as TOML")
    add("--target", default="cpu", help="cpu, tpu:v5e:2x4, gpu:h100:8, ... (default: cpu)")
    add("--report", type=Path, metavar="DIR", help="folder for report.json and report.html")
    add("--layout", help="how the model lies on several devices: a name, a mesh after @, or FILE")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights")
    add("--from-output", type=Path, metavar="OUT", help="output of a finished job of the workload")
    add(
        "--expected-output",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of max_tokens that rows emit, where nothing else says (default: 1)",
    )
    add("--calibration", type=Path, help="made by noria bench --calibration on the target")
    add("--hardware", type=Path, help="TOML tables of devices, beside the published ones")
    add("--chunks", choices=("auto", "never", "always"), default="auto", help="of prompts")
    add("--max-prefill-graphs", type=int, default=8, help="default: 8")
    add("--max-decode-graphs", type=int, default=4, help="default: 4")
    add("--max-compile-minutes", type=float, default=math.inf, help="for all graphs together")
    add("--seconds-per-graph", type=float, help="of compiling one (default: by layers)")
    add("--max-memory-gb", type=float, help="on each device (default: 90 %% of what it has)")
    add("--tries", type=int, default=24, help="grids to simulate at most (default: 24)")
    add("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan, write, and print a summary."""
    from ..checkpoint import open_model

    _check(options)
    with open_model(options.model, needs_weights=False) as files:
        return _run(options, files)


@dataclass(frozen=True)
class Prediction:
    """A plan and everything that it was made from."""

    plan: "Plan"
    planned: "Planned"
    workload: "Workload"
    cost: "CostModel"
    seconds: float
    """That planning took."""


def _run(options: argparse.Namespace, files: "ModelFiles") -> int:
    from . import report

    prediction = _predict(options, files)
    options.output.write_text(prediction.plan.to_toml(), encoding="utf-8")
    if options.report is not None:
        report.write(prediction, options.report)
    print(report.summary(prediction))
    print(f"plan: {options.output}")
    return 0


def _predict(options: argparse.Namespace, files: "ModelFiles") -> Prediction:
    from ...compile.expert_plan import default_experts
    from ...compile.plan import Plan, PlannedModel
    from ...compile.planning.candidates import Budget
    from ...compile.planning.cost import CostModel
    from ...compile.planning.hardware import num_devices
    from ...compile.planning.work import Work
    from .planning import Planner
    from .workload import read_workload

    started = time.perf_counter()
    config, hardware = files.spec.config, _hardware(options)
    layout = _layout(options, num_devices(options.target))
    _require(layout, config, num_devices(options.target), None)
    dtype = _dtype(options)
    workload = read_workload(
        options.workload,
        files,
        share_of_limit=options.expected_output,
        output=options.from_output,
    ).that_fits(config.max_position)
    _note(options, f"{len(workload.rows)} rows read, {workload.num_refused} of them refused")
    work = Work(_definition(files, layout), dtype, layout)
    cost = CostModel(work, hardware, _calibration(options, files, dtype))
    per_layer = SECONDS_PER_LAYER[options.target.partition(":")[0]]
    budget = Budget(
        prefill_graphs=options.max_prefill_graphs,
        decode_graphs=options.max_decode_graphs,
        memory_bytes=_memory(options, hardware),
        compile_seconds=options.max_compile_minutes * 60,
        seconds_per_graph=options.seconds_per_graph or per_layer * config.num_layers,
    )

    def report(tried: "Tried") -> None:
        _note(options, f"{tried.seconds:10.1f} s predicted: {_short(tried)}")

    planner = Planner(
        workload.rows,
        config.max_position,
        cost,
        budget,
        _defaults(layout),
        may_chunk=options.chunks != "never",
        must_chunk=options.chunks == "always",
        most_tries=options.tries,
        on_try=report,
        compared=_grids_of_run(workload),
    )
    planned = planner.plan()
    _require(layout, config, num_devices(options.target), planned.best.grid)
    model = PlannedModel(files.name, _fingerprint(files), dtype)
    plan = Plan(options.target, model, planned.best.grid, layout, default_experts(config))
    return Prediction(plan, planned, workload, cost, time.perf_counter() - started)


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing."""
    positive = {
        "--max-prefill-graphs": options.max_prefill_graphs,
        "--max-decode-graphs": options.max_decode_graphs,
        "--max-compile-minutes": options.max_compile_minutes,
        "--seconds-per-graph": options.seconds_per_graph,
        "--max-memory-gb": options.max_memory_gb,
        "--tries": options.tries,
    }
    for name, number in positive.items():
        if number is not None and not number > 0:
            raise ConfigError(f"{name}: expected a number above 0, got {number}.")
    if not 0 < options.expected_output <= 1:
        raise ConfigError(
            f"--expected-output: expected a share above 0 and of at most 1, got "
            f"{options.expected_output}."
        )


def _hardware(options: argparse.Namespace) -> "Hardware":
    from ...compile.planning.hardware import hardware_of
    from .hardware_files import known_hardware

    return hardware_of(options.target, known_hardware(options.hardware))


def _layout(options: argparse.Namespace, num_devices: int) -> "Layout | None":
    from ...sharding.layout import Layout

    if options.layout is not None:
        return Layout.from_table(read_layout_table(options.layout), options.layout)
    if num_devices > 1:
        raise ConfigError(
            f"--target {options.target}: has {num_devices} devices and nothing says how the model "
            f"lies on them. Name a layout (--layout data-tensor@data=2,tensor=4, or a file)."
        )
    return None


def _require(
    layout: "Layout | None", config: "DecoderConfig", num_devices: int, grid: "BucketGrid | None"
) -> None:
    from ...compile.definition import model_sizes
    from ...sharding.legality import require

    if layout is not None:
        require(layout, model_sizes(config, num_devices, grid))


def _defaults(layout: "Layout | None"):
    from ...compile.default_grid import GridDefaults

    return GridDefaults.for_layout(layout)


def _dtype(options: argparse.Namespace) -> str:
    if options.dtype != "auto":
        return options.dtype
    return "float32" if options.target.partition(":")[0] == "cpu" else "bfloat16"


def _definition(files: "ModelFiles", layout: "Layout | None"):
    from ...compile.definition import Definition
    from ...modelzoo.config import AS_PUBLISHED
    from ...sharding.placement import arrangement_of

    config = files.spec.config
    return Definition(config, AS_PUBLISHED if layout is None else arrangement_of(layout, config))


def _calibration(options: argparse.Namespace, files: "ModelFiles", dtype: str):
    from ...compile.planning.cost import Calibration

    if options.calibration is None:
        return None
    with options.calibration.open(encoding="utf-8") as file:
        calibration = Calibration.from_json(json.load(file))
    expected = {"model": _fingerprint(files), "dtype": dtype, "target": options.target}
    for name, value in expected.items():
        if (got := getattr(calibration, name)) != value:
            raise ConfigError(
                f"{options.calibration} {name}: expected {value}, got {got}. Calibrate again with "
                f"noria bench --calibration."
            )
    return calibration


def _grids_of_run(workload: "Workload") -> "dict[str, BucketGrid]":
    """The grid that a finished job ran on."""
    from ...compile.plan import Plan

    if workload.manifest is None:
        return {}
    return {PLAN_OF_RUN: Plan.from_table(tomllib.loads(workload.manifest["plan"])).buckets}


def _memory(options: argparse.Namespace, hardware: "Hardware") -> float:
    if options.max_memory_gb is not None:
        return options.max_memory_gb * 1e9
    return MEMORY_SHARE * hardware.memory_bytes


def _fingerprint(files: "ModelFiles") -> str:
    """Of a model without weights none: such a plan is for any model that fits it."""
    from ..checkpoint.errors import CheckpointError

    try:
        return files.fingerprint()
    except CheckpointError:
        return ""


def _short(tried: "Tried") -> str:
    grid = tried.grid
    how = "whole prompts" if grid.chunk is None else f"chunks of {grid.chunk}"
    shapes = " ".join(f"{bucket.length}x{bucket.batch}" for bucket in grid.prefill)
    return f"{how} {shapes}, {grid.decode_slots} slots"


def _note(options: argparse.Namespace, line: str) -> None:
    if not options.quiet:
        print(line, file=sys.stderr, flush=True)
