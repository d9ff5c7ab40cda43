"""Lowers and compiles every graph of a grid, in threads, and reports progress.

This is the only module that lowers. Knows nothing of requests or files. Guarantees: the result has
every executable that a run calls, so nothing is left to compile.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..modelzoo.weights.weight_products import Axes
from ..sharding.layout import PHASES
from ..sharding.placement import Placement
from .abstract_model import AbstractModel
from .attention_kernels import AUTO_ATTENTION, AttentionPlan, Choice, choose_kernels
from .compiled_graphs import CompiledGraphs
from .compiler_options import NO_OPTIONS, CompilerOptions, with_defaults
from .device_kinds import kind_of
from .expert_plan import LOSSLESS_EXPERTS, ExpertPlan
from .graph_failures import naming_graph, naming_option
from .graphs import signatures
from .graphs.embed_step import embed_step
from .graphs.prefill_steps import (
    clear_prefix_step,
    fork_step,
    prefill_step,
    prefix_step,
    score_step,
)
from .graphs.steps import DecodeState, decode_step
from .grids.bucket_grid import BucketGrid
from .grids.prefill_bucket import PrefillBucket
from .grids.prefix_grid import PrefixGrid
from .program_cache import compile_program
from .programs.program_text import program_text, text_folder


@dataclass(frozen=True)
class BuildProgress:
    """One finished compile, for progress and reports."""

    name: str
    number: int
    total: int
    seconds: float
    remaining_seconds: float
    """Estimate for all graphs that are left, from the mean time of the finished ones. It is an
    upper estimate, as the graphs that compile longest start first."""

    def __str__(self) -> str:
        """A line of progress: `compile [3/9] prefill 256x2  4.1 s, about 9 s left`."""
        line = f"compile [{self.number}/{self.total}] {self.name}  {self.seconds:.1f} s"
        is_last = self.number == self.total
        return line if is_last else f"{line}, about {self.remaining_seconds:.0f} s left"


@dataclass(frozen=True)
class GraphSpec:
    """A graph body with its abstract arguments on their shardings, and the donated arguments."""

    name: str
    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Any
    """Shardings of the results, or of each part of them."""
    donated: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the compiler."""

    @property
    def kind(self) -> str:
        """The first word of the name, such as `decode` for `decode span 256`."""
        return self.name.split()[0]


