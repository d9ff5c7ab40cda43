"""Makes a model ready to run, in one sequence: open it with a plan, load it, build it, start it.

`LLM`, the batch job, the benchmarks and the comparison all use this path. Does not know about
request files.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..compile.compiled_graphs import CompiledGraphs
from ..compile.expert_plan import LOSSLESS_EXPERTS
from ..compile.graph_failures import is_out_of_memory, naming_graph, reason
from ..compile.graphs.graph_kinds import EMPTY_STATE
from ..compile.grids.adapter_grid import AdapterGrid
from ..compile.plan import DTYPES, Plan
from ..compile.targets import Target
from ..compile.weight_rules import ALL_FLOAT, WeightRules
from ..modelzoo.cache.state_spec import array_bytes
from ..modelzoo.config import DecoderConfig
from ..modelzoo.cpu.objects import panel_columns
from ..sharding.layout import Layout
from ..sharding.placement import Placement
from .adapters.adapter_set import AdapterSet, load_arrays
from .bundles.warm_start import WarmStart
from .checkpoint import ModelFiles, load_params
from .checkpoint.published_numbers import keep_published
from .console import plural
from .devices import machine
from .devices.compiler_messages import without_alarms
from .devices.graph_memory import check_memory, check_weights
from .devices.host_arrays import HostArrays
from .engine.admission import Admission
from .engine.embedding import EmbeddingSession
from .engine.generation import GenerationSession
from .engine.metrics import ExpertSetup
from .engine.model_runner import ModelRunner
from .engine.slot_calls import SlotCalls
from .errors import CheckpointMismatch, InvalidConfig, OutOfMemory, UserError
from .plans import plan_checks
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


Session = GenerationSession | EmbeddingSession
"""A built model that answers requests."""


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


def resolve_dtype(dtype: str, target: Target) -> str:
    """The given dtype, or the faster dtype of the target for `auto`.

    Raises:
      ValueError: The dtype is unknown.
    """
    if dtype == "auto":
        return machine.faster_dtype(target.platform)
    if dtype not in DTYPES:
        raise UserError(f"dtype: expected auto, {' or '.join(DTYPES)}, got {dtype!r}.")
    return dtype


@dataclass(frozen=True)
class LoadOptions:
    """The formats and the arrangement of a model's arrays."""

    dtype: str
    """The dtype of the parameters, or `auto`."""
    layout: Layout | None = None
    """The layout on several devices; None for one device."""
    scan_layers: bool = False
    """Whether graphs scan over layers, so that their weights are stacked."""
    weight_rules: WeightRules = ALL_FLOAT
    """The formats of weights; weights that are not published in codes are rounded to them while
    they load."""
    cache_codes: str | None = None
    """The dtype of cache entries in codes; None for float entries."""
    adapters: AdapterGrid | None = None
    """The room for adapters."""
    in_panels: bool = True
    """Whether weights are in panels where kernels read them so; files have the order of axes."""

    @classmethod
    def of_plan(cls, plan: Plan) -> "LoadOptions":
        """The options that a plan fixes."""
        numbers, scan_layers = plan.numbers, plan.model.scan_layers
        formats = numbers.weight_rules, numbers.cache_codes
        return cls(numbers.dtype, plan.layout, scan_layers, *formats, plan.buckets.adapters)

    def definition(self, config: DecoderConfig, placement: Placement) -> "AbstractModel":
        """The model without arrays."""
        # imported here, because importing flax takes time in which executables load in threads
        from ..compile.abstract_model import AbstractModel

        arrangement = placement.arrangement(config, self.scan_layers, self.cache_codes)
        if not self.in_panels:
            arrangement = replace(arrangement, panel_columns=None, code_lanes=None)
        return AbstractModel(config, arrangement, self.weight_rules, self.adapters)


@dataclass(frozen=True)
class OpenedModel:
    """A model and a plan that fit each other and a target. Nothing is loaded."""

    files: ModelFiles
    target: Target
    plan: Plan
    adapters: AdapterSet | None = None

    @classmethod
    def of(
        cls,
        files: ModelFiles,
        target: Target,
        plan: Plan,
        adapters: AdapterSet | None = None,
        dtype: str = "auto",
    ) -> "OpenedModel":
        """Check that a plan can run with a model, a present target, adapters and a dtype.

        The plan gets the formats of the weights that it keeps as they are published.

        Raises:
          ValueError: The plan was made for another model, target or dtype, or cannot run.
        """
        plan = replace(plan, numbers=keep_published(plan.numbers, files))
        plan_checks.check_plan(plan, files, target, dtype)
        if adapters is not None:
            adapters.check(plan.buckets.adapters)
        return cls(files, target, plan, adapters)

    def load(self, say: Callable[[str], object] = lambda note: None) -> LoadedModel:
        """Load the parameters in the formats of the plan; see `load_model`."""
        options = LoadOptions.of_plan(self.plan)
        return load_model(self.files, self.target, options, self.adapters, say)


