"""Lowers and compiles every graph of a grid, in threads, and reports progress.

Knows nothing of requests or files. Guarantees: the result has every executable that a run calls, so
nothing is left to compile.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..sharding.layout import PHASES
from ..sharding.placement import Placement
from .abstract_model import AbstractModel
from .attention_kernels import AUTO_ATTENTION, AttentionPlan, Choice, cache_dtype, choose_kernels
from .compiled_graphs import CompiledGraphs
from .compiler_options import NO_OPTIONS, CompilerOptions, with_defaults
from .device_kinds import kind_of
from .expert_plan import LOSSLESS_EXPERTS, ExpertPlan
from .graph_failures import naming_graph, naming_option
from .graphs import signatures
from .graphs.graph_kinds import GRAPH_KINDS, GraphKey, graph_keys
from .grids.bucket_grid import BucketGrid
from .program_cache import compile_program
from .programs.program_text import program_text, text_folder


@dataclass(frozen=True)
class BuildProgress:
    """One finished compile, for progress and reports."""

    key: GraphKey
    number: int
    total: int
    seconds: float
    remaining_seconds: float
    """Estimate for all graphs that are left, from the mean time of the finished ones. It is an
    upper estimate, as the graphs that compile longest start first."""

    def __str__(self) -> str:
        """A line of progress: `compile [3/9] prefill 256x2  4.1 s, about 9 s left`."""
        line = f"compile [{self.number}/{self.total}] {self.key}  {self.seconds:.1f} s"
        is_last = self.number == self.total
        return line if is_last else f"{line}, about {self.remaining_seconds:.0f} s left"


@dataclass(frozen=True)
class GraphSpec:
    """A graph body with its abstract arguments on their shardings, and the donated arguments."""

    key: GraphKey
    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Any
    """Shardings of the results, or of each part of them."""
    donated: tuple[int, ...]
    options: Mapping[str, Any]
    """Options of the compiler."""


def build(
    grid: BucketGrid,
    graphs: Sequence[GraphSpec],
    on_graph: Callable[[BuildProgress], None] = lambda built: None,
    ready: Mapping[GraphKey, jax.stages.Compiled] = MappingProxyType({}),
    keep: Callable[[GraphKey, jax.stages.Compiled], None] = lambda key, executable: None,
) -> CompiledGraphs:
    """Compile graphs in threads; those that compile longest start first.

    Args:
      grid: The buckets, slots and pages.
      graphs: All graphs of the grid, as `plan_graphs` returns them.
      on_graph: Called after each compile.
      ready: Executables that need no compile.
      keep: Called with the key and the executable of each compile, in the thread that compiled it.

    Raises:
      GraphFailed: A graph does not compile. No other graph replaces it, because the executables
        that a row passes through depend on the row and the plan alone.
      CompilerOptionRefused: The compiler does not know one of its options, or refuses its value.
    """
    graphs = [graph for graph in graphs if graph.key not in ready]
    compiled = dict(ready)
    started = time.monotonic()
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())

    def compile_and_keep(graph: GraphSpec) -> tuple[jax.stages.Compiled, float]:
        executable, seconds = compile_graph(graph)
        keep(graph.key, executable)
        return executable, seconds

    try:
        tasks = {pool.submit(compile_and_keep, graph): graph.key for graph in graphs}
        for number, task in enumerate(as_completed(tasks), start=1):
            key = tasks[task]
            with naming_graph(key, grid, "does not compile"):
                compiled[key], seconds = task.result()
            each = (time.monotonic() - started) / number
            remaining = each * (len(graphs) - number)
            on_graph(BuildProgress(key, number, len(graphs), seconds, remaining))
    except Exception:
        # the caller's next step should not share the machine with compiles that still run
        pool.shutdown(cancel_futures=True)
        raise
    finally:
        # a signal must not wait for a compile
        pool.shutdown(wait=False, cancel_futures=True)
    return CompiledGraphs(grid, compiled)


def plan_graphs(
    model: AbstractModel,
    grid: BucketGrid,
    placement: Placement,
    dtype: jnp.dtype,
    experts: ExpertPlan = LOSSLESS_EXPERTS,
    attention: AttentionPlan = AUTO_ATTENTION,
    compiler: CompilerOptions = NO_OPTIONS,
) -> list[GraphSpec]:
    """Describe every graph of the grid: abstract arguments, and shardings of results.

    Nothing is lowered.

    Args:
      model: The abstract model.
      grid: The buckets, slots and pages.
      placement: Devices and layout.
      dtype: Dtype of weights and activations.
      experts: Dispatch of experts in each phase.
      attention: Kernels that the plan names.
      compiler: Compiler options by kind of graph, added to the platform's.
    """
    planner = _GraphPlanner(model, grid, placement, dtype, experts, attention)
    is_float32 = dtype == jnp.float32 and not model.weight_rules.rounds_activations
    options = with_defaults(
        compiler,
        placement.platform,
        is_float32=is_float32,
        has_groups=any(one.format.group for one in model.quantisations.values()),
        has_coded_cache=model.arrangement.cache_codes is not None,
    )
    return [planner.graph(key, options) for key in graph_keys(grid)]


class _GraphPlanner:
    """Graph bodies, arguments and shardings of one model, grid and layout."""

    def __init__(
        self,
        model: AbstractModel,
        grid: BucketGrid,
        placement: Placement,
        dtype: jnp.dtype,
        experts: ExpertPlan,
        attention: AttentionPlan,
    ):
        self._model, self._grid, self._placement = model, grid, placement
        config = model.config
        self._operations = {phase: placement.operations(phase) for phase in (*PHASES, "chunk")}
        platform, kind = placement.platform, kind_of(placement.mesh.devices.flat)
        self._dispatch = {phase: experts.dispatch(phase, platform, kind) for phase in PHASES}
        self._dispatch["chunk"] = self._dispatch["prefill"]
        codes = model.arrangement.cache_codes
        self._kernels = choose_kernels(config, grid, placement, dtype, attention, cache_codes=codes)
        logical_axes = model.logical_axes()
        shardings = placement.parameters(logical_axes)
        self._parameters = {
            name: _abstract(
                leaf, placement.format(name, logical_axes[name], leaf.shape, shardings[name])
            )
            for name, leaf in model.abstract_parameters(dtype).items()
        }
        if grid.embed:
            return  # such a grid has no state
        self._make_state = partial(
            signatures.decode_state,
            model,
            grid,
            cache_dtype(config, platform, dtype, cache_codes=codes, choices=self._kernels),
            placement.cache_head_shards,
        )
        state = jax.eval_shape(self._make_state)
        self._state = state.map(lambda leaf, axes: _abstract(leaf, placement.state(axes)))

    def graph(self, key: GraphKey, options: CompilerOptions) -> GraphSpec:
        """One graph of the grid, with its options among those of all kinds."""
        kind, replicated = GRAPH_KINDS[key.kind], self._placement.replicated
        if kind.body is None:
            results = jax.tree.map(lambda leaf: leaf.format, self._state)
            return GraphSpec(key, self._make_state, (), results, (), {})
        body = kind.body(self._grid, key.shape, self._operations["decode"])
        arguments = kind.arguments(self._model, self._grid, key.shape)
        arguments = tuple(jax.tree.map(partial(_abstract, sharding=replicated), arguments))
        results, donated = replicated, ()
        if kind.takes_state:
            results = jax.tree.map(lambda leaf: leaf.format, self._state), replicated
            arguments, donated = (self._state, *arguments), (0,)
        if kind.call is not None:
            kernel = kind.kernel(self._kernels, key.shape)
            assert kernel is not None
            body = self._bind(body, kind.call(self._grid, key.shape).phase, kernel)
            arguments, donated = (self._parameters, *arguments), tuple(n + 1 for n in donated)
        own = options.get(kind.options or "", {})
        return GraphSpec(key, body, arguments, results, donated, own)

    def _bind(self, body: Callable[..., Any], phase: str, kernel: Choice) -> Callable[..., Any]:
        options = self._operations[phase], self._dispatch[phase], kernel.attend

        def graph(parameters: dict[str, jax.Array], *arguments: Any) -> Any:
            return body(self._model.bind(parameters, *options), *arguments)

        return graph


def _abstract(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def compile_graph(
    graph: GraphSpec, folder: Path | None = None
) -> tuple[jax.stages.Compiled, float]:
    """Lower and compile one graph.

    Args:
      graph: The graph.
      folder: Folder in which `program_text` later finds the program's text. Some programs can be
        written only while they compile.

    Returns:
      The executable, and the seconds that it took.
    """
    start = time.monotonic()
    # float32 means float32: TPU and GPU would otherwise round the operands of products
    with jax.default_matmul_precision("float32"):
        lowered = jax.jit(
            graph.body, donate_argnums=graph.donated, out_shardings=graph.results
        ).lower(*graph.arguments)
    with naming_option(graph.key, graph.options):
        compiled = compile_program(lowered, graph.options, folder)
    return compiled, time.monotonic() - start


def compile_with_text(graph: GraphSpec) -> tuple[jax.stages.Compiled, str | None, float]:
    """Lower and compile one graph, and write its program as text.

    Returns:
      The executable, its text (None if XLA cannot write it), and the seconds of the compile.
    """
    with text_folder() as folder:
        compiled, seconds = compile_graph(graph, folder)
        return compiled, program_text(compiled, folder), seconds