def build(
    model: AbstractModel,
    grid: BucketGrid,
    placement: Placement,
    dtype: jax.typing.DTypeLike,
    on_graph: Callable[[BuildProgress], None] = lambda built: None,
    experts: ExpertPlan = LOSSLESS_EXPERTS,
    attention: AttentionPlan = AUTO_ATTENTION,
    compiler: CompilerOptions = NO_OPTIONS,
    ready: Mapping[str, jax.stages.Compiled] = MappingProxyType({}),
    keep: Callable[[str, jax.stages.Compiled], None] | None = None,
) -> CompiledGraphs:
    """Compile all graphs of a grid for a placement; graphs that compile longest start first.

    Args:
      model: The abstract model.
      grid: The buckets, spans and slots.
      placement: Devices and layout.
      dtype: Dtype of weights and activations.
      on_graph: Called after each compile.
      experts: Dispatch of experts in each phase.
      attention: Kernels that the plan names.
      compiler: Compiler options by kind of graph, added to the platform's.
      ready: Executables by name that need no compile.
      keep: Called with the name and the executable of each compile, in the thread that compiled it.

    Raises:
      GraphFailed: A graph does not compile. No other graph replaces it, because the executables
        that a row passes through depend on the row and the plan alone.
      CompilerOptionRefused: The compiler does not know one of its options, or refuses its value.
    """
    graphs = plan_graphs(model, grid, placement, jnp.dtype(dtype), experts, attention, compiler)
    graphs = [graph for graph in graphs if graph.name not in ready]
    compiled = dict(ready)
    started = time.monotonic()
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())

    def compile_and_keep(graph: GraphSpec) -> tuple[jax.stages.Compiled, float]:
        executable, seconds = compile_graph(graph)
        if keep is not None:
            keep(graph.name, executable)
        return executable, seconds

    try:
        tasks = {pool.submit(compile_and_keep, graph): graph.name for graph in graphs}
        for number, task in enumerate(as_completed(tasks), start=1):
            name = tasks[task]
            with naming_graph(name, grid, "does not compile"):
                compiled[name], seconds = task.result()
            each = (time.monotonic() - started) / number
            remaining = each * (len(graphs) - number)
            on_graph(BuildProgress(name, number, len(graphs), seconds, remaining))
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

    The arguments are those of `build`; nothing is lowered.
    """
    graphs = _GraphPlanner(model, grid, placement, dtype, experts, attention).graphs()
    is_float32 = dtype == jnp.float32 and not model.weight_rules.rounds_activations
    options = with_defaults(
        compiler,
        placement.platform,
        is_float32=is_float32,
        has_groups=any(one.format.group for one in model.quantisations.values()),
        has_coded_cache=model.arrangement.cache_codes is not None,
    )
    return [replace(graph, options=options.get(graph.kind, {})) for graph in graphs]


class _GraphPlanner:
    """Graph bodies, arguments and shardings of one model, grid and layout."""

    def __init__(
        self,
        model: AbstractModel,
        grid: BucketGrid,
        placement: Placement,
        dtype: jnp.dtype,
        experts: ExpertPlan = LOSSLESS_EXPERTS,
        attention: AttentionPlan = AUTO_ATTENTION,
    ):
        self._model, self._grid, self._placement = model, grid, placement
        config = model.config
        phases = (*PHASES, "chunk")
        self._operations = {phase: placement.operations(phase, config) for phase in phases}
        platform, kind = placement.platform, kind_of(placement.mesh.devices.flat)
        self._dispatch = {phase: experts.dispatch(phase, platform, kind) for phase in PHASES}
        self._dispatch["chunk"] = self._dispatch["prefill"]
        has_codes = model.arrangement.cache_codes is not None
        self._kernels = choose_kernels(
            config, grid, placement, dtype, attention, has_codes=has_codes
        )
        logical_axes = model.logical_axes()
        shardings = placement.parameters(logical_axes)
        self._parameters = {
            name: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=placement.format(name, logical_axes[name], leaf.shape, shardings[name]),
            )
            for name, leaf in model.abstract_parameters(dtype).items()
        }
        if grid.embed:
            return  # such a grid has no state
        num_heads = placement.num_cache_heads(config)
        self._make_state = partial(
            signatures.decode_state,
            model,
            grid,
            placement.cache_dtype(dtype),
            num_heads,
            placement.cache_stripes,
        )
        state = jax.eval_shape(self._make_state)
        prefixes = state.prefixes and state.prefixes.map(self._abstract_segments)
        self._state = state.map(self._abstract_segments)._replace(prefixes=prefixes)

    def graphs(self) -> list[GraphSpec]:
        """All graphs: decode, then prefill by falling length, so that long compiles come first."""
        if self._grid.embed:
            return list(map(self._embed_graph, reversed(self._grid.prefill)))
        graphs = [self._decode_graph(span) for span in self._grid.graph_spans]
        for bucket in reversed(self._grid.prefill):
            graphs += self._prefill_graphs(bucket)
        if self._grid.decode_slots:
            graphs.append(self._fork_graph())
        if self._grid.prefixes is not None:
            graphs += self._prefix_graphs(self._grid.prefixes)
        return [*graphs, self._empty_state_graph()]

    def _empty_state_graph(self) -> GraphSpec:
        name, results = CompiledGraphs.EMPTY_STATE, _shardings(self._state)
        return GraphSpec(name, self._make_state, (), results)

    def _decode_graph(self, span: int) -> GraphSpec:
        body = partial(decode_step, span=span, num_steps=self._grid.steps_per_call)
        head = self._head(span)
        arguments = (self._parameters, head, self._replicated(signatures.live_mask(self._grid)))
        if (structured := self._grid.structured) is not None:
            tables = signatures.structure_tables(structured, self._model)
            arguments = (*arguments, self._replicated(tables))
        results = (_shardings(head), self._placement.replicated)
        name = CompiledGraphs.decode_name(span)
        assert self._kernels.decode is not None
        bound = self._bind(body, "decode", self._kernels.decode)
        return GraphSpec(name, bound, arguments, results, (1,))

    def _head(self, span: int) -> DecodeState:
        """The state with the cache segments below a span."""
        num_segments = self._grid.num_segments(span)
        return self._state._replace(cache=self._state.cache.head(num_segments))

    def _fork_graph(self) -> GraphSpec:
        arguments = (
            self._state,
            *self._replicated(signatures.fork_arguments(self._model, self._grid)),
        )
        body = partial(fork_step, cache_operations=self._operations["decode"])
        return GraphSpec(CompiledGraphs.FORK, body, arguments, _shardings(self._state), (0,))

    def _prefix_graphs(self, prefixes: PrefixGrid) -> list[GraphSpec]:
        operations = self._operations["decode"]
        head = self._state._replace(cache=self._state.cache.head(0))
        results = _shardings(head)
        compute = partial(prefix_step, cache_operations=operations)
        arguments = self._replicated(signatures.prefix_arguments(prefixes, self._grid.adapters))
        kernel = self._kernels.prefix
        assert kernel is not None
        clear = partial(clear_prefix_step, cache_operations=operations)
        return [
            GraphSpec(
                CompiledGraphs.PREFIX,
                self._bind(compute, "chunk", kernel),
                (self._parameters, head, *arguments),
                (results, self._placement.replicated),
                (1,),
            ),
            GraphSpec(
                CompiledGraphs.CLEAR_PREFIX,
                clear,
                (head, self._replicated(signatures.prefix_row())),
                results,
                (0,),
            ),
        ]

    def _prefill_graphs(self, bucket: PrefillBucket) -> list[GraphSpec]:
        head = self._head(bucket.length)
        results = (_shardings(head), self._placement.replicated)
        has_prefix = self._grid.prefixes is not None
        phase = "prefill" if bucket.is_whole and not has_prefix else "chunk"
        kernel = self._kernels.prefill[bucket.tokens]
        kinds: dict[bool, tuple[Callable[..., Any], Callable[..., Any]]] = {
            False: (prefill_step, signatures.prefill_arguments),
            True: (score_step, signatures.score_arguments),
        }
        return [
            GraphSpec(
                CompiledGraphs.prefill_name(bucket, is_scored),
                self._bind(
                    partial(body, cache_operations=self._operations["decode"]), phase, kernel
                ),
                (
                    self._parameters,
                    head,
                    *self._replicated(arguments(self._model, bucket, self._grid)),
                ),
                results,
                (1,),
            )
            for is_scored in self._grid.prefill_kinds
            for body, arguments in [kinds[is_scored]]
        ]

    def _embed_graph(self, bucket: PrefillBucket) -> GraphSpec:
        name = CompiledGraphs.embed_name(bucket)
        bound = self._bind(embed_step, "prefill", self._kernels.prefill[bucket.tokens])
        arguments = self._replicated(signatures.embed_arguments(bucket))
        return GraphSpec(name, bound, (self._parameters, *arguments), self._placement.replicated)

    def _bind(self, body: Callable[..., Any], phase: str, kernel: Choice) -> Callable[..., Any]:
        options = self._operations[phase], self._dispatch[phase], kernel.attend

        def graph(parameters: dict[str, jax.Array], *arguments: Any) -> Any:
            return body(self._model.bind(parameters, *options), *arguments)

        return graph

    def _abstract_segments(self, segments: Any, logical_axes: Axes) -> Any:
        sharding = self._placement.state(logical_axes)
        return tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in segments
        )

    def _replicated(self, arguments: Any) -> Any:
        sharding = self._placement.replicated
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
        )


def _shardings(placed: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.format, placed)


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
    with naming_option(graph.name, graph.options):
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
