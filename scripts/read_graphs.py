"""Compile graphs of a model for hardware, present or not, and print figures of the programs.

    python scripts/read_graphs.py --model benchmarks/models/llama-3.1-8b --target tpu:v5e:2x4 \\
        --layout weight-stationary-1d@tensor=8 --slots 128 --length 1024 --layers 8
    python scripts/read_graphs.py --text program.txt --target tpu:v5e:2x4 --mesh tensor=8

For a decode step, or a prefill call, the script prints bytes moved and needed, loops, rewritten
arguments and cycles, with their lines of source. It does not read weights.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from noria.compile.abstract_model import AbstractModel
from noria.compile.attention_kernels import AUTO_ATTENTION, AttentionPlan
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.hardware.hardware import Hardware, UnknownHardware, hardware_of
from noria.compile.plan import Numbers
from noria.compile.planning.evidence import Evidence
from noria.compile.planning.work import ONE_DEVICE, Work
from noria.compile.programs.report import read_report
from noria.compile.target_names import TargetName
from noria.compile.targets import find_target
from noria.compile.weight_rules import ALL_FLOAT, WeightRules
from noria.modelzoo.config import DecoderConfig
from noria.runtime.checkpoint import open_model
from noria.runtime.devices import backends
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

LISTS = {
    "moved": "line, operation, bytes, bytes beyond a first reading, once a call",
    "loops": "line, operation, turns, runs, bytes a turn, once a call",
    "rewrites": "line, argument, array, bytes, is converted, once a call",
    "slow_products": "line, array, operations, once a call",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--target", required=True)
    add("--text", type=Path, help="text of a compiled program, instead of a model")
    add("--mesh", default="", help="mesh of that program, as in data=2,tensor=4")
    add("--model", help="directory with a config.json")
    add("--layout", help="NAME@data=2,tensor=4 or FILE (default: one device)")
    add("--dtype", default="bfloat16")
    add("--layers", type=int, help="use only this many first layers")
    add("--scan-layers", action="store_true")
    add("--slots", type=int, default=64)
    add("--length", type=int, default=1024, help="positions of the longest row")
    add("--prefill", default="512x8", help="tokens x rows")
    add("--prefix", help="groups x tokens of planned prefixes, as in 1x1024")
    add("--graphs", nargs="+", default=["decode", "prefill"])
    add("--weights", default="float", help="format of weights: float, int8, float8 or int4 (float)")
    add("--group", type=int, default=0, help="input features of a weight that share a scale (all)")
    add("--cache", default="float", help="format of the cache: float, int8, float8 or int4 (float)")
    add("--json", action="store_true", help="print the whole report as JSON")
    add("--keep", type=Path, help="folder for the texts of programs")
    options = parser.parse_args()
    for name, report in [of_text(options)] if options.text else of_model(options):
        print(json.dumps({name: report}, indent=1) if options.json else shown(name, report))


def of_text(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the report of a text. It has no needed bytes, as they follow from a model."""
    text, target = options.text.read_text("utf-8"), TargetName.parse(options.target)
    pairs = (pair.split("=") for pair in options.mesh.split(",") if pair)
    mesh = {name: int(size) for name, size in pairs} or {"data": 1}
    report = read_report(text, target.platform, mesh, known(options.target), target.torus)
    return options.text.name, report.as_json()


def of_model(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compile and read the decode graph and the prefill graph."""
    config, layout = read_config(options.model, options.layers), options.layout
    numbers = Numbers(options.dtype, options.weights, options.group, cache=options.cache)
    reader = GraphReader(
        config,
        options.target,
        layout,
        numbers.dtype,
        options.scan_layers,
        numbers.weight_rules,
        numbers.cache_codes,
    )
    length, rows = map(int, options.prefill.split("x"))
    grid = BucketGrid(options.length, ((length, rows),), options.slots)
    if options.prefix:
        prefixes = read_prefixes(options.prefix, options.slots)
        prefill = ((options.length, rows, length),)
        grid = BucketGrid(options.length, prefill, options.slots, prefixes=prefixes)
    for kind in options.graphs:
        found = reader.compile(grid, kind)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{kind}.txt").write_text(found.text, "utf-8")
        yield f"{kind}, compiled in {found.seconds:.1f} s", found.evidence.as_json()


def read_prefixes(text: str, slots: int) -> PrefixGrid:
    """Return prefixes that this number of groups reads, each up to this number of tokens."""
    groups, length = map(int, text.split("x"))
    listed = (PlannedPrefix(length, "0" * 16),)
    return PrefixGrid(groups, -(-slots // groups), length, listed)


def read_config(model: str, num_layers: int | None = None) -> DecoderConfig:
    """Return the configuration of a model, or of its first layers."""
    with open_model(model, needs_weights=False) as files:
        config = files.spec.config
    return config.first_layers(num_layers) if num_layers else config


class ReadGraph:
    """One compiled graph, with its text and the figures read from it."""

    def __init__(
        self, executable: jax.stages.Compiled, text: str, seconds: float, evidence: Evidence
    ):
        self.executable, self.text, self.seconds = executable, text, seconds
        self.evidence = evidence


class GraphReader:
    """Compiles graphs of one model for one target and layout."""

    def __init__(
        self,
        config: DecoderConfig,
        target: str,
        layout: str | None,
        dtype: str = "bfloat16",
        scan_layers: bool = False,
        weight_rules: WeightRules = ALL_FLOAT,
        cache_codes: str | None = None,
    ):
        backends.prepare_jax(target)
        self._name, self._target, self._dtype = TargetName.parse(target), find_target(target), dtype
        placed = Layout.from_table(read_layout_table(layout), layout) if layout else None
        self._placement = self._target.placement(placed)
        arrangement = self._placement.arrangement(config, scan_layers, cache_codes)
        self._definition = AbstractModel(config, arrangement, weight_rules)
        self._work = Work(self._definition, dtype, placed or ONE_DEVICE)
        self._hardware = known(target)

    def compile(
        self, grid: BucketGrid, kind: str, attention: AttentionPlan = AUTO_ATTENTION
    ) -> ReadGraph:
        """Compile and read the longest decode or prefill graph of a grid."""
        dtype = jnp.dtype(self._dtype)
        graphs = plan_graphs(self._definition, grid, self._placement, dtype, attention=attention)
        of_kind = [graph for graph in graphs if graph.key.kind == kind]
        # prefill graphs are in descending order
        graph = of_kind[0]
        is_decode = kind == "decode"
        prefill_call = grid.prefill_call(grid.prefill[-1])
        call = grid.decode_call() if is_decode else prefill_call
        executable, text, seconds = compile_with_text(graph)
        if text is None:
            raise RuntimeError(f"{graph.key}: XLA cannot write this program as text")
        mesh, torus = self._work.layout.mesh.sizes, self._name.torus
        report = read_report(text, self._target.platform, mesh, self._hardware, torus)
        return ReadGraph(executable, text, seconds, Evidence(report, self._work.needed(call)))


def known(target: str) -> Hardware | None:
    """Return the hardware of a target, or None if no table has it."""
    try:
        return hardware_of(target, known_hardware(None))
    except UnknownHardware:
        return None


def shown(name: str, report: dict[str, Any]) -> str:
    """Return a report as text: figures, then a line for each line of source."""
    lines = [name]
    lines += [f"  {key}: {value}" for key, value in report.items() if key not in LISTS]
    for key, columns in LISTS.items():
        lines += [f"  {key} ({columns}):"] * bool(report[key])
        lines += [f"    {' | '.join(map(str, one.values()))}" for one in report[key]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