def load_model(
    files: ModelFiles,
    target: Target,
    options: LoadOptions,
    adapters: AdapterSet | None = None,
    say: Callable[[str], object] = lambda note: None,
) -> LoadedModel:
    """Read the parameters, slice by slice, directly into their placement on the target.

    Args:
      files: The model's files.
      target: The devices.
      options: The formats and the arrangement of the arrays.
      adapters: The adapters, which fit into the room of the options.
      say: Called with a line about tokens without an embedding, if there are any.

    Raises:
      CheckpointError: The model's files cannot be used.
      OutOfMemory: The weights do not fit into the memory of the devices.
    """
    # imported here, because importing flax takes time in which executables load in threads
    from ..compile.abstract_model import DOWN, UP

    dtype = resolve_dtype(options.dtype, target)
    # before the weights, so that an error of the tokenizer comes early
    tokenizer = load_tokenizer(files.tokenizer_files, files.path)
    ends = eos_ids(files, tokenizer)
    if note := lacking_tokens(files, tokenizer):
        say(note)
    placement = target.placement(options.layout)
    definition = options.definition(files.spec.config, placement)
    abstract = definition.abstract_parameters(jnp.dtype(dtype))
    logical_axes = definition.logical_axes()
    shardings = placement.parameters(logical_axes)
    with _naming_weights(files, abstract.values(), dtype, target):
        spec = files.spec.arranged(definition.arrangement)
        own = {path: leaf for path, leaf in abstract.items() if not path.endswith((DOWN, UP))}
        parameters = load_params(spec, files.tensors, own, shardings, definition.quantisations)
        parameters |= load_arrays(definition, adapters, jnp.dtype(dtype), shardings)
        parameters = definition.pack(placement.put_in_layout(parameters, logical_axes))
    names = () if adapters is None else adapters.names
    return LoadedModel(
        files, definition, parameters, tokenizer, ends, dtype, target, placement, names
    )


@contextmanager
def _naming_weights(
    files: ModelFiles, abstract: Iterable[jax.ShapeDtypeStruct], dtype: str, target: Target
) -> Iterator[None]:
    """Name the model in errors of its weights; OutOfMemory if memory runs out while they load.

    Weights that are larger than the memory of a machine with CPUs alone are not loaded at all.
    """
    num_bytes = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in abstract)
    try:
        check_weights(num_bytes, target.devices)
        yield
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{files.path}: {error}") from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
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
    from ..compile.build import build as build_graphs
    from ..compile.build import plan_graphs

    grid, dtype = plan.buckets, jnp.dtype(plan.numbers.dtype)
    experts = plan.experts or LOSSLESS_EXPERTS
    in_panels = definition.arrangement.panel_columns
    assert in_panels in (None, panel_columns()), "kernels are loaded before the model is defined"
    graphs = plan_graphs(definition, grid, placement, dtype, experts, plan.attention, plan.compiler)
    if warm is None:
        return build_graphs(grid, graphs, on_graph)
    return build_graphs(grid, graphs, on_graph, warm.executables(), warm.keep)


def build(
    model: LoadedModel,
    plan: Plan,
    on_graph: Callable[["BuildProgress"], None] = lambda built: None,
    warm: WarmStart | None = None,
) -> ModelRunner:
    """Compile a plan, checked by `OpenedModel.of`, for a loaded model, with an empty decode state.

    `on_graph` is called after each graph. Executables that `warm` has are not compiled again.

    Raises:
      GraphFailed: A graph does not compile, or needs more memory than a device has.
    """
    graphs = compile_plan(model.definition, plan, model.placement, on_graph, warm)
    check_memory(graphs, model.target.devices)
    state = None
    if not plan.buckets.embed:
        with naming_graph(EMPTY_STATE, plan.buckets, "failed as it ran"):
            state = (warm and warm.state()) or graphs.empty_state()
    return ModelRunner(graphs, model.parameters, HostArrays(model.placement.replicated), state)


def start(
    model: LoadedModel,
    plan: Plan,
    *,
    seed: int = 0,
    on_graph: Callable[["BuildProgress"], None] = lambda built: None,
    warm: WarmStart | None = None,
    structures: Structures | None = None,
) -> Session:
    """Build a model, and start a session that generates, or embeds if the plan does.

    Seeds of requests are derived from `seed`, and `structures` has the forms of answers that rows
    ask for. The other arguments are those of `build`.

    Raises:
      GraphFailed: A graph does not compile, or needs more memory than a device has.
      ValueError: The forms need larger tables than the plan has.
    """
    definition, config, grid = model.definition, model.definition.config, plan.buckets
    runner = build(model, plan, on_graph, warm)
    attention = plan_checks.attention_kernels(plan, config, model.target).report()
    if grid.embed:
        return EmbeddingSession(
            runner=runner,
            attention=attention,
            vocab_size=config.vocab_size,
            max_position=config.max_position,
            other_tokens=model.files.spec.other_tokens,
        )
    packed = None
    if grid.structured is not None:
        packed = (structures or Structures()).pack(grid.structured, definition.padded_vocab)
    tables = packed and runner.host.put(packed.tables)
    admission = Admission(
        grid,
        config.vocab_size,
        config.max_position,
        model.eos_ids,
        model.tokenizer,
        seed,
        packed,
        model.adapters,
        model.files.spec.other_tokens,
    )
    slots = SlotCalls(grid, definition.padded_vocab, tables)
    dispatch = plan.experts or LOSSLESS_EXPERTS
    experts = None
    if config.moe is not None:
        experts = ExpertSetup(config.moe.routing, config.sparse_layers, dispatch)
    return GenerationSession(
        runner=runner, experts=experts, attention=attention, slots=slots, admission=admission
    )
