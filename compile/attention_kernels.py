"""The attention kernel of each graph of a grid, chosen before tracing, with a reason.

A kernel states for which platform and phases it exists, and why it refuses a call. The first kernel
in order of preference that accepts a call is chosen, unless a plan names one. Knows nothing of how
kernels work. Guarantees: the choice follows from plan, model and target alone, so the graphs of a
plan are the same wherever it is built; a named kernel that cannot serve a call is an error and is
never replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..modelzoo import axes
from ..modelzoo.attention.attend import Attend
from ..modelzoo.attention.blockwise import attend_blockwise
from ..modelzoo.attention.paged import PageReader, attend_in_groups
from ..modelzoo.config import Arrangement, DecoderConfig
from ..modelzoo.config_values import check_choice
from ..modelzoo.cpu.objects import is_loaded
from ..modelzoo.errors import UserError
from ..modelzoo.kernels.call import AttentionCall
from ..modelzoo.kernels.cpu_attention import (
    STEP,
    attend_pages_cpu,
    attend_prompts_cpu,
    cpu_refusal,
)
from ..modelzoo.kernels.cudnn import attend_cudnn, cudnn_refusal
from ..modelzoo.kernels.paged_gpu import attend_pages_gpu, paged_gpu_refusal
from ..modelzoo.kernels.paged_tpu import attend_pages_tpu, paged_tpu_refusal
from ..modelzoo.kernels.splash import attend_splash, splash_refusal
from ..modelzoo.layer_config import PLAIN_ROPE, Attention, Window
from ..sharding.layout import PHASES
from ..sharding.placement import Placement
from .device_kinds import kind_of
from .grids.bucket_grid import BucketGrid
from .grids.prefill_bucket import PrefillBucket
from .plan_tables import PlanTable, table_lines

AUTO = "auto"


@dataclass(frozen=True)
class Kernel:
    """One implementation of attention, and the calls that it serves."""

    name: str
    platforms: tuple[str, ...]
    refusal: Callable[[AttentionCall], str | None]
    """The reason why the kernel cannot serve a call on its platforms, or None."""
    attend: Callable[[Sequence[AttentionCall]], Attend | PageReader]
    """The implementation for calls that the kernel serves."""

    def refuses(self, calls: Sequence[AttentionCall], platform: str) -> str | None:
        """The reason why the kernel cannot serve calls on a platform, or None."""
        if platform not in self.platforms:
            return f"it is for {self.platforms[0]}, not for {platform}"
        return next((found for call in calls if (found := self.refusal(call)) is not None), None)


PORTABLE = "xla"
"""The name of the implementations that run anywhere."""
KERNELS = (
    Kernel(
        "splash",
        ("tpu",),
        splash_refusal,
        lambda calls: partial(attend_splash, needs_lse=any(call.has_sinks for call in calls)),
    ),
    Kernel("cudnn", ("gpu",), cudnn_refusal, lambda calls: attend_cudnn),
    Kernel("numba", ("cpu",), cpu_refusal, lambda calls: attend_prompts_cpu),
    Kernel(
        PORTABLE,
        ("cpu", "gpu", "tpu"),
        lambda call: None,
        lambda calls: attend_blockwise,
    ),
)
"""Kernels of whole prompts in order of preference; the last one serves every call."""
GROUP_ON_CPU = 1
"""The rows of a group that attends to pages on the CPU. A group has as many turns as its longest
row has pages, so that a group of one row reads nothing that is dead. Larger groups make larger
products, which are no faster on a core."""
PAGE_KERNELS = (
    Kernel("paged", ("gpu",), paged_gpu_refusal, lambda calls: PageReader(attend_pages_gpu)),
    Kernel("paged", ("tpu",), paged_tpu_refusal, lambda calls: PageReader(attend_pages_tpu)),
    Kernel("numba", ("cpu",), cpu_refusal, lambda calls: PageReader(attend_pages_cpu)),
    Kernel(
        PORTABLE,
        ("cpu",),
        lambda call: None,
        lambda calls: PageReader(partial(attend_in_groups, group=GROUP_ON_CPU)),
    ),
    Kernel(
        PORTABLE,
        ("gpu", "tpu"),
        lambda call: None,
        lambda calls: PageReader(attend_in_groups),
    ),
)
"""Kernels of decode and of pieces of prompts, which read pages, in order of preference."""


@dataclass(frozen=True)
class AttentionPlan(PlanTable, name="attention"):
    """The kernels that a plan names: the table `[attention]` of its file."""

    prefill: str = AUTO
    """The kernel of prefill graphs: `auto`, `splash`, `cudnn`, `paged`, `numba` or `xla`."""
    decode: str = AUTO
    """The kernel of decode graphs: `auto`, `paged`, `numba` or `xla`."""

    def __post_init__(self):
        names = list(dict.fromkeys([AUTO, *(x.name for x in (*KERNELS[:-1], *PAGE_KERNELS))]))
        for phase in PHASES:
            check_choice(f"[attention] {phase}", getattr(self, phase), names)

    def to_lines(self) -> list[str]:
        """The table as lines of TOML; none if it names no kernel."""
        return [] if self == AUTO_ATTENTION else table_lines(self.NAME, asdict(self))


AUTO_ATTENTION = AttentionPlan()


@dataclass(frozen=True)
class Choice:
    """The kernel of a graph, and the reason for it."""

    kernel: str
    reason: str
    attend: Attend | PageReader

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


@dataclass(frozen=True)
class AttentionChoices:
    """The kernels of a grid: in prefill one for each number of tokens a row, in decode only one."""

    prefill: Mapping[int, Choice]
    decode: Choice | None
    """None for a grid without decode slots."""

    def are_all(self, kernel: str) -> bool:
        """Whether one kernel serves all graphs."""
        choices = [*self.prefill.values(), *([] if self.decode is None else [self.decode])]
        return all(choice.kernel == kernel for choice in choices)

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


class PagePlace(NamedTuple):
    """The devices of a cache in pages, and its form."""

    device: str | None
    """The kind of the devices; None or empty if it is not known."""
    stripes: int
    """The number of devices along the entries of a page."""
    arrangement: Arrangement
    is_placed: bool = True
    """Whether there is one device, or a layout for several."""


def choose_kernels(
    config: DecoderConfig,
    grid: BucketGrid,
    placement: Placement,
    dtype: jnp.dtype,
    plan: AttentionPlan = AUTO_ATTENTION,
    *,
    cache_codes: str | None = None,
) -> AttentionChoices:
    """Choose the kernel of every graph.

    Args:
      config: The model.
      grid: The grid whose graphs need kernels.
      placement: The layout and the platform.
      dtype: Dtype of activations.
      plan: Kernels that the plan names.
      cache_codes: The codes of the cache; None for entries that are not in codes.

    Raises:
      ValueError: A named kernel cannot serve a graph; the error says why.
    """

    def choose_for(
        phase: str,
        call_of: Callable[[Sequence[Attention]], AttentionCall],
        kernels: Sequence[Kernel] = KERNELS,
    ) -> Choice:
        calls = [replace(call_of(kind), codes=cache_codes) for kind in _kinds(config)]
        return choose(calls, placement.platform, phase, getattr(plan, phase), kernels)

    arrangement = placement.arrangement(config, cache_codes=cache_codes)
    is_placed = placement.layout is not None or placement.mesh.size == 1
    kind, stripes = kind_of(placement.mesh.devices.flat), placement.cache_stripes
    place = PagePlace(kind, stripes, arrangement, is_placed)
    paged = partial(_paged_call, grid=grid, place=place, dtype=dtype)

    def choose_paged(phase: str, num_queries: int, num_rows: int) -> Choice:
        call_of = partial(paged, num_queries=num_queries, num_rows=num_rows)
        return choose_for(phase, call_of, PAGE_KERNELS)

    def choose_prefill(bucket: PrefillBucket) -> Choice:
        if bucket.chunk is not None:
            return choose_paged("prefill", bucket.chunk, bucket.batch)
        in_order = placement.has_whole("prefill", axes.LENGTH)
        whole = partial(_prompt_call, dtype=dtype, num_tokens=bucket.tokens, is_in_order=in_order)
        return choose_for("prefill", whole)

    prefill = {bucket.tokens: choose_prefill(bucket) for bucket in grid.prefill}
    decode = choose_paged("decode", 1, grid.decode_slots) if grid.decode_slots else None
    return AttentionChoices(prefill, decode)


def cache_dtype(
    config: DecoderConfig,
    platform: str,
    dtype: DTypeLike,
    *,
    cache_codes: str | None = None,
    choices: AttentionChoices | None = None,
) -> jnp.dtype:
    """Dtype of cache entries: that of the run, or float32 on the CPU without our kernels.

    NOTE: To write an entry into a bfloat16 array, XLA for CPU converts the whole array to float32
    and back.

    Args:
      config: The model.
      platform: The platform.
      dtype: Dtype of activations.
      cache_codes: The codes of the cache; None for entries that are not in codes.
      choices: The kernels of a grid. Without them, pages are expected to have a multiple of
        `cpu_attention.STEP` entries.
    """
    if platform != "cpu":
        return jnp.dtype(dtype)
    has_latents = any(attention.latent for attention in config.attentions)
    if choices is not None:
        has_kernels = choices.are_all("numba")
    else:
        has_kernels = is_loaded() and not any(x.head_dim % STEP for x in config.attentions)
    serves = has_kernels and cache_codes is None and not has_latents
    return jnp.dtype(dtype if serves else jnp.float32)


def choose(
    calls: Sequence[AttentionCall],
    platform: str,
    phase: str,
    asked: str = AUTO,
    kernels: Sequence[Kernel] = KERNELS,
) -> Choice:
    """Choose the named kernel, or the first one that serves the calls of a phase on a platform.

    Args:
      calls: The attention of a graph; one call for each kind of layer.
      platform: The platform.
      phase: The phase.
      asked: The name of the kernel.
      kernels: The kernels to choose from, in order of preference.

    Raises:
      ValueError: The named kernel cannot serve a call.
    """
    if asked != AUTO:
        named = [kernel for kernel in kernels if kernel.name == asked]
        own = [kernel for kernel in named if platform in kernel.platforms]
        kernel = next(iter(own or named), None)
        if kernel is None:
            refusal = "it only reads pages, in decode or in chunks (buckets.chunk)"
            if kernels is PAGE_KERNELS:
                refusal = "it does not read pages, as decode and chunks do"
        else:
            refusal = kernel.refuses(calls, platform)
        if kernel is None or refusal is not None:
            raise UserError(
                f"[attention] {phase}: expected a kernel that can serve it, got {asked!r}: "
                f"{refusal}. Set it to {AUTO!r} or to another kernel."
            )
        return Choice(kernel.name, "as the plan asks", kernel.attend(calls))
    refusals = []
    for kernel in kernels:
        if platform not in kernel.platforms:
            continue
        if (refusal := kernel.refuses(calls, platform)) is None:
            reason = "; ".join(refusals) or f"{platform}, {'; '.join(map(str, calls))}"
            return Choice(kernel.name, reason, kernel.attend(calls))
        refusals.append(f"{kernel.name}: {refusal}")
    raise AssertionError("the last kernel serves every call")


def _kinds(config: DecoderConfig) -> list[list[Attention]]:
    """The attentions of a model, those together that a kernel sees alike except for windows."""
    kinds: dict[Attention, list[Attention]] = {}
    for attention in config.attentions:
        alike = replace(attention, window=None, rope=PLAIN_ROPE)
        kinds.setdefault(alike, []).append(attention)
    return list(kinds.values())


def _prompt_call(
    kind: Sequence[Attention], dtype: jnp.dtype, num_tokens: int, is_in_order: bool
) -> AttentionCall:
    """Attention of whole prompts to themselves; latents are expanded to heads first."""
    latent, key_dim = kind[0].latent, kind[0].head_dim
    call = _call(kind, dtype, num_tokens, key_dim, latent.value_dim if latent else key_dim)
    return replace(call, is_in_order=is_in_order)


def _paged_call(
    kind: Sequence[Attention],
    grid: BucketGrid,
    num_queries: int,
    num_rows: int,
    place: PagePlace,
    dtype: jnp.dtype,
) -> AttentionCall:
    """Attention to pages, with the heads that they have; latents serve as keys and as values."""
    size = place.arrangement.cache_dim(kind[0])
    return replace(
        _call(kind, dtype, num_queries, size, size),
        splits=kind[0].entry_splits,
        group=kind[0].heads_per_kv,
        device=place.device,
        stripes=place.stripes,
        is_placed=place.is_placed,
        page=grid.page,
        codes=place.arrangement.cache_codes,
        table=num_rows * grid.num_pages(grid.max_length),
    )


def _call(
    kind: Sequence[Attention], dtype: jnp.dtype, num_queries: int, key_dim: int, value_dim: int
) -> AttentionCall:
    scores, has_sinks = kind[0].scaled, kind[0].has_sinks
    return AttentionCall(num_queries, key_dim, value_dim, dtype, _windows(kind), scores, has_sinks)


def _windows(kind: Sequence[Attention]) -> frozenset[Window]:
    return frozenset(attention.window for attention in kind)
