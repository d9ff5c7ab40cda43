"""Makes a model ready to run: loads parameters, compiles a plan, and starts a generation session.

`LLM`, the batch job and the benchmarks all use this path. Does not know about request files.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..compile.compiled_graphs import CompiledGraphs
from ..compile.expert_plan import LOSSLESS_EXPERTS
from ..compile.graph_failures import is_out_of_memory, naming_graph, reason
from ..compile.grids.adapter_grid import AdapterGrid
from ..compile.plan import DTYPES, Plan
from ..compile.targets import Target
from ..compile.weight_rules import ALL_FLOAT, WeightRules
from ..sharding.device_bytes import array_bytes
from ..sharding.layout import Layout
from ..sharding.placement import Placement
from .adapters.adapter_set import AdapterSet, load_arrays
from .bundles.warm_start import WarmStart
from .checkpoint import ModelFiles, load_params
from .console import plural
from .devices import machine
from .devices.compiler_messages import without_alarms
from .devices.device_shares import simulated_devices
from .devices.graph_memory import check_memory
from .devices.host_arrays import HostArrays
from .embedding.session import EmbeddingSession
from .engine.admission import Admission
from .engine.engine import Engine
from .engine.expert_use import ExpertSetup
from .engine.generation import GenerationSession
from .errors import CheckpointMismatch, InvalidConfig, OutOfMemory, note_start
from .planning import plan_checks
from .structured.form_compiler import make_trie
from .structured.params import AllowedTokens
from .structured.structures import Structures
from .structured.token_automaton import TokenAutomaton, TokenTrie
from .structured.token_rules import compile_allowed
from .text.load_tokenizer import load_tokenizer
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..compile.abstract_model import AbstractModel
    from ..compile.build import BuildProgress


@dataclass(frozen=True)
class LoadedModel:
    """The parameters of a model on their devices, its tokenizer and its placement.

    Attributes:
      files: The model's files.
      definition: The model without arrays, which graphs are traced from.
      parameters: The arrays by dotted path, sharded by `placement`.
      tokenizer: None if the model has none.
      eos_ids: Ids that end every sequence.
      dtype: The dtype of the parameters.
      target: The devices.
      placement: The shardings of parameters, cache and activations.
      adapters: The names of the adapters among the parameters.
    """

    files: ModelFiles
    definition: "AbstractModel"
    parameters: dict[str, jax.Array]
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    dtype: str
    target: Target
    placement: Placement
    adapters: tuple[str, ...] = ()


def prepare_jax(target: str, num_processes: int = 1) -> None:
    """Configure jax before it starts: disable backends that a CPU does not use, and simulate CPUs.

    Unused backends start slowly and print warnings. Has no effect if a backend runs already, or if
    the user has chosen platforms or devices.

    Args:
      target: The target's name.
      num_processes: The number of processes, which simulate an equal number of devices each.

    Raises:
      ValueError: jax is configured for 64 bits, or the processes cannot share the devices evenly.
      ForkedProcess: This process was forked from a process that runs jax.
    """
    note_start()
    if jax.dtypes.canonicalize_dtype("int64") != "int32":
        raise ValueError(
            "JAX_ENABLE_X64: expected off, as graphs count in 32 bits, got on. Unset it; in a "
            "script call jax.config.update('jax_enable_x64', False) before constructing the LLM."
        )
    count = simulated_devices(target, num_processes)
    if count is None:
        return
    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")
    is_chosen = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    is_chosen |= jax.config.values["jax_num_cpu_devices"] > 0
    if (count > 1 or num_processes > 1) and not is_chosen:
        with suppress(RuntimeError):  # a backend runs already; its devices are counted later
            jax.config.update("jax_num_cpu_devices", count)


def resolve_dtype(dtype: str, target: Target) -> str:
    """The given dtype, or the faster dtype of the target for `auto`.

    Raises:
      ValueError: The dtype is unknown.
    """
    if dtype == "auto":
        return machine.faster_dtype(target.platform)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected auto, {' or '.join(DTYPES)}, got {dtype!r}.")
    return dtype


def load_model(
    files: ModelFiles,
    target: Target,
    dtype: str,
    layout: Layout | None = None,
    scan_layers: bool = False,
    say: Callable[[str], object] = lambda note: None,
    weight_rules: WeightRules = ALL_FLOAT,
    cache_codes: str | None = None,
    adapter_grid: AdapterGrid | None = None,
    adapters: AdapterSet | None = None,
) -> LoadedModel:
    """Read the parameters, slice by slice, directly into their placement on the target.

    Args:
      files: The model's files.
      target: The devices.
      dtype: The dtype of the parameters, or `auto`.
      layout: The layout on several devices; None for one device.
      scan_layers: Whether graphs scan over layers, so that their weights are stacked.
      say: Called with a line about tokens without an embedding, if there are any.
      weight_rules: The formats of weights; weights that are not published in codes are rounded
        to them while they load.
      cache_codes: The dtype of cache entries in codes; None for float entries.
      adapter_grid: The plan's room for adapters.
      adapters: The adapters, which fit into it.

    Raises:
      CheckpointError: The model's files cannot be used.
      OutOfMemory: The weights do not fit into the memory of the devices.
    """
    # imported here, because importing flax takes time in which executables load in threads
    from ..compile.abstract_model import DOWN, UP, AbstractModel

    dtype = resolve_dtype(dtype, target)
    # before the weights, so that an error of the tokenizer comes early
    tokenizer = load_tokenizer(files.tokenizer_files, files.path)
    ends = eos_ids(files, tokenizer)
    if note := lacking_tokens(files, tokenizer):
        say(note)
    placement = target.placement(layout)
    arrangement = placement.arrangement(files.spec.config, scan_layers, cache_codes)
    definition = AbstractModel(files.spec.config, arrangement, weight_rules, adapter_grid)
    abstract = definition.abstract_parameters(jnp.dtype(dtype))
    logical_axes = definition.logical_axes()
    shardings = placement.parameters(logical_axes)
    with _naming_weights(files, abstract.values(), dtype, target):
        spec = files.spec.arranged(arrangement)
        own = {path: leaf for path, leaf in abstract.items() if not path.endswith((DOWN, UP))}
        parameters = load_params(spec, files.tensors, own, shardings, definition.quantisations)
        parameters |= load_arrays(definition, adapters, jnp.dtype(dtype), shardings)
        parameters = placement.put_in_layout(parameters, logical_axes)
    names = () if adapters is None else adapters.names
    return LoadedModel(
        files, definition, parameters, tokenizer, ends, dtype, target, placement, names
    )


@contextmanager
def _naming_weights(
    files: ModelFiles, abstract: Iterable[jax.ShapeDtypeStruct], dtype: str, target: Target
) -> Iterator[None]:
    """Name the model in errors of its weights; OutOfMemory if memory runs out while they load."""
    try:
        yield
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{files.path}: {error}") from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        num_bytes = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in abstract)
        narrower = "dtype bfloat16, " if dtype == "float32" else "numbers.weights int8 or int4, "
        raise OutOfMemory(
            f"the weights of {files.name}, {num_bytes / 1e9:.2f} GB in {dtype}, do not fit on "
            f"{target.name}: {reason(error)}. Take {narrower}more devices with a layout that "
            f"shards them, or a smaller model."
        ) from error


def eos_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a sequence: those in generation_config.json, else the tokenizer's EOS id.

    Raises:
      InvalidConfig: One of these ids, or the tokenizer's BOS id, is outside the model's vocabulary.
    """
    ids, source = files.generation_defaults.eos_ids, files.generation_defaults.eos_source
    if not ids and tokenizer is not None and tokenizer.eos_id is not None:
        ids, source = (tokenizer.eos_id,), "the tokenizer's eos_token"
    first = (tokenizer.bos_id,) if tokenizer is not None and tokenizer.add_bos else ()
    vocab_size = files.spec.config.vocab_size
    for tokens, where in ((first, "the tokenizer's bos_token"), (ids, source)):
        missing = [token for token in tokens if token is not None and token >= vocab_size]
        if missing:
            raise InvalidConfig(
                f"{files.name}: expected tokens that begin and end a text among the model's "
                f"{vocab_size} ids, got {missing} in {where}. This file belongs to another model; "
                f"take all files from one model."
            )
    return tuple(ids)


