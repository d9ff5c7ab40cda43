"""Tabulate figures of graphs of published models, compiled for TPUs that are not present.

For each model, generation, number of slots and form of layers, the table has a decode step and a
prefill call: bytes moved and needed, loop iterations, rewritten arguments and the compiler's
estimate of cycles. The graph has all layers of the model in a loop, or its first eight layers
unrolled. The record is written after each graph, and a later run continues it, so the script may be
stopped at any time.

    nice python scripts/compiled_table.py --output benchmarks/compiled --label "serial cache writes"

Nothing here was run: no figure is a measured time.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from read_graphs import GraphReader, read_config

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.program_cache import without_program_cache
from noria.runtime.devices.machine import describe_machine

MODELS = Path("benchmarks/models")
UNROLLED_LAYERS = 8
LINES_KEPT = 5
LISTS = ("moved", "loops", "rewrites", "slow_products")


@dataclass(frozen=True)
class Shape:
    """The number of slots, the longest row, and a prefill call."""

    slots: int
    length: int
    prefill: tuple[int, int]

    @property
    def grid(self) -> BucketGrid:
        return BucketGrid(self.length, (self.prefill,), self.slots)


@dataclass(frozen=True)
class Case:
    """One graph."""

    model: str
    target: str
    layout: str
    shape: Shape
    scan_layers: bool
    kind: str

    @property
    def name(self) -> str:
        how = "scanned" if self.scan_layers else f"{UNROLLED_LAYERS} layers"
        size = (
            f"{self.shape.slots} slots of {self.shape.length}"
            if self.kind == "decode"
            else "x".join(map(str, self.shape.prefill))
        )
        return f"{self.model}, {self.target}, {how}, {self.kind} {size}"


SMALL = Shape(64, 1024, (1024, 4))
MIDDLE = Shape(128, 1024, (1024, 4))
LARGE = Shape(256, 1536, (512, 8))
LONG = Shape(128, 2048, (512, 8))
WINDOWS = Shape(64, 2048, (2048, 2))
EXPERTS = Shape(256, 2048, (512, 16))
LATENTS = Shape(512, 2048, (512, 64))


def one(size: int) -> str:
    return f"weight-stationary-1d@tensor={size}"


def experts(expert: int, tensor: int) -> str:
    return f"expert-tensor@data=1,expert={expert},tensor={tensor}"


PLACES = (
    ("llama-3.1-8b", MIDDLE, {"v5e:2x4": one(8), "v6e:2x2": one(4), "v5p:2x2x1": one(4)}),
    ("granite-3.1-1b-a400m", MIDDLE, {
        "v5e:2x2": experts(2, 2), "v6e:2x2": experts(2, 2), "v5p:2x2x1": experts(2, 2),
    }),
    ("qwen3-30b-a3b", EXPERTS, {
        "v5e:4x4": experts(4, 4), "v6e:2x4": experts(2, 4), "v5p:2x2x1": experts(1, 4),
    }),
    ("gemma-3-27b", WINDOWS, {"v5e:4x4": one(16), "v6e:2x4": one(8), "v5p:2x2x1": one(4)}),
    ("llama-3.1-70b", LONG, {
        "v5e:4x4": "weight-stationary-2d@data=2,tensor=8", "v6e:2x4": one(8), "v5p:2x2x2": one(8),
    }),
    ("qwen3-235b-a22b", EXPERTS, {
        "v5e:8x8": experts(16, 4), "v6e:4x8": experts(8, 4), "v5p:2x2x4": experts(4, 4),
    }),
    ("deepseek-v3", LATENTS, {
        "v5e:16x16": experts(64, 4), "v6e:16x16": experts(64, 4), "v5p:4x4x8": experts(32, 4),
    }),
    ("llama-3.1-8b", SMALL, {"v5e:2x4": one(8), "v6e:2x2": one(4), "v5p:2x2x1": one(4)}),
    ("llama-3.1-8b", LARGE, {"v5e:2x4": one(8), "v6e:2x2": one(4), "v5p:2x2x1": one(4)}),
)  # fmt: skip
"""Groups of cases: each has a model, its shape, and a layout for each slice."""


def cases() -> Iterator[Case]:
    """Yield decode of every model, generation by generation, then prefill likewise."""
    for kind in ("decode", "prefill"):
        for place in range(3):
            for scan_layers in (True, False):
                for model, shape, layouts in PLACES:
                    slice_name, layout = list(layouts.items())[place]
                    yield Case(model, f"tpu:{slice_name}", layout, shape, scan_layers, kind)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="path without .json and .md")
    parser.add_argument("--label", required=True, help="name of the compiled version")
    parser.add_argument("--only", default="", help="run only cases whose names contain this text")
    parser.add_argument("--minutes", type=float, help="begin no case after this many minutes")
    options = parser.parse_args()
    path, started = options.output.with_suffix(".json"), time.monotonic()
    report = json.loads(path.read_text("utf-8")) if path.exists() else {"labels": {}}
    report["command"] = f"python {sys.argv[0]} --output {options.output} --label LABEL"
    kept = report["labels"].setdefault(options.label, {"cases": {}})
    kept["machine"] = describe_machine()
    with without_program_cache:
        for case in cases():
            is_late = options.minutes and time.monotonic() - started > 60 * options.minutes
            if case.name in kept["cases"] or options.only not in case.name or is_late:
                continue
            kept["cases"][case.name] = found = measured(case)
            print(case.name, *figures(found), flush=True)
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            options.output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


def measured(case: Case) -> dict[str, Any]:
    """Compile one graph; return its report, or the compiler's reason for a refusal."""
    config = read_config(str(MODELS / case.model), None if case.scan_layers else UNROLLED_LAYERS)
    started = time.process_time()
    try:
        reader = GraphReader(config, case.target, case.layout, scan_layers=case.scan_layers)
        found = reader.compile(case.shape.grid, case.kind)
    except (RuntimeError, ValueError) as error:
        return {"refused": str(error).strip().partition("\n")[0]}
    memory = found.executable.memory_analysis()
    table = found.evidence.as_json()
    return {
        "layout": case.layout,
        "cpu_seconds": round(time.process_time() - started, 1),
        "temp_bytes": memory.temp_size_in_bytes if memory else None,
        **table,
        **{key: table[key][:LINES_KEPT] for key in LISTS},
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the record as a Markdown page."""
    lines = [
        "# Figures of compiled graphs, for TPUs that are not present",
        "",
        f"Made by `{report['command']}`. bfloat16. Every figure is for one device, and for one "
        "decode step or one prefill call. **Nothing was run: no figure is a measured time.**",
        "",
        "GB moved go to and from main memory. GB needed are the weights of products, and of the "
        "experts that uniform routing uses, once; the pages of all slots once; logits twice. "
        "Turns are iterations of loops inside a step; the loop over scanned layers is one of these "
        "loops. Rewritten GB are of arguments, or slices of arguments, that are copied or "
        "converted. Mcycles are the compiler's estimates without asynchronous copies; priced is "
        "the share of work without an estimate, which is priced from bytes, operations and links. "
        "Milliseconds are the longer of these cycles at the clock's rate and all bytes at the "
        "memory's rate.",
    ]
    for label, kept in report["labels"].items():
        lines += ["", f"## {label}", "", f"jax {kept['machine']['versions']['jax']}.", ""]
        lines += [
            "| graph | GB needed | moved / needed | turns | bytes a turn, least | rewritten GB "
            "| Mcycles | priced | ms | once a call GB |",
            "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {name} | {' | '.join(figures(found))} |"
            for name, found in kept["cases"].items()
            if "refused" not in found
        ]
        refused = {name: x["refused"] for name, x in kept["cases"].items() if "refused" in x}
        lines += ["", *(f"- {name}: {reason}" for name, reason in refused.items())] * bool(refused)
    return "\n".join(lines) + "\n"


def figures(found: dict[str, Any]) -> list[str]:
    """Return the cells of one graph."""
    if "refused" in found:
        return [found["refused"]]
    cycles, least = found["cycles"], found["smallest_turn_bytes"]
    return [
        f"{found['bytes_needed'] / 1e9:.3f}",
        f"{found['moved_over_needed']:.2f}",
        f"{found['loop_turns']:,}",
        "" if least is None else f"{least:,}",
        f"{(found['converted_bytes'] + found['copied_bytes']) / 1e9:.3f}",
        f"{cycles['cycles'] / 1e6:.1f}",
        f"{cycles['priced_share']:.0%}",
        f"{cycles['seconds'] * 1e3:.1f}",
        f"{found['once']['bytes_moved'] / 1e9:.3f}",
    ]


if __name__ == "__main__":
    main()
