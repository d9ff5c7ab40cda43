"""Tabulate the bytes that decode steps move with weights and caches in codes, for absent TPUs.

The first layers of each model are compiled, unrolled, for each TPU and each format of weights. The
bytes that a step of the program moves are compared with those that the step needs. The record is
written after each graph, and a later run continues it, so the script may be stopped at any time.

    nice python scripts/compiled_numbers.py --output benchmarks/compiled_numbers

Nothing here was run: no figure is a measured time.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from read_graphs import GraphReader, read_config

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.plan import Numbers
from noria.compile.program_cache import without_program_cache
from noria.runtime.devices.machine import describe_machine

MODELS = Path("benchmarks/models")
LENGTH = 1024
FORMATS = (("int8", 0), ("int4", 128))
MEGABYTE = 1e6


@dataclass(frozen=True)
class Case:
    """Some layers of a model on a target."""

    model: str
    target: str
    layout: str
    slots: int
    layers: int
    weights: str
    group: int

    @property
    def name(self) -> str:
        group = f":{self.group}" if self.group else ""
        return f"{self.model}, {self.layers} layers, {self.target}, {self.weights}{group}"


def cases(model: str, slots: int, layers: int, *places: tuple[str, str]) -> list[Case]:
    """Return the cases of a model on several targets, each with its layout."""
    return [
        Case(model, target, layout, slots, layers, weights, group)
        for target, layout in places
        for weights, group in FORMATS
    ]


def dense(size: int) -> str:
    return f"weight-stationary-1d@tensor={size}"


def sparse(expert: int, tensor: int) -> str:
    return f"expert-tensor@data=1,expert={expert},tensor={tensor}"


CASES = (
    *cases("llama-3.1-8b", 64, 2, ("tpu:v5e:2x4", dense(8)), ("tpu:v6e:2x2", dense(4))),
    *cases("llama-3.1-70b", 64, 2, ("tpu:v5e:2x4", dense(8)), ("tpu:v6e:2x4", dense(8))),
    *cases("qwen3-30b-a3b", 64, 2, ("tpu:v5e:2x2", sparse(2, 2)), ("tpu:v6e:2x2", sparse(2, 2))),
    *cases(
        "deepseek-v3", 512, 4, ("tpu:v5e:16x16", sparse(64, 4)), ("tpu:v6e:16x16", sparse(64, 4))
    ),
)
"""All cases. DeepSeek-V3 has four layers here, because its first three are dense."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="path without .json and .md")
    parser.add_argument("--only", default="", help="run only cases whose names contain this text")
    options = parser.parse_args()
    path = options.output.with_suffix(".json")
    is_new = not path.exists()
    report: dict[str, Any] = {"cases": {}} if is_new else json.loads(path.read_text("utf-8"))
    command = f"python {sys.argv[0]} --output {options.output}"
    report |= {"command": command, "machine": describe_machine()}
    with without_program_cache:
        for case in CASES:
            if options.only in case.name and case.name not in report["cases"]:
                report["cases"][case.name] = found = measure(case)
                print(case.name, found, flush=True)
                path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                options.output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


def measure(case: Case) -> dict[str, Any]:
    """Compile a decode graph and read its bytes."""
    config = read_config(str(MODELS / case.model), case.layers)
    numbers = Numbers("bfloat16", case.weights, case.group, cache="int8")
    rules, codes = numbers.weight_rules, numbers.cache_codes
    reader = GraphReader(config, case.target, case.layout, weight_rules=rules, cache_codes=codes)
    grid = BucketGrid(LENGTH, ((min(512, LENGTH), 8),), case.slots)
    try:
        graph = reader.compile(grid, "decode")
    except RuntimeError as error:
        return {"refused": str(error).strip().partition("\n")[0]}
    evidence = graph.evidence
    return {
        "layout": case.layout,
        "needed": evidence.needed.total,
        "moved": evidence.report.step.bytes_moved,
        "converted": evidence.report.step.converted_bytes,
        "compile_seconds": round(graph.seconds, 1),
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the record as a Markdown page."""
    machine = report["machine"]
    lines = [
        "# Bytes of decode steps with weights and cache in codes, on TPUs that are not present",
        "",
        f"jax {machine['versions']['jax']}. Made by `{report['command']}`.",
        "",
        f"The first layers of each model, unrolled, with its head in bfloat16, the cache in int8, "
        f"and rows of {LENGTH} entries.",
        "MB are of one device and one step. **Nothing was run.**",
        "",
        "| model, target and weights | layout | needed MB | moved MB | moved / needed "
        "| converted MB |",
        "|:--|:--|--:|--:|--:|--:|",
        *(row(name, case) for name, case in report["cases"].items()),
    ]
    if missing := [case.name for case in CASES if case.name not in report["cases"]]:
        lines += ["", "Not compiled so far:", "", *(f"- {name}" for name in missing)]
    return "\n".join(lines) + "\n"


def row(name: str, case: dict[str, Any]) -> str:
    """Return the line of a graph."""
    if "refused" in case:
        return f"| {name} | {case['refused']} | | | | |"
    needed, moved = case["needed"], case["moved"]
    cells = [
        name,
        case["layout"],
        f"{needed / MEGABYTE:.0f}",
        f"{moved / MEGABYTE:.0f}",
        f"{moved / needed:.2f}",
        f"{case['converted'] / MEGABYTE:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
