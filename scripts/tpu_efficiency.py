"""Derive the efficiency of TPUs that are not present from the compiler's cycles of two graphs.

The graphs have the first two and the first four layers of Llama 3.1 8B in bfloat16, with a small
vocabulary. Their difference is the time of two layers: that of the compiler's cycles or of the
bytes moved, whichever is longer. The share of the roofline is what a prediction at the peaks takes
for two layers, over this time. It holds for all parts of a layer together, and is printed for
products and for attention alike.
Nothing is run: no figure is a measured time.

    python scripts/tpu_efficiency.py > benchmarks/tpu_efficiency.md
"""

import sys
from dataclasses import replace
from importlib.metadata import version

from read_graphs import GraphReader, known, read_config

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.hardware.efficiency import AT_PEAKS
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.cost import CostModel
from noria.compile.planning.evidence import Evidence
from noria.compile.planning.work import Work
from noria.modelzoo.config import Arrangement, DecoderConfig
from noria.sharding.call import Call

MODEL = "benchmarks/models/llama-3.1-8b"
TARGETS = ("tpu:v5e:1x1", "tpu:v5p:1x1x1", "tpu:v6e:1x1")
FEW, MORE = 2, 4
SPAN = 1024
VOCABULARY = 4096
CASES = (("decode", 64), ("decode", 256), ("prefill", 512), ("prefill", 2048))
"""Kind of graph, and rows of its products: slots, or tokens of one prompt."""


def main() -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "libtpu"))
    print("# Shares of the roofline by the compiler's cycles\n")
    print(f"{versions}. Made by `python {sys.argv[0]}`; its docstring explains the figures.")
    print("**Nothing was run: no figure is a measured time.**\n")
    print("| target | graph | rows | us a layer, compiled | us a layer, at peaks | share |")
    print("|---|---|--:|--:|--:|--:|")
    for target in TARGETS:
        for kind, rows in CASES:
            compiled, peaks = layer_seconds(target, kind, rows)
            share = f"{peaks / compiled:.2f}"
            times = f"{compiled * 1e6:.0f} | {peaks * 1e6:.0f}"
            print(f"| {target} | {kind} | {rows} | {times} | {share} |", flush=True)


def layer_seconds(target: str, kind: str, rows: int, model: str = MODEL) -> tuple[float, float]:
    """Return the seconds of a layer as compiled, and at the peaks."""
    hardware = known(target)
    assert hardware is not None
    configs = [replace(read_config(model, layers), vocab_size=VOCABULARY) for layers in (FEW, MORE)]
    grid, call = grid_and_call(kind, rows)
    found = [GraphReader(config, target, None).compile(grid, kind).evidence for config in configs]
    few, more = map(step_seconds, found)
    at_peaks = [peak_seconds(config, call, hardware) for config in configs]
    num_layers = MORE - FEW
    return (more - few) / num_layers, (at_peaks[1] - at_peaks[0]) / num_layers


def grid_and_call(kind: str, rows: int) -> tuple[BucketGrid, Call]:
    """Return a grid with one graph of each kind, and the call of the graph of this kind."""
    slots, length = (rows, SPAN) if kind == "decode" else (16, rows)
    grid = BucketGrid(length, ((length, 1),), slots)
    is_decode = kind == "decode"
    return grid, grid.decode_call() if is_decode else grid.prefill_call(grid.prefill[-1])


def step_seconds(evidence: Evidence) -> float:
    """Return the seconds of a program: its cycles or its bytes, whichever takes longer."""
    cycles = evidence.report.step.cycles
    assert cycles is not None
    return cycles.seconds


def peak_seconds(config: DecoderConfig, call: Call, hardware: Hardware) -> float:
    """Return the predicted seconds of a call at the peaks."""
    work = Work(AbstractModel(config, Arrangement()), "bfloat16")
    return CostModel(work, replace(hardware, efficiency=AT_PEAKS)).seconds(call)


if __name__ == "__main__":
    main()
