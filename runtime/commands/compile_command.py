"""`noria compile`: compile all graphs of a plan into a bundle.

The target may be absent. The bundle has the executables for present targets and for TPUs, and
`bundle.json` has the compile seconds and the memory of each graph. Weights are not read. If this
machine has devices of the plan's kind, graphs are compiled for these.
If several processes run the command, each process writes its own folder of the bundle.
"""

import argparse
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import GIGABYTE, note, plural, tell
from ..devices.default_target import default_target
from ..errors import EXIT_BUILD, JobError
from ..files.file_checks import check_files
from ..files.run_config import read_plan_table
from ..pods.peers import Peers
from ..pods.pod_options import PodOptions
from . import pod_arguments
from .shared_options import add_model, add_overrides, add_quiet, typed

if TYPE_CHECKING:
    from ...compile.abstract_model import AbstractModel
    from ...compile.build import BuildProgress
    from ...compile.graphs.graph_kinds import GraphKey
    from ...compile.plan import Plan
    from ...compile.targets import Target
    from ...sharding.placement import Placement
    from ..checkpoint import ModelFiles


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser, reads_weights=False)
    add("--plan", type=Path, required=True, help="plan file to compile")
    add("-o", "--output", type=Path, required=True, help="folder for the bundle")
    add_overrides(parser)
    add_quiet(parser)
    pod_arguments.add_options(parser.add_argument_group("several processes over one mesh"))


def run(options: argparse.Namespace) -> int:
    """Compile the plan, write the bundle, and print its size and compile time."""
    from ...compile.plan import Plan
    from ..checkpoint.published_numbers import override_plan

    plan = Plan.from_table(override_plan(read_plan_table(options.plan), options.set))
    with typed(PodOptions, options).peers(plan.target) as peers:
        _compile(options, plan, peers)
    return 0


def _compile(options: argparse.Namespace, plan: "Plan", peers: Peers) -> None:
    from .. import session
    from ..bundles import bundle
    from ..bundles.key import digest
    from ..checkpoint import open_model
    from ..checkpoint.published_numbers import keep_published
    from ..devices.graph_memory import required_bytes
    from ..plans.plan_facts import plan_facts

    def say(message: object) -> None:
        if peers.is_leader:
            note(message, is_quiet=options.quiet)

    def warn(message: object) -> None:
        if peers.is_leader:
            tell(sys.stderr, message)

    seconds: dict[GraphKey, float] = {}

    def on_graph(built: "BuildProgress") -> None:
        seconds[built.key] = built.seconds
        say(built)

    folder = bundle.own_folder(options.output, peers.rank, peers.size)
    tables = {"the bundle's plan": bundle.PLAN, "the bundle's table": bundle.CONTENTS}
    written = {description: folder / name for description, name in tables.items()}
    check_files({}, [("the plan that is read", options.plan)], written)
    with open_model(options.model, needs_weights=False) as files:
        files.unread.report(warn, is_strict=options.strict_config)
        bundle.check_folder(options.output, files.path, peers)
        config = files.spec.config
        plan = replace(plan, numbers=keep_published(plan.numbers, files))
        facts = {"plan": plan_facts(plan), "model": digest(repr(config))}
        peers.agree(lambda: facts)
        target, placement, definition = _prepared(plan, files, peers)
        started = time.monotonic()
        try:
            graphs = session.compile_plan(definition, plan, placement, on_graph)
        except (RuntimeError, MemoryError) as error:
            raise JobError(f"{target.name}: {error}", EXIT_BUILD) from error
        taken = time.monotonic() - started
        bundle.write(folder, plan, target, config, graphs, seconds)
    is_kept = bundle.keeps(target)
    kept = "executables kept" if is_kept else f"no executables kept, as {target.name} is absent"
    max_bytes = max(map(required_bytes, graphs.executables.values()))
    tell(
        sys.stdout,
        f"{folder}: {plural(len(seconds), 'graph')} compiled in {taken:.1f} s, "
        f"{kept}; peak memory per device {max_bytes / GIGABYTE:.2f} GB (arguments included)",
    )


def _prepared(
    plan: "Plan", files: "ModelFiles", peers: Peers
) -> "tuple[Target, Placement, AbstractModel]":
    """The target, placement and model of a plan; raises an error if the plan is illegal."""
    from ..bundles.cpu_kernels import load_kernels
    from ..devices import backends
    from ..plans import plan_checks
    from ..session import LoadOptions

    backends.prepare_jax(plan.target)
    load_kernels(plan.target, partial(tell, sys.stderr))
    target = _target(plan.target, peers)
    plan_checks.check_model(plan, files)
    config, weight_rules = files.spec.config, plan.numbers.weight_rules
    plan_checks.check_layout(plan.layout, files, target, plan.buckets, weight_rules)
    placement = target.placement(plan.layout)
    return target, placement, LoadOptions.of_plan(plan).definition(config, placement)


def _target(name: str, peers: Peers) -> "Target":
    """The devices of this machine, or absent ones if it has no devices of the plan's kind.

    Processes of a pod keep the executables of their own devices, which must be present.
    """
    from ...compile.target_names import TargetName, UnknownTarget
    from ...compile.targets import find_target, present_target

    if peers.size > 1:
        return present_target(name)
    named = TargetName.parse(name)
    if named.kind and named.platform == default_target():
        with suppress(UnknownTarget):
            return present_target(name)
    return find_target(name)
