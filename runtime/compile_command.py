"""`noria compile`: build every executable of a plan; on a target that is there, keep them.

For an absent target everything is compiled all the same, and `bundle.json` keeps what the compiler
said of each graph: seconds and memory. Weights are not read.
"""

import argparse
import sys
from pathlib import Path

from .plan_files import read_plan_table
from .run_config import apply_overrides

GIGABYTE = 1e9


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("--model", required=True, help="directory (config.json will do), .gguf file, or smollm2")
    add("--plan", type=Path, required=True, help="made by noria plan, or by hand")
    add("-o", "--output", type=Path, required=True, help="folder of the bundle")
    add("--set", action="append", default=[], metavar="A.B=V", help="override a key of the plan")
    add("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile, write, and say what it took."""
    from ..compile.plan import Plan
    from . import bundle
    from .checkpoint import open_model
    from .compiled_plan import compile_for_target

    plan = Plan.from_table(apply_overrides(read_plan_table(options.plan), options.set))

    def report(built: object) -> None:
        if not options.quiet:
            print(built, file=sys.stderr, flush=True)

    with open_model(options.model, needs_weights=False) as files:
        bundle.check_folder(options.output, files.path)
        found = compile_for_target(plan, files, report)
    target, seconds = found.target, found.graph_seconds
    bundle.write(options.output, plan, target, files.spec.config, found.graphs, seconds)
    kept = "kept" if target.is_present else f"not kept, as {target.name} is not there"
    most = max(found.memory_bytes.values())
    print(
        f"{options.output}: {len(seconds)} graphs compiled in {found.seconds:.1f} s, {kept}; a "
        f"call needs up to {most / GIGABYTE:.2f} GB on each device, with all that it is given"
    )
    return 0
