"""Which attention kernel each graph of a grid has: chosen before anything is traced, with a reason.

A kernel serves calls of its platform and says of each that it refuses why; the first in order that
serves a call is chosen, unless a plan asks for one by name. Knows nothing of how kernels work.
Guarantees: the choice follows from plan, model and target alone, so the graphs of a plan are the
same wherever it is built; a kernel that is asked for and cannot serve is an error, never replaced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp

from ..modelzoo.attention import Attend
from ..modelzoo.blockwise import attend_blockwise
from ..modelzoo.config import DecoderConfig
from ..modelzoo.kernels.call import AttentionCall
from ..modelzoo.kernels.cudnn import attend_cudnn, cudnn_refusal
from ..modelzoo.kernels.splash import attend_splash, splash_refusal
from ..sharding.layout import PHASES
from ..sharding.placement import Placement
from .bucket_grid import BucketGrid
from .plan_tables import check_keys

AUTO = "auto"


@dataclass(frozen=True)
class Kernel:
    """One implementation of attention, and the calls that it serves."""

    name: str
    platform: str | None
    """None for one that every platform has."""
    refusal: Callable[[AttentionCall], str | None]
    attend: Callable[[AttentionCall], Attend]
    """The implementation for a call that it serves."""

    def refuses(self, call: AttentionCall, platform: str) -> str | None:
        """Why it cannot serve a call on a platform, or None."""
        if self.platform not in (None, platform):
            return f"it is of {self.platform}, not of {platform}"
        return self.refusal(call)


KERNELS = (
    Kernel(
        "splash",
        "tpu",
        splash_refusal,
        lambda call: partial(attend_splash, needs_lse=call.has_sinks),
    ),
    Kernel("cudnn", "gpu", cudnn_refusal, lambda call: attend_cudnn),
    Kernel("xla", None, lambda call: None, lambda call: attend_blockwise),
)
"""By preference; the last serves every call."""


@dataclass(frozen=True)
class AttentionPlan:
    """The kernels that a plan asks for by name: the table `[attention]` of its file."""

    prefill: str = AUTO
    decode: str = AUTO

    def __post_init__(self):
        names = [AUTO, *(kernel.name for kernel in KERNELS)]
        for phase in PHASES:
            if (asked := getattr(self, phase)) not in names:
                raise ValueError(
                    f"[attention] {phase}: expected one of {', '.join(names)}, got {asked!r}."
                )

    @classmethod
    def from_table(cls, table: object) -> "AttentionPlan":
        """Read the parsed table; raises ValueError naming what is wrong."""
        check_keys("[attention]", table, set(), set(PHASES))
        assert isinstance(table, Mapping)
        return cls(**table)


AUTO_ATTENTION = AttentionPlan()


@dataclass(frozen=True)
class Choice:
    """A kernel for a graph, and why it is this one."""

    kernel: str
    reason: str
    attend: Attend

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


@dataclass(frozen=True)
class AttentionChoices:
    """The kernels of a grid: of a prefill by its bucket's length, of decode one for all spans."""

    prefill: Mapping[int, Choice]
    decode: Choice

    def report(self) -> dict[str, str]:
        """What was chosen in each phase and why, in words."""
        lengths: dict[str, list[int]] = {}
        for length, choice in self.prefill.items():
            lengths.setdefault(str(choice), []).append(length)
        if len(lengths) > 1:
            parts = [f"{', '.join(map(str, of))}: {choice}" for choice, of in lengths.items()]
        else:
            parts = list(lengths)
        return {"prefill": "; ".join(parts), "decode": str(self.decode)}

    def __str__(self) -> str:
        return "attention: " + ", ".join(f"{phase} {text}" for phase, text in self.report().items())


def choose_kernels(
    config: DecoderConfig,
    grid: BucketGrid,
    placement: Placement,
    dtype: jnp.dtype,
    plan: AttentionPlan = AUTO_ATTENTION,
) -> AttentionChoices:
    """The kernel of every graph; raises ValueError where one that is asked for cannot serve."""
    reads_cache = grid.chunk is not None
    is_in_order = placement.has_whole_prompts and not reads_cache
    prompts = {
        bucket.length: _call(config, dtype, grid.tokens_per_row(bucket), reads_cache, is_in_order)
        for bucket in grid.prefill
    }
    prefill = {
        length: choose(call, placement.platform, plan.prefill, f"prefill of {length} tokens")
        for length, call in prompts.items()
    }
    step = _call(config, dtype, 1, reads_cache=True, is_in_order=False)
    return AttentionChoices(prefill, choose(step, placement.platform, plan.decode, "decode"))


def choose(call: AttentionCall, platform: str, asked: str = AUTO, graph: str = "") -> Choice:
    """The first kernel that serves a call on a platform, or the one that is asked for by name."""
    if asked != AUTO:
        (kernel,) = (kernel for kernel in KERNELS if kernel.name == asked)
        if (refusal := kernel.refuses(call, platform)) is not None:
            raise ValueError(
                f"[attention] {graph}: expected a kernel that can serve it, got {asked!r}: "
                f"{refusal}. Ask for {AUTO!r}, or another one."
            )
        return Choice(kernel.name, "as the plan asks", kernel.attend(call))
    refusals = []
    for kernel in (kernel for kernel in KERNELS if kernel.platform in (None, platform)):
        if (refusal := kernel.refusal(call)) is None:
            reason = "; ".join(refusals) or f"{platform}, {call}"
            return Choice(kernel.name, reason, kernel.attend(call))
        refusals.append(f"{kernel.name}: {refusal}")
    raise AssertionError("the last kernel serves every call")


def _call(
    config: DecoderConfig,
    dtype: jnp.dtype,
    num_queries: int,
    reads_cache: bool,
    is_in_order: bool,
) -> AttentionCall:
    """Attention of a graph's layers; a cache of latents has these as keys and values."""
    key_dim = value_dim = config.kept_dim
    if config.latent is not None and not reads_cache:
        key_dim, value_dim = config.head_dim, config.latent.value_dim
    return AttentionCall(
        num_queries,
        key_dim,
        value_dim,
        dtype,
        frozenset(config.windows),
        config.attention_scores,
        config.sinks,
        is_in_order,
    )
