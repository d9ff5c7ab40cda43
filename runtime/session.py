"""A model made ready to run: files -> parameters in place, plan -> executables -> generator.

The one path that `LLM`, the batch job and the benchmarks share. Knows nothing of request files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..compile import signatures
from ..compile.build import GraphBuilt, build
from ..compile.definition import Definition
from ..compile.plan import DTYPES, Plan
from ..compile.targets import Target
from ..sharding.placement import place
from .checkpoint import ModelFiles, load_params
from .engine import Engine
from .generation import Generator
from .text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """Parameters on their devices, and what goes with them."""

    files: ModelFiles
    definition: Definition
    parameters: dict[str, jax.Array]
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    dtype: str
    target: Target


def use_only_cpu_if_asked(target: str | None) -> None:
    """Keep jax from starting other backends, which is slow and loud, when the CPU is the target.

    Does nothing once a backend runs, or when the user has chosen platforms.
    """
    if target == "cpu" and not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")


def resolve_dtype(dtype: str, target: Target) -> str:
    """`auto` is float32 on the CPU, where narrower products are slower, and bfloat16 elsewhere."""
    if dtype == "auto":
        return "float32" if target.platform == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected auto, {' or '.join(DTYPES)}, got {dtype!r}.")
    return dtype


def check_plan(plan: Plan, files: ModelFiles, target: Target, dtype: str = "auto") -> None:
    """Refuse a plan that is for another model, target or dtype than asked for, or cannot run."""
    if not target.is_present:
        raise ValueError(
            f"target: expected one that is on this machine, as rows are to run, got {target.name}."
        )
    _expect("target", target.name, plan.target, "Ask for the target that was planned for.")
    if plan.model.fingerprint:
        expected = files.fingerprint()
        _expect("model.fingerprint", expected, plan.model.fingerprint, "Plan again for this model.")
    if dtype != "auto":
        _expect("model.dtype", dtype, plan.model.dtype, "Ask for auto to run as planned.")
    longest = files.spec.config.max_position
    if plan.buckets.max_length > longest:
        raise ValueError(
            f"plan buckets.max_length: expected at most {longest}, the longest sequence that "
            f"{files.name} was published for, got {plan.buckets.max_length}."
        )


def _expect(key: str, expected: str, got: str, remedy: str) -> None:
    if got != expected:
        raise ValueError(f"plan {key}: expected {expected}, got {got}. {remedy}")


def load_model(files: ModelFiles, target: Target, dtype: str) -> LoadedModel:
    """Read the parameters, slice by slice, straight into their placement on the target."""
    dtype = resolve_dtype(dtype, target)
    spec = files.spec
    definition = Definition(spec.config)
    abstract = definition.abstract_parameters(jnp.dtype(dtype))
    loaded = load_params(spec, files.tensors, abstract, target.sharding)
    parameters = place(loaded, target.platform, target.sharding)
    tokenizer = load_tokenizer(files.tokenizer_files)
    return LoadedModel(
        files, definition, parameters, tokenizer, eos_ids(files, tokenizer), dtype, target
    )


def eos_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a sequence: those of generation_config.json, else the tokenizer's one."""
    ids = files.generation_defaults.eos_ids
    if not ids and tokenizer is not None and tokenizer.eos_id is not None:
        ids = (tokenizer.eos_id,)
    return tuple(ids)


def start(
    model: LoadedModel,
    plan: Plan,
    *,
    seed: int = 0,
    on_graph: Callable[[GraphBuilt], None] = lambda built: None,
) -> Generator:
    """Compile the plan's graphs and put an empty decode state in place."""
    definition, target, grid = model.definition, model.target, plan.buckets
    dtype = jnp.dtype(model.dtype)
    graphs = build(definition, grid, target, dtype, on_graph)
    state = jax.jit(
        lambda: signatures.decode_state(definition.config, grid, dtype),
        out_shardings=target.sharding,
    )()
    vocab_size = definition.config.vocab_size
    engine = Engine(graphs, model.parameters, state, target.sharding, vocab_size)
    return Generator(engine, grid, vocab_size, model.eos_ids, model.tokenizer, seed)
