"""The attention kernel of each graph of a grid, chosen before tracing, with a reason.

A kernel states for which platform and phases it exists, and why it refuses a call. The first kernel
in order of preference that accepts a call is chosen, unless a plan names one. Knows nothing of how
kernels work. Guarantees: the choice follows from plan, model and target alone, so the graphs of a
plan are the same wherever it is built; a named kernel that cannot serve a call is an error and is
never replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp

from ..modelzoo import axes
from ..modelzoo.attention.attend import Attend
from ..modelzoo.attention.blockwise import attend_blockwise
from ..modelzoo.cache.kv_cache import num_cache_entries
from ..modelzoo.cache.segments import segment_lengths
from ..modelzoo.config import DecoderConfig
from ..modelzoo.kernels.call import AttentionCall
from ..modelzoo.kernels.cudnn import attend_cudnn, cudnn_refusal
from ..modelzoo.kernels.flash import attend_flash, flash_refusal
from ..modelzoo.kernels.latents import attend_latents, latents_refusal
from ..modelzoo.kernels.splash import attend_splash, splash_refusal
from ..sharding.layout import PHASES
from ..sharding.placement import Placement
from .grids.bucket_grid import BucketGrid
from .grids.prefill_bucket import PrefillBucket
from .grids.prefix_grid import PrefixGrid
from .plan_tables import check_keys

AUTO = "auto"


@dataclass(frozen=True)
class Kernel:
    """One implementation of attention, and the calls that it serves."""

    name: str
    platforms: tuple[str, ...]
    phases: tuple[str, ...]
    refusal: Callable[[AttentionCall], str | None]
    """The reason why the kernel cannot serve a call of its platforms and phases, or None."""
    attend: Callable[[AttentionCall], Attend]
    """The implementation for a call that the kernel serves."""

    def refuses(self, call: AttentionCall, platform: str, phase: str) -> str | None:
        """The reason why the kernel cannot serve a call of a phase on a platform, or None."""
        if platform not in self.platforms:
            return f"it is for {self.platforms[0]}, not for {platform}"
        if phase not in self.phases:
            return f"it is for {self.phases[0]} only"
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
    Kernel("latents", ("tpu",), ("decode",), latents_refusal, lambda call: attend_latents),
    Kernel("xla", ("cpu", "gpu", "tpu"), PHASES, lambda call: None, lambda call: attend_blockwise),
)
"""Kernels in order of preference; the last one serves every call."""


@dataclass(frozen=True)
class AttentionPlan:
    """The kernels that a plan names: the table `[attention]` of its file."""

    prefill: str = AUTO
    """The kernel of prefill graphs: `auto`, `splash`, `flash`, `cudnn` or `xla`."""
    decode: str = AUTO
    """The kernel of decode graphs: `auto`, `latents` or `xla`."""

    def __post_init__(self):
        names = [AUTO, *(kernel.name for kernel in KERNELS)]
        for phase in PHASES:
            if (name := getattr(self, phase)) not in names:
                raise ValueError(
                    f"[attention] {phase}: expected one of {', '.join(names)}, got {name!r}."
                )

    @classmethod
    def from_table(cls, table: object) -> "AttentionPlan":
        """Read the parsed table; raises ValueError that names the wrong key or value."""
        check_keys("[attention]", table, set(), set(PHASES))
        assert isinstance(table, Mapping)
        return cls(**table)


AUTO_ATTENTION = AttentionPlan()


@dataclass(frozen=True)
class Choice:
    """The kernel of a graph, and the reason for it."""

    kernel: str
    reason: str
    attend: Attend

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


@dataclass(frozen=True)
class AttentionChoices:
    """The kernels of a grid: in prefill one for each number of tokens a row, in decode only one."""

    prefill: Mapping[int, Choice]
    decode: Choice | None
    """None for a grid without decode slots."""
    prefix: Choice | None = None
    """The kernel of the graph that computes prefixes; None without prefixes."""

    def report(self) -> dict[str, str]:
        """The kernel of each phase and the reason for it, as text."""
        lengths: dict[str, list[int]] = {}
        for length, choice in self.prefill.items():
            lengths.setdefault(str(choice), []).append(length)
        if len(lengths) > 1:
            parts = [
                f"{', '.join(map(str, tokens))}: {choice}" for choice, tokens in lengths.items()
            ]
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
    *,
    has_codes: bool = False,
) -> AttentionChoices:
    """Choose the kernel of every graph.

    Args:
      config: The model.
      grid: The grid whose graphs need kernels.
      placement: The layout and the platform.
      dtype: Dtype of activations.
      plan: Kernels that the plan names.
      has_codes: Whether the entries of the cache are in codes.

    Raises:
      ValueError: A named kernel cannot serve a graph; the error says why.
    """
    in_order = placement.has_whole("prefill", axes.LENGTH)

    def call_of(bucket: PrefillBucket) -> AttentionCall:
        if (prefixes := grid.prefixes) is not None:
            return _after_prefix(config, dtype, bucket.tokens, prefixes, placement)
        if bucket.chunk is None:
            return _prompt_call(config, dtype, bucket.tokens, in_order)
        num_segments = grid.num_segments(bucket.length)
        return _chunk_call(config, dtype, bucket.chunk, grid.decode_spans, num_segments, placement)

    prompts = {
        bucket.tokens: replace(call_of(bucket), has_codes=has_codes) for bucket in grid.prefill
    }
    prefix = None
    if (prefixes := grid.prefixes) is not None:
        call = _chunk_call(config, dtype, prefixes.chunk, [prefixes.length], 1, placement)
        call = replace(call, has_codes=has_codes)
        prefix = choose(call, placement.platform, "prefill", plan.prefill)
    prefill = {
        tokens: choose(call, placement.platform, "prefill", plan.prefill)
        for tokens, call in prompts.items()
    }
    token = replace(_cache_call(config, dtype, num_queries=1), has_codes=has_codes)
    step = choose(token, placement.platform, "decode", plan.decode)
    return AttentionChoices(prefill, step if grid.decode_slots else None, prefix)


def choose(call: AttentionCall, platform: str, phase: str, asked: str = AUTO) -> Choice:
    """Choose the named kernel, or the first one that serves a call of a phase on a platform.

    Raises:
      ValueError: The named kernel cannot serve the call.
    """
    if asked != AUTO:
        (kernel,) = (kernel for kernel in KERNELS if kernel.name == asked)
        if (refusal := kernel.refuses(call, platform, phase)) is not None:
            raise ValueError(
                f"[attention] {phase}: expected a kernel that can serve it, got {asked!r}: "
                f"{refusal}. Set it to {AUTO!r} or to another kernel."
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


def _prompt_call(
    config: DecoderConfig, dtype: jnp.dtype, num_tokens: int, is_in_order: bool
) -> AttentionCall:
    """Attention of whole prompts to themselves; latents are expanded to heads first."""
    latent = config.latent
    value_dim = config.head_dim if latent is None else latent.value_dim
    call = _call(config, dtype, num_tokens, config.head_dim, value_dim)
    return replace(call, is_in_order=is_in_order)


def _chunk_call(
    config: DecoderConfig,
    dtype: jnp.dtype,
    chunk: int,
    spans: Sequence[int],
    num_segments: int,
    placement: Placement,
) -> AttentionCall:
    """Attention of chunks that end in the last of `num_segments` segments of a cache."""
    if placement.layout is None and placement.mesh.size > 1:
        return _cache_call(config, dtype, chunk)
    prompt_stripes = placement.operations("chunk", config).prompt_stripes
    stripes = placement.cache_stripes
    segments = set()
    for window in set(config.windows):
        num_entries = num_cache_entries(window, longest := spans[-1], stripes)
        lengths = segment_lengths(spans, num_entries)[:num_segments]
        if num_entries == longest and stripes == 1:
            # a chunk does not see entries that it may write
            lengths[-1] -= chunk
        segments |= {length // stripes for length in lengths}
    call = _cache_call(config, dtype, chunk // prompt_stripes.count)
    return replace(call, segments=frozenset(segments) - {0})


def _after_prefix(
    config: DecoderConfig,
    dtype: jnp.dtype,
    num_tokens: int,
    prefixes: PrefixGrid,
    placement: Placement,
) -> AttentionCall:
    """Attention of whole prompts to their prefix and to themselves."""
    stripes = placement.cache_stripes
    entries = {num_cache_entries(window, prefixes.length, stripes) for window in config.windows}
    call = _cache_call(config, dtype, num_tokens // stripes)
    return replace(call, segments=frozenset(count // stripes for count in entries))


def _cache_call(config: DecoderConfig, dtype: jnp.dtype, num_queries: int) -> AttentionCall:
    """Attention to a cache; latents serve as keys and as values."""
    call = _call(config, dtype, num_queries, config.cache_dim, config.cache_dim)
    return replace(call, reads_latents=config.latent is not None)


def _call(
    config: DecoderConfig, dtype: jnp.dtype, num_queries: int, key_dim: int, value_dim: int
) -> AttentionCall:
    windows, scores = frozenset(config.windows), config.attention_scores
    return AttentionCall(num_queries, key_dim, value_dim, dtype, windows, scores, config.sinks)
