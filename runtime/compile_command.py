"""`noria compile`: build every executable of a plan; on a target that is there, keep them.

For an absent target everything is compiled all the same, and `bundle.json` keeps what the compiler
said of each graph: seconds and memory. Weights are not read. Of several processes each keeps its
own.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import pod_options
from .batch.job_files import check_files
from .batch.peers import Peers
from .console import note, tell
from .counted import counted
from .run_config import ConfigError, add_strict_config, apply_overrides, read_plan_table

if TYPE_CHECKING:
    from ..compile.plan import Plan

GIGABYTE = 1e9


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("--model", required=True, help="directory (config.json will do), .gguf file, or smollm2")
    add("--plan", type=Path, required=True, help="made by noria plan, or by hand")
    add("-o", "--output", type=Path, required=True, help="folder of the bundle")
    add("--set", action="append", default=[], metavar="A.B=V", help="override a key of the plan")
    add("--quiet", action="store_true", help="no progress on stderr")
    add_strict_config(parser)
    pod_options.add_options(parser.add_argument_group("several processes over one mesh"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile, write, and say what it took."""
    from ..compile.plan import Plan

    plan = Plan.from_table(apply_overrides(read_plan_table(options.plan), options.set))
    if options.coordinator or options.distributed:
        option = "--coordinator" if options.coordinator else "--distributed"
        _check_present(plan.target, option)
    with pod_options.peers(options, plan.target) as peers:
        _compile(options, plan, peers)
    return 0


def _compile(options: argparse.Namespace, plan: "Plan", peers: Peers) -> None:
    from .bundles import bundle
    from .bundles.key import digest
    from .checkpoint import open_model
    from .compiled_plan import compile_for_target

    def report(built: object) -> None:
        if peers.leads:
            note(options, built)

    folder = bundle.own_folder(options.output, peers.rank, peers.size)
    check_files({}, [("the plan that is read", options.plan)], bundle.tables_in(folder))
    with open_model(options.model, needs_weights=False) as files:
        files.unread.report(report, is_strict=options.strict_config)
        bundle.check_folder(options.output, files.path, peers)
        facts = {
            "plan": plan.to_toml(),
            "model": digest(repr(files.spec.config)),
        }
        peers.agree(lambda: facts)
        found = compile_for_target(plan, files, report)
        target, seconds, config = found.target, found.graph_seconds, files.spec.config
        bundle.write(folder, plan, target, config, found.graphs, seconds)
    kept = "kept" if target.is_present else f"not kept, as {target.name} is not there"
    most = max(found.memory_bytes.values())
    tell(
        sys.stdout,
        f"{folder}: {counted(len(seconds), 'graph')} compiled in {found.seconds:.1f} s, "
        f"{kept}; a call needs up to {most / GIGABYTE:.2f} GB on each device, with all that "
        f"it is given",
    )


def _check_present(target: str, option: str) -> None:
    """Refuse an option that needs devices where there are none."""
    from ..compile.target_names import TargetName

    if TargetName.of(target).kind:
        raise ConfigError(
            f"{option}: expected a target that is on this machine, as each process keeps what its "
            f"devices run, got {target}. Compile without {option}."
        )
