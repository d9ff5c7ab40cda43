"""A model made ready to run: files -> parameters in place, plan -> executables -> generator.

The one path that `LLM`, the batch job and the benchmarks share. Knows nothing of request files.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..compile.attention_kernels import AttentionChoices, choose_kernels
from ..compile.compiled_graphs import CompiledGraphs
from ..compile.expert_plan import LOSSLESS_EXPERTS, ExpertPlan
from ..compile.graph_failures import is_out_of_memory, naming_graph, reason
from ..compile.grids.bucket_grid import BucketGrid
from ..compile.plan import DTYPES, Plan
from ..compile.target_names import TargetName
from ..compile.targets import Target
from ..modelzoo.config import DecoderConfig
from ..sharding.layout import Layout
from ..sharding.legality import require
from ..sharding.placement import Placement
from .bundles.warm_start import WarmStart
from .checkpoint import ModelFiles, load_params
from .console import plural
from .devices import machine
from .devices.graph_memory import check_memory
from .devices.host_arrays import HostArrays
from .engine.engine import Engine
from .engine.expert_use import ExpertSetup
from .engine.generation import GenerationSession
from .errors import InvalidConfig, OutOfMemory, note_start
from .text.load_tokenizer import load_tokenizer
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..compile.abstract_model import AbstractModel
    from ..compile.build import BuildProgress


@dataclass(frozen=True)
class LoadedModel:
    """Parameters on their devices, and what goes with them."""

    files: ModelFiles
    definition: "AbstractModel"
    parameters: dict[str, jax.Array]
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    dtype: str
    target: Target
    placement: Placement


def prepare_jax(target: str | None, num_processes: int = 1) -> None:
    """Prepare jax before it starts: leave out backends that are not to run, simulate devices.

    Refuses settings of jax with which no graph compiles, and children of a process that runs jax.

    Other backends start slowly and print warnings, and without a GPU the CUDA backend can only
    compile. Does nothing once a backend runs, or where the user has chosen platforms or devices.
    Several processes simulate an equal share of the devices each.
    """
    note_start()
    if jax.dtypes.canonicalize_dtype("int64") != "int32":
        raise ValueError(
            "JAX_ENABLE_X64: expected off, as graphs count in 32 bits, got on. Unset it; in a "
            "script say jax.config.update('jax_enable_x64', False) before the LLM is made."
        )
    if target is None:
        return
    named = TargetName.parse(target)
    if named.platform != "cpu" and not named.kind:
        return
    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")
    if named.platform == "cpu":
        _simulate_devices(target, named.num_devices, num_processes)


def _simulate_devices(target: str, total: int, num_processes: int) -> None:
    count, left_over = divmod(total, num_processes)
    if left_over:
        raise ValueError(
            f"target {target}: expected a number of devices that {num_processes} processes share "
            f"evenly, got {total}. Ask for --target cpu:{(count + 1) * num_processes}."
        )
    is_chosen = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    is_chosen |= jax.config.values["jax_num_cpu_devices"] > 0
    if (count > 1 or num_processes > 1) and not is_chosen:
        with suppress(RuntimeError):  # a backend runs already: whether it has enough is seen later
            jax.config.update("jax_num_cpu_devices", count)


def resolve_dtype(dtype: str, target: Target) -> str:
    """The dtype that was asked for; `auto` is the faster one."""
    if dtype == "auto":
        return machine.faster_dtype(target.platform)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected auto, {' or '.join(DTYPES)}, got {dtype!r}.")
    return dtype


def check_present(target: Target) -> None:
    """Refuse a target that graphs can only be compiled for."""
    if not target.is_present:
        raise ValueError(
            f"target: expected one that is on this machine, as rows are to run, got {target.name}. "
            f"Where its devices are, ask for --target {target.platform}:{len(target.devices)}."
        )


def check_plan(plan: Plan, files: ModelFiles, target: Target, dtype: str = "auto") -> None:
    """Refuse a plan that is for another model, target or dtype than asked for, or cannot run."""
    check_present(target)
    check_target(plan, target)
    check_model(plan, files)
    if dtype != "auto":
        _expect("numbers.dtype", dtype, plan.numbers.dtype, "Ask for auto to run as planned.")
    check_layout(plan.layout, files, target, plan.buckets)
    attention_kernels(plan, files.spec.config, target)


def attention_kernels(plan: Plan, config: DecoderConfig, target: Target) -> AttentionChoices:
    """The attention kernel of each graph; refuses one that is asked for and cannot serve."""
    placement, dtype = target.placement(plan.layout), jnp.dtype(plan.numbers.dtype)
    return choose_kernels(config, plan.buckets, placement, dtype, plan.attention)


def check_target(plan: Plan, target: Target) -> None:
    """Refuse a plan for other devices; one for a topology is for as many of that platform."""
    planned = TargetName.parse(plan.target)
    devices = target.platform, len(target.devices)
    if target.name != plan.target and (planned.platform, planned.num_devices) != devices:
        raise ValueError(
            f"plan target: expected {target.name}, got {plan.target}. Ask for the target that was "
            f"planned for."
        )


def check_model(plan: Plan, files: ModelFiles) -> None:
    """Refuse a plan that was made for another model, or for longer rows than this one's."""
    if plan.model.fingerprint:
        expected = files.fingerprint()
        _expect("model.fingerprint", expected, plan.model.fingerprint, "Plan again for this model.")
    longest = files.spec.config.max_position
    if plan.buckets.max_length > longest:
        raise ValueError(
            f"plan buckets.max_length: expected at most {longest}, the longest sequence that "
            f"{files.name} was published for, got {plan.buckets.max_length}."
        )
    check_experts(plan.experts, files)


