"""Tabulate compiler estimates of prefill time by operation, for TPUs that are not present.

The model is the first eight layers of Llama 3.1 8B in bfloat16. Cycles are the compiler's own.
Operations without them are priced by bytes, operations or links, as in
`compile/programs/cycles.py`. A product includes the operations that the compiler fused to it. The
kernel of whole prompts declares no operations, so it is priced by its bytes alone. Nothing is run:
no figure is a measured time.

    python scripts/prefill_table.py > benchmarks/prefill.md
"""

import sys
from collections import Counter
from importlib.metadata import version

from read_graphs import GraphReader, known, read_config

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.hardware.interconnect import Interconnect
from noria.compile.programs.collectives import KINDS, read_collectives
from noria.compile.programs.cycles import Prices
from noria.compile.programs.executions import Executions
from noria.compile.programs.hbm_bytes import Traffic
from noria.compile.programs.hlo_text import read_program
from noria.compile.programs.products import product_flops
from noria.compile.target_names import TargetName
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

MODEL, LAYERS = "benchmarks/models/llama-3.1-8b", 8
CALLS = ((512, 1), (1024, 1), (2048, 1), (512, 8))
ALONE = ("tpu:v5e:1x1", "tpu:v6e:1x1")
SPLIT = ("tpu:v5e:2x4", "tpu:v6e:2x4")
LAYOUTS = ("weight-stationary-1d@tensor=8", "sequence-parallel@tensor=8")
KINDS_OF_WORK = ("products", "collectives", "kernels", "rest")


def main() -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "libtpu"))
    print("# Where the time of prefill goes, as compiled\n")
    print(f"{versions}. Made by `python {sys.argv[0]}`; its docstring explains the counts.")
    print("**Nothing was run: no figure is a measured time.**")
    for title, targets, layouts in (
        ("One device", ALONE, (None,)),
        ("Eight devices: the residual whole, or split by tokens", SPLIT, LAYOUTS),
    ):
        print(f"\n## {title}\n")
        print(f"| target | layout | call | ms | {' | '.join(KINDS_OF_WORK)} | most of the rest |")
        print("|---|---|---|--:|--:|--:|--:|--:|---|")
        for target in targets:
            for length, rows in CALLS:
                for layout in layouts:
                    cells = prefill_cells(target, layout, length, rows)
                    print(f"| {target} | {layout or ''} | {length}x{rows} | {cells} |", flush=True)


def prefill_cells(target: str, layout: str | None, length: int, rows: int) -> str:
    """Return milliseconds in total and by kind, with shares, and the rest's costliest lines."""
    config = read_config(MODEL, LAYERS)
    grid = BucketGrid(length, ((length, rows),), 32)
    text = GraphReader(config, target, layout).compile(grid, "prefill").text
    hardware = known(target)
    assert hardware is not None and hardware.clock is not None
    cycles, lines = spent(text, target, layout)
    total = cycles.total()
    shares = [f"{cycles[kind] / hardware.clock * 1e3:.2f} ({cycles[kind] / total:.0%})"
              for kind in KINDS_OF_WORK]  # fmt: skip
    dearest = "; ".join(f"{line} {number / total:.1%}" for line, number in lines.most_common(3))
    return " | ".join([f"{total / hardware.clock * 1e3:.2f}", *shares, dearest])


def spent(text: str, target: str, layout: str | None) -> tuple[Counter[str], Counter[str]]:
    """Return cycles by kind of work, and the cycles of the rest by line of source."""
    hardware, program = known(target), read_program(text)
    assert hardware is not None
    sizes = Layout.from_table(read_layout_table(layout)).mesh.sizes if layout else {"data": 1}
    traffic = Traffic(program)
    interconnect = Interconnect(hardware, sizes, TargetName.parse(target).torus)
    collectives = read_collectives(text, sizes)
    prices = Prices(program, traffic, collectives, hardware, interconnect)
    by_kind: Counter[str] = Counter()
    by_line: Counter[str] = Counter()
    for one in Executions(program, traffic):
        if (price := prices.of(one)) is None:
            continue
        instruction, cycles = one.instruction, one.times * price.cycles
        if instruction.opcode in KINDS:
            kind = "collectives"
        elif "tpu_custom_call" in instruction.attributes:
            kind = "kernels"
        elif product_flops(program, one.computation, instruction):
            kind = "products"
        else:
            kind = "rest"
            by_line[program.line(instruction) or instruction.opcode] += cycles
        by_kind[kind] += cycles
    return by_kind, by_line


if __name__ == "__main__":
    main()