def vocabulary_trie(files: ModelFiles, tokenizer: Tokenizer) -> TokenTrie:
    """The tokens that structured answers are made of, and those that end them."""
    num_tokens = min(files.spec.config.vocab_size, tokenizer.vocab_size)
    ends = eos_ids(files, tokenizer)
    return make_trie(tokenizer.token_bytes, num_tokens, tokenizer.special_ids, ends)


def allowed_tokens(
    files: ModelFiles, tokenizer: Tokenizer | None, allowed: AllowedTokens
) -> TokenAutomaton:
    """The automaton of answers that have allowed tokens only; RowError if there are none."""
    vocab_size = files.spec.config.vocab_size
    return compile_allowed(allowed, vocab_size, tokenizer and tokenizer.encode_words)


def lacking_tokens(files: ModelFiles, tokenizer: Tokenizer | None) -> str:
    """A line about tokens of the tokenizer that have no embedding in the model; empty if all
    have one."""
    vocab_size = files.spec.config.vocab_size
    beyond = range(vocab_size, 0 if tokenizer is None else tokenizer.vocab_size)
    lacking = [token for token in beyond if tokenizer and tokenizer.token_bytes(token)]
    if tokenizer is None or not lacking:
        return ""
    example = f"{tokenizer.token_text(lacking[0])!r} ({lacking[0]})"
    return (
        f"tokenizer: {plural(len(lacking), 'token')} beyond the {vocab_size} ids of the model, "
        f"such as {example}; rows that need such a token end as errors"
    )


