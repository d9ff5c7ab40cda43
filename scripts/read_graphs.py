"""Compile graphs of a model for hardware that need not be there, and print what their programs do.

    python scripts/read_graphs.py --model benchmarks/models/llama-3.1-8b --target tpu:v5e:2x4 \\
        --layout weight-stationary-1d@tensor=8 --slots 128 --spans 512 1024 --layers 8
    python scripts/read_graphs.py --text program.txt --target tpu:v5e:2x4 --mesh tensor=8

Printed are bytes moved and needed, loops, rewritten arguments and cycles of a decode step, or of a
prefill call, with the lines of source that they come from. Weights are not read.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from noria.compile.bucket_grid import BucketGrid
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.definition import Definition
from noria.compile.planning.evidence import read_evidence
from noria.compile.planning.hardware import UnknownHardware, hardware_of
from noria.compile.planning.interconnect import Interconnect
from noria.compile.planning.work import ONE_DEVICE, Work
from noria.compile.programs.collectives import read_collectives
from noria.compile.programs.report import read_report
from noria.compile.target_names import TargetName
from noria.compile.targets import find_target
from noria.runtime import session
from noria.runtime.checkpoint import open_model
from noria.runtime.layout_files import read_layout_table
from noria.runtime.planning.hardware_files import known_hardware
from noria.sharding.layout import Layout

LISTS = ("moved", "loops", "rewrites", "slow_products")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--target", required=True)
    add("--text", type=Path, help="the text of a compiled program, in place of a model")
    add("--mesh", default="", help="of that program, as in data=2,tensor=4")
    add("--model", help="directory, of which config.json will do")
    add("--layout", help="NAME@data=2,tensor=4 or FILE (default: one device)")
    add("--dtype", default="bfloat16")
    add("--layers", type=int, help="the first so many alone")
    add("--scan-layers", action="store_true")
    add("--slots", type=int, default=64)
    add("--spans", type=int, nargs="+", default=[1024])
    add("--prefill", default="512x8", help="tokens x rows")
    add("--graphs", nargs="+", default=["decode", "prefill"])
    add("--json", action="store_true", help="print JSON, complete")
    add("--keep", type=Path, help="folder for the texts of programs")
    options = parser.parse_args()
    for name, report in [of_text(options)] if options.text else of_model(options):
        print(json.dumps({name: report}, indent=1) if options.json else shown(name, report))


def of_text(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The report of a text; without a model, what its call needs is not known."""
    text, target = options.text.read_text("utf-8"), TargetName.of(options.target)
    pairs = (pair.split("=") for pair in options.mesh.split(",") if pair)
    mesh = {name: int(size) for name, size in pairs} or {"data": 1}
    hardware = known(options.target)
    interconnect = hardware and Interconnect(hardware, mesh, target.torus)
    collectives = read_collectives(text, mesh)
    report = read_report(text, target.platform, hardware, interconnect, collectives)
    return options.text.name, report.as_json()


def of_model(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compile and read the decode graph of the longest span, and the prefill graph."""
    session.prepare_jax(options.target)
    target = find_target(options.target)
    with open_model(options.model, needs_weights=False) as files:
        config = files.spec.config
    if options.layers:
        config = config.first_layers(options.layers)
    layout = options.layout and Layout.from_table(read_layout_table(options.layout), options.layout)
    placement = target.placement(layout or None)
    definition = Definition(config, placement.arrangement(config, options.scan_layers))
    length, rows = map(int, options.prefill.split("x"))
    grid = BucketGrid(options.spans[-1], ((length, rows),), options.slots, tuple(options.spans))
    work = Work(definition, options.dtype, layout or ONE_DEVICE)
    calls = {"decode": grid.decode_call(grid.max_length), "prefill": grid.prefill[-1].call()}
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(options.dtype))
    for kind in options.graphs:
        # decode graphs come by growing span
        graph = [one for one in graphs if one.kind == kind][-1]
        _, text, seconds = compile_with_text(graph)
        if text is None:
            print(f"{graph.name}: XLA cannot write this program as text")
            continue
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{graph.name.replace(' ', '-')}.txt").write_text(text, "utf-8")
        hardware, torus = known(options.target), TargetName.of(options.target).torus
        found = read_evidence(text, target.platform, calls[kind], work, hardware, torus)
        yield f"{graph.name}, compiled in {seconds:.1f} s", found.as_json()


def known(target: str) -> Any:
    """The hardware of a target, where a table has it."""
    try:
        return hardware_of(target, known_hardware(None))
    except UnknownHardware:
        return None


def shown(name: str, report: dict[str, Any]) -> str:
    """A report for people: figures, then a line for each source."""
    lines = [name]
    lines += [f"  {key}: {value}" for key, value in report.items() if key not in LISTS]
    for key in LISTS:
        lines += [f"  {key}:"] * bool(report[key])
        lines += [f"    {' | '.join(map(str, one.values()))}" for one in report[key]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
