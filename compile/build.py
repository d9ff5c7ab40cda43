"""Lowering and compiling every graph of a grid, in threads, with progress.

The only place that lowers. Knows nothing of requests or files. Guarantees: what it returns is
everything a run calls, so nothing is left to compile.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..sharding.placement import parameter_placement
from . import signatures
from .bucket_grid import BucketGrid
from .compiled_graphs import CompiledGraphs
from .definition import Definition
from .monitor import compile_monitor
from .steps import decode_step, insert_step, prefill_step, score_step
from .targets import Target


@dataclass(frozen=True)
class GraphBuilt:
    """One finished compile, for progress and reports."""

    name: str
    number: int
    total: int
    seconds: float
    from_cache: bool


@dataclass(frozen=True)
class GraphToBuild:
    """A graph body with its abstract arguments and the arguments that it may overwrite."""

    name: str
    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def build(
    definition: Definition,
    grid: BucketGrid,
    target: Target,
    dtype: jax.typing.DTypeLike,
    on_graph: Callable[[GraphBuilt], None] = lambda built: None,
) -> CompiledGraphs:
    """Compile all graphs of `grid` for `target`; the longest-running are started first."""
    graphs = plan_graphs(definition, grid, jnp.dtype(dtype))
    compiled: dict[str, jax.stages.Compiled] = {}
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        tasks = {pool.submit(compile_graph, graph, target): graph.name for graph in graphs}
        for number, task in enumerate(as_completed(tasks), start=1):
            name = tasks[task]
            compiled[name], seconds, from_cache = task.result()
            on_graph(GraphBuilt(name, number, len(graphs), seconds, from_cache))
    finally:
        # after a failure or Ctrl-C nobody waits for graphs that are not begun
        pool.shutdown(cancel_futures=True)
    return CompiledGraphs(grid, compiled)


def plan_graphs(definition: Definition, grid: BucketGrid, dtype: jnp.dtype) -> list[GraphToBuild]:
    """Every graph of the grid, with abstract arguments."""
    config = definition.config
    parameters = definition.abstract_parameters(dtype)
    state = jax.eval_shape(partial(signatures.decode_state, config, grid, dtype))
    graphs: list[GraphToBuild] = []
    for number, span in enumerate(grid.decode_spans, start=1):
        body = partial(decode_step, span=span, num_steps=grid.steps_per_call)
        head = state._replace(cache=state.cache.head(number))
        arguments = (parameters, head, signatures.live_mask(grid))
        name = CompiledGraphs.decode_name(span)
        graphs.append(GraphToBuild(name, _bound(definition, body), arguments, (1,)))
    for bucket in reversed(grid.prefill):
        arguments = (parameters, *signatures.prefill_arguments(bucket))
        body = _bound(definition, prefill_step)
        graphs.append(GraphToBuild(CompiledGraphs.prefill_name(bucket), body, arguments))
        if grid.score:
            scored = (parameters, *signatures.score_arguments(bucket))
            name = CompiledGraphs.score_name(bucket)
            graphs.append(GraphToBuild(name, _bound(definition, score_step), scored))
        prompts = jax.eval_shape(body, *arguments)
        insert = (state, prompts, *signatures.insert_arguments(config))
        graphs.append(GraphToBuild(CompiledGraphs.insert_name(bucket), insert_step, insert, (0,)))
    return graphs


def _bound(definition: Definition, body: Callable[..., Any]) -> Callable[..., Any]:
    def graph(parameters: dict[str, jax.Array], *arguments: Any) -> Any:
        return body(definition.bind(parameters), *arguments)

    return graph


def compile_graph(graph: GraphToBuild, target: Target) -> tuple[jax.stages.Compiled, float, bool]:
    """Lower and compile one graph: the executable, the seconds, whether it came from the cache."""
    start = time.monotonic()
    monitor = compile_monitor()
    monitor.take_cache_hit()
    placed = [_placed(argument, target) for argument in graph.arguments]
    # float32 means float32: TPU and GPU would otherwise round the operands of products
    with jax.default_matmul_precision("float32"):
        lowered = jax.jit(
            graph.body, donate_argnums=graph.donated, out_shardings=target.sharding
        ).lower(*placed)
    compiled = lowered.compile()
    return compiled, time.monotonic() - start, monitor.take_cache_hit()


def _placed(argument: Any, target: Target) -> Any:
    """An abstract argument with its arrays placed; parameters are dictionaries by name."""
    if isinstance(argument, dict):
        placements = parameter_placement(argument, target.platform, target.sharding)
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placements[name])
            for name, leaf in argument.items()
        }
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target.sharding),
        argument,
    )
