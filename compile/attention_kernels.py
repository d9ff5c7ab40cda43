"""Which attention kernel each graph of a grid has: chosen before anything is traced, with a reason.

A kernel serves calls of its platform and says of each that it refuses why; the first in order that
serves a call is chosen, unless a plan asks for one by name. Knows nothing of how kernels work.
Guarantees: the choice follows from plan, model and target alone, so the graphs of a plan are the
same wherever it is built; a kernel that is asked for and cannot serve is an error, never replaced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp

from ..modelzoo import axes
from ..modelzoo.attention import Attend
from ..modelzoo.blockwise import attend_blockwise
from ..modelzoo.config import DecoderConfig, Scores, Window
from ..modelzoo.kernels.call import AttentionCall
from ..modelzoo.kernels.cudnn import attend_cudnn, cudnn_refusal
from ..modelzoo.kernels.flash import attend_flash, flash_refusal
from ..modelzoo.kernels.splash import attend_splash, splash_refusal
from ..modelzoo.kv_cache import kept_entries
from ..modelzoo.segments import segment_lengths
from ..sharding.layout import PHASES
from ..sharding.placement import Placement
from .bucket_grid import BucketGrid
from .plan_tables import check_keys

AUTO = "auto"


@dataclass(frozen=True)
class Kernel:
    """One implementation of attention, and the calls that it serves."""

    name: str
    platforms: tuple[str, ...]
    phases: tuple[str, ...]
    refusal: Callable[[AttentionCall], str | None]
    """Why it cannot serve a call of these, or None."""
    attend: Callable[[AttentionCall], Attend]
    """The implementation for a call that it serves."""

    def refuses(self, call: AttentionCall, platform: str, phase: str) -> str | None:
        """Why it cannot serve a call of a phase on a platform, or None."""
        if platform not in self.platforms:
            return f"it is of {self.platforms[0]}, not of {platform}"
        if phase not in self.phases:
            return f"it is for {self.phases[0]} alone"
        return self.refusal(call)


KERNELS = (
    Kernel(
        "splash",
        ("tpu",),
        ("prefill",),
        splash_refusal,
        lambda call: partial(attend_splash, needs_lse=call.has_sinks),
    ),
    Kernel("flash", ("tpu",), ("prefill",), flash_refusal, lambda call: attend_flash),
    Kernel("cudnn", ("gpu",), ("prefill",), cudnn_refusal, lambda call: attend_cudnn),
    Kernel("xla", ("cpu", "gpu", "tpu"), PHASES, lambda call: None, lambda call: attend_blockwise),
)
"""By preference; the last serves every call."""


@dataclass(frozen=True)
class AttentionPlan:
    """The kernels that a plan asks for by name: the table `[attention]` of its file."""

    prefill: str = AUTO
    """The kernel of prefill graphs: `auto`, `splash`, `flash`, `cudnn` or `xla`."""
    decode: str = AUTO
    """The kernel of decode graphs: `auto` or `xla`."""

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
    """The kernels of a grid: of a prefill by its row's tokens, of decode one for all spans."""

    prefill: Mapping[int, Choice]
    decode: Choice | None
    """None of a grid without decode slots."""

    def report(self) -> dict[str, str]:
        """What was chosen in each phase and why, in words."""
        lengths: dict[str, list[int]] = {}
        for length, choice in self.prefill.items():
            lengths.setdefault(str(choice), []).append(length)
        if len(lengths) > 1:
            parts = [f"{', '.join(map(str, of))}: {choice}" for choice, of in lengths.items()]
        else:
            parts = list(lengths)
        decode = {} if self.decode is None else {"decode": str(self.decode)}
        return {"prefill": "; ".join(parts), **decode}

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
    in_order = placement.has_whole("prefill", axes.LENGTH)
    prompts = {
        bucket.tokens: _of_prompts(config, dtype, bucket.tokens, in_order)
        if bucket.chunk is None
        else _of_chunk(
            config, dtype, bucket.chunk, grid.num_segments(bucket.length), grid, placement
        )
        for bucket in grid.prefill
    }
    prefill = {
        tokens: choose(call, placement.platform, "prefill", plan.prefill)
        for tokens, call in prompts.items()
    }
    step = choose(
        _of_cache(config, dtype, num_queries=1), placement.platform, "decode", plan.decode
    )
    return AttentionChoices(prefill, step if grid.decode_slots else None)


def choose(call: AttentionCall, platform: str, phase: str, asked: str = AUTO) -> Choice:
    """The first kernel that serves a call of a phase, or the one that is asked for by name."""
    if asked != AUTO:
        (kernel,) = (kernel for kernel in KERNELS if kernel.name == asked)
        if (refusal := kernel.refuses(call, platform, phase)) is not None:
            raise ValueError(
                f"[attention] {phase}: expected a kernel that can serve it, got {asked!r}: "
                f"{refusal}. Ask for {AUTO!r}, or another one."
            )
        return Choice(kernel.name, "as the plan asks", kernel.attend(call))
    refusals = []
    for kernel in KERNELS:
        if platform not in kernel.platforms or phase not in kernel.phases:
            continue
        if (refusal := kernel.refusal(call)) is None:
            reason = "; ".join(refusals) or f"{platform}, {call}"
            return Choice(kernel.name, reason, kernel.attend(call))
        refusals.append(f"{kernel.name}: {refusal}")
    raise AssertionError("the last kernel serves every call")


def _of_prompts(
    config: DecoderConfig, dtype: jnp.dtype, num_tokens: int, is_in_order: bool
) -> AttentionCall:
    """Attention of prompts to themselves; of latents, heads are made first."""
    latent = config.latent
    value_dim = config.head_dim if latent is None else latent.value_dim
    sizes = num_tokens, config.head_dim, value_dim
    return AttentionCall(*sizes, dtype, *_options(config), is_in_order=is_in_order)


def _of_chunk(
    config: DecoderConfig,
    dtype: jnp.dtype,
    chunk: int,
    num_segments: int,
    grid: BucketGrid,
    placement: Placement,
) -> AttentionCall:
    """Attention of chunks that end in the last of so many segments."""
    if placement.layout is None and placement.mesh.size > 1:
        return _of_cache(config, dtype, chunk)
    lies, stripes = placement.operations("chunk", config).prompt_stripes, placement.cache_stripes
    segments = set()
    for window in set(config.windows):
        kept = kept_entries(window, longest := grid.decode_spans[-1], stripes)
        lengths = segment_lengths(grid.decode_spans, kept)[:num_segments]
        if kept == longest and stripes == 1:  # a chunk sees nothing of the entries that it may fill
            lengths[-1] -= chunk
        segments |= {length // stripes for length in lengths}
    call = _of_cache(config, dtype, chunk // lies.count)
    return replace(call, segments=frozenset(segments) - {0})


def _of_cache(config: DecoderConfig, dtype: jnp.dtype, num_queries: int) -> AttentionCall:
    """Attention to a cache; latents are its keys and values."""
    sizes = num_queries, config.kept_dim, config.kept_dim
    return AttentionCall(*sizes, dtype, *_options(config))


def _options(config: DecoderConfig) -> tuple[frozenset[Window], Scores, bool]:
    return frozenset(config.windows), config.attention_scores, config.sinks
