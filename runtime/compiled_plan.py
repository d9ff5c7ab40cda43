"""A plan's graphs compiled for its target, which need not be there. Weights are not read."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..compile.build import GraphBuilt
from ..compile.compiled_graphs import CompiledGraphs
from ..compile.definition import Definition
from ..compile.plan import Plan
from ..compile.program_cache import anew
from ..compile.targets import Target, find_target
from . import session
from .batch.job import EXIT_BUILD, JobError
from .checkpoint import ModelFiles
from .graph_memory import memory_of


@dataclass(frozen=True)
class CompiledPlan:
    """Every graph of a plan, and what compiling it took."""

    target: Target
    graphs: CompiledGraphs
    graph_seconds: dict[str, float]
    """By name; several graphs compile at once."""
    seconds: float
    """Of the clock, for all of them."""

    @property
    def memory_bytes(self) -> dict[str, int]:
        """What each graph needs on a device, with all that it is given; 0 where none are known."""
        executables = self.graphs.executables
        return {name: memory_of(executable) for name, executable in executables.items()}


def compile_for_target(
    plan: Plan, files: ModelFiles, on_graph: Callable[[GraphBuilt], None]
) -> CompiledPlan:
    """Compile all graphs anew; JobError says why one of them does not compile."""
    session.prepare_jax(plan.target)
    target = find_target(plan.target)
    session.check_model(plan, files)
    session.check_layout(plan.layout, files, target, plan.buckets)
    placement = target.placement(plan.layout)
    config = files.spec.config
    arrangement = placement.arrangement(config, plan.model.scan_layers)
    definition = Definition(config, arrangement)
    seconds: dict[str, float] = {}

    def report(built: GraphBuilt) -> None:
        seconds[built.name] = built.seconds
        on_graph(built)

    started = time.monotonic()
    try:
        # what comes out of the cache says nothing of what compiling takes, and cannot be kept
        # again: on the CPU it lacks functions when it runs
        with anew:
            graphs = session.compile_plan(definition, plan, placement, report)
    except (RuntimeError, MemoryError) as error:
        raise JobError(f"{target.name}: {error}", EXIT_BUILD) from error
    return CompiledPlan(target, graphs, seconds, time.monotonic() - started)