def check_experts(experts: ExpertPlan | None, files: ModelFiles) -> None:
    """Refuse a dispatch to experts for a model that has none."""
    if experts is not None and files.spec.config.moe is None:
        raise ValueError(
            f"plan [experts]: expected no such table, as {files.name} is a dense model, got one. "
            f"Remove it."
        )


def check_layout(
    layout: Layout | None, files: ModelFiles, target: Target, grid: BucketGrid | None = None
) -> None:
    """Refuse a layout that cannot be for this model, target and grid, saying all that is wrong."""
    num_devices = len(target.devices)
    if layout is not None:
        from ..compile.abstract_model import model_sizes

        require(layout, model_sizes(files.spec.config, num_devices, grid))
    elif num_devices > 1:
        raise ValueError(
            f"target {target.name}: has {num_devices} devices and nothing says how the model lies "
            f"on them. Name a layout (--layout data-parallel@data={num_devices}, or a file)."
        )
    elif grid is not None and grid.slot_groups not in (None, 1):
        raise ValueError(
            f"plan buckets.slot_groups: without a layout, expected 1, as all slots are on one "
            f"device, got {grid.slot_groups}. Change it, or give the plan its layout back."
        )


def _expect(key: str, expected: str, got: str, remedy: str) -> None:
    if got != expected:
        raise ValueError(f"plan {key}: expected {expected}, got {got}. {remedy}")


def load_model(
    files: ModelFiles,
    target: Target,
    dtype: str,
    layout: Layout | None = None,
    scan_layers: bool = False,
    say: Callable[[str], object] = lambda note: None,
) -> LoadedModel:
    """Read the parameters, slice by slice, straight into their placement on the target.

    `say` gets a line about tokens that the model lacks.
    """
    # here, as importing flax takes a while, in which executables load
    from ..compile.abstract_model import AbstractModel

    dtype = resolve_dtype(dtype, target)
    # before the weights, which take longer
    tokenizer = load_tokenizer(files.tokenizer_files)
    ends = eos_ids(files, tokenizer)
    if note := lacking_tokens(files, tokenizer):
        say(note)
    placement = target.placement(layout)
    arrangement = placement.arrangement(files.spec.config, scan_layers)
    definition = AbstractModel(files.spec.config, arrangement)
    abstract = definition.abstract_parameters(jnp.dtype(dtype))
    logical_axes = definition.logical_axes()
    shardings = placement.parameters(logical_axes)
    with _naming_weights(files, abstract.values(), dtype, target):
        spec = files.spec.arranged(arrangement)
        parameters = load_params(spec, files.tensors, abstract, shardings)
        parameters = placement.put_in_layout(parameters, logical_axes)
    return LoadedModel(files, definition, parameters, tokenizer, ends, dtype, target, placement)


