"""`noria compile`: build every executable of a plan; on a target that is there, keep them.

For an absent target everything is compiled all the same, and `bundle.json` keeps what the compiler
said of each graph: seconds and memory. Weights are not read.
"""

import argparse
import sys
from pathlib import Path

from .batch.job import EXIT_BUILD, JobError
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
    from ..compile.build import GraphBuilt
    from ..compile.definition import Definition
    from ..compile.plan import Plan
    from ..compile.targets import find_target
    from . import bundle, compilation_cache, session
    from .checkpoint import open_model

    plan = Plan.from_table(apply_overrides(read_plan_table(options.plan), options.set))
    # what comes out of the cache cannot be kept again: on the CPU it lacks functions when it runs
    compilation_cache.disable()
    session.prepare_cpu(plan.target)
    target = find_target(plan.target)
    seconds: dict[str, float] = {}

    def report(built: GraphBuilt) -> None:
        seconds[built.name] = built.seconds
        if not options.quiet:
            line = f"compile [{built.number}/{built.total}] {built.name}  {built.seconds:.1f} s"
            print(line, file=sys.stderr, flush=True)

    with open_model(options.model, needs_weights=False) as files:
        bundle.check_folder(options.output, files.path)
        session.check_model(plan, files)
        session.check_layout(plan.layout, files, target, plan.buckets)
        placement = target.placement(plan.layout)
        config = files.spec.config
        definition = Definition(config, placement.arrangement(config))
        try:
            graphs = session.compile_plan(definition, plan, placement, report)
        except (RuntimeError, MemoryError) as error:
            raise JobError(f"{target.name}: {error}", EXIT_BUILD) from error
    bundle.write(options.output, plan, target, config, graphs, seconds)
    kept = "kept" if target.is_present else f"not kept, as {target.name} is not there"
    most = max(bundle.memory_of(executable) for executable in graphs.executables.values())
    print(
        f"{options.output}: {len(seconds)} graphs compiled in {sum(seconds.values()):.1f} s of "
        f"threads, {kept}; a call needs up to {most / GIGABYTE:.2f} GB of its own on each device"
    )
    return 0