@without_alarms()
def compile_plan(
    definition: "AbstractModel",
    plan: Plan,
    placement: Placement,
    on_graph: Callable[["BuildProgress"], None] = lambda built: None,
    warm: WarmStart | None = None,
) -> CompiledGraphs:
    """Compile every graph of a plan; the target may be absent.

    Args:
      definition: The model without arrays.
      plan: The plan.
      placement: The shardings on the target's devices.
      on_graph: Called after each graph.
      warm: Stored executables, which are not compiled again.

    Raises:
      GraphFailed: A graph does not compile.
    """
    from ..compile.build import build

    return build(
        definition,
        plan.buckets,
        placement,
        jnp.dtype(plan.numbers.dtype),
        on_graph,
        plan.experts or LOSSLESS_EXPERTS,
        plan.attention,
        plan.compiler,
        warm.executables() if warm else {},
        warm.keep if warm else None,
    )


def start_embedding(
    model: LoadedModel,
    plan: Plan,
    *,
    on_graph: Callable[["BuildProgress"], None] = lambda built: None,
    warm: WarmStart | None = None,
) -> EmbeddingSession:
    """Compile a plan that embeds texts, and start its session.

    Args:
      model: The loaded model.
      plan: The plan, checked by `plan_checks.check_plan`.
      on_graph: Called after each graph.
      warm: Stored executables, which are not compiled again.

    Raises:
      GraphFailed: A graph does not compile, or needs more memory than a device has.
    """
    config = model.definition.config
    graphs = compile_plan(model.definition, plan, model.placement, on_graph, warm)
    check_memory(graphs, model.target.devices)
    return EmbeddingSession(
        graphs,
        model.parameters,
        HostArrays(model.placement.replicated),
        config.vocab_size,
        config.max_position,
        plan_checks.attention_kernels(plan, config, model.target).report(),
    )


def start(
    model: LoadedModel,
    plan: Plan,
    *,
    seed: int = 0,
    on_graph: Callable[["BuildProgress"], None] = lambda built: None,
    warm: WarmStart | None = None,
    structures: Structures | None = None,
) -> GenerationSession:
    """Compile a plan and start a generation session with an empty decode state.

    Args:
      model: The loaded model.
      plan: The plan, checked by `plan_checks.check_plan`.
      seed: The seed of the run, from which seeds of requests are derived.
      on_graph: Called after each graph.
      warm: Stored executables, which are not compiled again.
      structures: The forms of answers that rows ask for.

    Raises:
      GraphFailed: A graph does not compile, or needs more memory than a device has.
      ValueError: The forms need larger tables than the plan has.
    """
    definition, placement, grid = model.definition, model.placement, plan.buckets
    experts = plan.experts or LOSSLESS_EXPERTS
    graphs = compile_plan(definition, plan, placement, on_graph, warm)
    check_memory(graphs, model.target.devices)
    with naming_graph(graphs.EMPTY_STATE, grid, "failed as it ran"):
        state = (warm and warm.state()) or graphs.empty_state()
    host = HostArrays(placement.replicated)
    packed = None
    if grid.structured is not None:
        packed = (structures or Structures()).pack(grid.structured, definition.padded_vocab)
    tables = packed and host.put(packed.tables)
    engine = Engine(graphs, model.parameters, state, host, definition.padded_vocab, tables)
    config = definition.config
    setup = None if config.moe is None else ExpertSetup(config.moe, experts)
    attention = plan_checks.attention_kernels(plan, config, model.target).report()
    admission = Admission(
        grid,
        config.vocab_size,
        config.max_position,
        model.eos_ids,
        model.tokenizer,
        seed,
        packed,
        model.adapters,
        engine.prefix_ids,
    )
    return GenerationSession(engine, admission, setup, attention)