@contextmanager
def _naming_weights(
    files: ModelFiles, abstract: Iterable[jax.ShapeDtypeStruct], dtype: str, target: Target
) -> Iterator[None]:
    """Name the weights in the error if memory runs out while they load."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in abstract)
        narrower = "dtype bfloat16, " if dtype == "float32" else ""
        raise OutOfMemory(
            f"the weights of {files.name}, {num_bytes / 1e9:.2f} GB in {dtype}, do not fit on "
            f"{target.name}: {reason(error)}. Take {narrower}more devices with a layout that "
            f"shards them, or a smaller model."
        ) from error


def eos_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a sequence: those of generation_config.json, else the tokenizer's one.

    Raises:
        InvalidConfig: The model has no such id, or none of the token that begins its prompts.
    """
    ids, source = files.generation_defaults.eos_ids, files.generation_defaults.eos_source
    if not ids and tokenizer is not None and tokenizer.eos_id is not None:
        ids, source = (tokenizer.eos_id,), "the tokenizer's eos_token"
    first = (tokenizer.bos_id,) if tokenizer is not None and tokenizer.add_bos else ()
    vocab_size = files.spec.config.vocab_size
    for found, where in ((first, "the tokenizer's bos_token"), (ids, source)):
        missing = [token for token in found if token is not None and token >= vocab_size]
        if missing:
            raise InvalidConfig(
                f"{files.name}: expected tokens that begin and end a text among the model's "
                f"{vocab_size} ids, got {missing} in {where}. That file is another model's; take "
                f"all files from one place."
            )
    return tuple(ids)


def lacking_tokens(files: ModelFiles, tokenizer: Tokenizer | None) -> str:
    """A line about the tokenizer's tokens without an embedding in the model; empty if there are
    none."""
    vocab_size = files.spec.config.vocab_size
    beyond = range(vocab_size, 0 if tokenizer is None else tokenizer.vocab_size)
    lacking = [token for token in beyond if tokenizer and tokenizer.token_bytes(token)]
    if tokenizer is None or not lacking:
        return ""
    example = f"{tokenizer.token_text(lacking[0])!r} ({lacking[0]})"
    return (
        f"tokenizer: {plural(len(lacking), 'token')} beyond the {vocab_size} ids of the model, "
        f"such as {example}; rows that need one end as errors"
    )


def compile_plan(
    definition: "AbstractModel",
    plan: Plan,
    placement: Placement,
    on_graph: Callable[["BuildProgress"], None] = lambda built: None,
    warm: WarmStart | None = None,
) -> CompiledGraphs:
    """Every graph of a plan, for a target that may be absent; `warm` has some of them ready."""
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


def start(
    model: LoadedModel,
    plan: Plan,
    *,
    seed: int = 0,
    on_graph: Callable[["BuildProgress"], None] = lambda built: None,
    warm: WarmStart | None = None,
) -> GenerationSession:
    """Take the graphs of `warm`, compile the others; put an empty decode state in place."""
    definition, placement, grid = model.definition, model.placement, plan.buckets
    experts = plan.experts or LOSSLESS_EXPERTS
    graphs = compile_plan(definition, plan, placement, on_graph, warm)
    check_memory(graphs, model.target.devices)
    with naming_graph(graphs.EMPTY_STATE, grid, "failed as it ran"):
        state = (warm and warm.state()) or graphs.empty_state()
    host = HostArrays(placement.replicated)
    engine = Engine(graphs, model.parameters, state, host, definition.padded_vocab)
    config = definition.config
    setup = None if config.moe is None else ExpertSetup(config.moe, experts)
    attention = attention_kernels(plan, config, model.target).report()
    return GenerationSession(
        engine,
        grid,
        config.vocab_size,
        config.max_position,
        model.eos_ids,
        model.tokenizer,
        seed,
        experts=setup,
        attention=attention,
    )
