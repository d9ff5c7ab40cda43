"""Counters of a run per graph: calls, seconds, and real and computed tokens.

Padding is reported as usual: real tokens (prompt tokens, emitted tokens) against computed tokens
(B * T of every prefill call, slots * steps of every decode call), with prefill padding, idle slots
and overshoot counted separately. Overshoot is the tokens that a live slot computed without emitting
them, or emitted past a stop string. Does not know about devices.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from ...compile.expert_plan import ExpertPlan
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from ...modelzoo.moe.call import ExpertUse
from ...modelzoo.moe_config import Dispatch, Routing
from .actions import NOTHING_READ, PrefillAction, ReadEntries


@dataclass
class ExpertTotals:
    """Counts of one phase over all its calls; arrays after the first `add`, else 0.

    A choice is one expert of one token in one layer; padding tokens make none. Rows are the rows
    that the experts' products ran over, so `rows - (choices - dropped)` of them are padding. A
    capacity reserves rows for each expert. If tokens are exchanged between devices, all of these
    rows run; on one device, only tiles with a token run. Sums are 64-bit integers.
    """

    load_LE: Any = 0
    rows_LE: Any = 0
    dropped_LE: Any = 0

    def add(self, use: ExpertUse) -> None:
        """Add the counts of one call."""
        load_LE, rows_LE, dropped_LE = (x.sum(axis=1, dtype=np.int64) for x in use)
        self.load_LE += load_LE
        self.rows_LE += rows_LE
        self.dropped_LE += dropped_LE


@dataclass(frozen=True)
class ExpertSetup:
    """The model's expert configuration and the plan's dispatch, for the report of a run."""

    routing: Routing
    layers: tuple[int, ...]
    """The indices of the sparse layers."""
    plan: ExpertPlan

    def report(self, totals: Mapping[str, ExpertTotals]) -> dict[str, Any]:
        """The counts of each phase that ran, as a dict that can be written as JSON."""
        return {
            "num_experts": self.routing.num_experts,
            "num_chosen": self.routing.num_chosen,
            "overflow": self.plan.overflow,
            **{
                phase: self._phase(getattr(self.plan, phase), phase_totals)
                for phase, phase_totals in totals.items()
            },
        }

    def _phase(self, dispatch: Dispatch, totals: ExpertTotals) -> dict[str, Any]:
        choices, rows = int(totals.load_LE.sum()), int(totals.rows_LE.sum())
        dropped = int(totals.dropped_LE.sum())
        return {
            "dispatch": dispatch.kind,
            "capacity_factor": dispatch.capacity_factor,
            "choices": choices,
            "dropped": dropped,
            "rows": rows,
            "padded_share": 1 - (choices - dropped) / rows if rows else 0.0,
            "layers": [
                _layer(*layer_counts)
                for layer_counts in zip(
                    self.layers, totals.load_LE, totals.rows_LE, totals.dropped_LE, strict=True
                )
            ],
        }


def _layer(
    layer: int, load_E: np.ndarray, rows_E: np.ndarray, dropped_E: np.ndarray
) -> dict[str, Any]:
    """The counts of one sparse layer; balance is the largest load over the mean load."""
    mean = float(load_E.mean())
    return {
        "layer": layer,
        "load": load_E.tolist(),
        "rows": rows_E.tolist(),
        "dropped": dropped_E.tolist(),
        "balance": float(load_E.max()) / mean if mean else None,
    }


def prefill_name(bucket: PrefillBucket, *, is_scored: bool) -> str:
    """The name under which the calls of a prefill graph are counted."""
    return f"{bucket}{' scored' if is_scored else ''}"


class RunFigures(NamedTuple):
    """The figures of a run at one moment, for people."""

    tokens: int
    """Tokens that decode calls have emitted."""
    used_slots: int
    slots: int
    padding_waste: float | None
    """Share of the computed tokens that are padding; None before the first call."""


class _Use:
    """Counters of the calls of one graph, which can be added and scaled."""

    def add(self, other: Self) -> None:
        """Add the counters of other calls."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def scaled(self, factor: float) -> Self:
        """The counters multiplied by a factor; integers stay integers."""
        scaled = {name: _scaled(value, factor) for name, value in vars(self).items()}
        return type(self)(**scaled)

    def report(self, *, has_pages: bool) -> dict[str, Any]:
        """The counters as a dict that can be written as JSON."""
        counters = dict(vars(self))
        if not has_pages:
            for name in ("read_entries", "seen_entries"):
                counters.pop(name, None)
        return counters


@dataclass
class PrefillUse(_Use):
    """Counters of one prefill bucket."""

    calls: int = 0
    rows: int = 0
    real_tokens: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0
    read_entries: int = 0
    """In a packed grid, the entries in whole pages that pieces read, each up to its own end."""


@dataclass
class DecodeUse(_Use):
    """Counters of decode calls."""

    calls: int = 0
    steps: int = 0
    emitted_tokens: int = 0
    live_tokens: int = 0
    """Slot-steps of slots that held a sequence, whether or not it emitted."""
    computed_tokens: int = 0
    seconds: float = 0.0
    read_entries: int = 0
    """In a grid with pages, the entries in whole pages that live rows read, over all steps. Those
    that a group of rows reads once are counted once."""
    seen_entries: int = 0
    """The same, but those that a group of rows reads once are counted for each row."""


@dataclass
class PageUse(_Use):
    """Counters of rows in a grid with pages."""

    waits: int = 0
    """The rows that waited for pages, summed over decode calls."""
    replays: int = 0
    """The sequences that gave their slots back and started again."""
    recomputed_prompt_tokens: int = 0
    """The prompt tokens that replays computed again."""
    recomputed_output_tokens: int = 0
    """The tokens that replays emitted again."""


@dataclass
class EngineMetrics:
    """Counters of one engine, from its first action on."""

    prefill: dict[str, PrefillUse] = field(default_factory=lambda: defaultdict(PrefillUse))
    """By the name of the graph."""
    decode: DecodeUse = field(default_factory=DecodeUse)
    forks: int = 0
    fork_seconds: float = 0.0
    """Host seconds of forks; their device seconds are part of the next call's seconds."""
    copied_tokens: int = 0
    """The prompt tokens of requests that were copied from shared prefixes."""
    prefix_tokens: int = 0
    """The prompt tokens that were computed for shared prefixes."""
    cut_tokens: int = 0
    """The number of tokens that were emitted past a stop string and cut."""
    experts: dict[str, ExpertTotals] = field(default_factory=lambda: defaultdict(ExpertTotals))
    """Expert counts by phase; empty for a dense model."""
    pages: PageUse = field(default_factory=PageUse)
    """All 0 in a grid without pages."""
    grid: BucketGrid | None = None
    """The grid of rows that decode; None for texts that are embedded."""

    @property
    def has_pages(self) -> bool:
        """Whether the report has the counters of pages."""
        return self.grid is not None and self.grid.pages is not None

    def count_prefill(self, name: str, use: PrefillUse, *, prefix_tokens: int = 0) -> None:
        """Count a call that prefilled prompts or chunks of prompts, under a name of its graph.

        Of the real tokens, `prefix_tokens` belong to shared prefixes.
        """
        self.prefix_tokens += prefix_tokens
        self.prefill[name].add(use)

    def count_prompts(self, action: PrefillAction, seconds: float = 0.0) -> None:
        """Count a call that prefilled the prompts of an action."""
        bucket, rows = action.bucket, action.rows
        again = [row for row in rows if row.num_known is not None]
        num_again = sum(row.count for row in again)
        num_tokens = sum(row.count for row in rows) - num_again
        num_computed = bucket.batch * bucket.tokens
        self.pages.recomputed_prompt_tokens += num_again
        self.pages.replays += sum(row.start == 0 for row in again)
        self.count_prefill(
            prefill_name(bucket, is_scored=action.is_scored),
            PrefillUse(1, len(rows), num_tokens, num_computed, seconds, action.read_entries),
            prefix_tokens=sum(row.count for row in rows if row.is_of_prefix),
        )

    def count_decode(
        self,
        *,
        steps: int,
        emitted: int,
        live_slots: int,
        slots: int,
        seconds: float = 0.0,
        read: ReadEntries = NOTHING_READ,
    ) -> None:
        """Count one decode call: steps that ran, and tokens that its live slots emitted."""
        live_tokens, computed_tokens = steps * live_slots, steps * slots
        self.decode.add(DecodeUse(1, steps, emitted, live_tokens, computed_tokens, seconds, *read))

    def count_waits(self, num_waiting: int, num_known: int) -> None:
        """Count the rows that wait for pages during a decode call, and the tokens that it emits
        again, which do not count as emitted."""
        self.pages.waits += num_waiting
        self.pages.recomputed_output_tokens += num_known

    def count_fork(self, num_copied: int, seconds: float = 0.0) -> None:
        """Count one copy of a slot, and the tokens of a request that it takes from a prefix."""
        self.forks += 1
        self.copied_tokens += num_copied
        self.fork_seconds += seconds

    def scaled(self, factor: float) -> "EngineMetrics":
        """The counters multiplied by a factor; integers stay integers."""
        scaled = {name: _scaled(value, factor) for name, value in vars(self).items()}
        return EngineMetrics(**scaled)

    @property
    def padding(self) -> dict[str, int]:
        """Real and computed tokens, and the computed tokens that are not real, by kind."""
        prefill_computed = sum(use.computed_tokens for use in self.prefill.values())
        decode_computed, live = self.decode.computed_tokens, self.decode.live_tokens
        prompts_again = self.pages.recomputed_prompt_tokens
        outputs_again = self.pages.recomputed_output_tokens
        of_pages = {"recomputed_tokens": prompts_again + outputs_again} if self.has_pages else {}
        return {
            "real_tokens": self._prompt_tokens + self.emitted_tokens,
            "computed_tokens": prefill_computed + decode_computed,
            "prefill_padding_tokens": prefill_computed - self._prompt_tokens - prompts_again,
            "idle_slot_tokens": decode_computed - live,
            "overshoot_tokens": live - self.emitted_tokens - outputs_again,
            **of_pages,
        }

    @property
    def padding_waste(self) -> float | None:
        """Share of the computed tokens that are padding; None before the first call."""
        padding = self.padding
        computed = padding["computed_tokens"]
        return 1 - padding["real_tokens"] / computed if computed else None

    def report(self) -> dict[str, Any]:
        """The counters and their totals, as a dict that can be written as JSON."""
        prefill_seconds = sum(use.seconds for use in self.prefill.values())
        of_pages = {"waits": self.pages.waits, "replays": self.pages.replays}
        decode = {}
        if self.decode.calls:
            assert self.grid is not None, "the session has set the grid of its slots"
            decode = {str(self.grid.max_length): self.decode}
        return {
            "buckets": {
                phase: {name: use.report(has_pages=self.has_pages) for name, use in uses.items()}
                for phase, uses in (("prefill", self.prefill), ("decode", decode))
            },
            "padding": self.padding,
            **(of_pages if self.has_pages else {}),
            "shared_prefixes": self.shared_prefixes,
            "phases": {
                "prefill_seconds": prefill_seconds,
                "prefill_tokens_per_second": _rate(self._prompt_tokens, prefill_seconds),
                "fork_seconds": self.fork_seconds,
                "decode_seconds": self.decode.seconds,
                "decode_tokens_per_second": _rate(self.emitted_tokens, self.decode.seconds),
            },
        }

    @property
    def shared_prefixes(self) -> dict[str, int]:
        """The prompt tokens of shared prefixes: computed, copied by rows, and saved."""
        return {
            "computed_tokens": self.prefix_tokens,
            "copied_tokens": self.copied_tokens,
            "saved_tokens": self.saved_tokens,
        }

    @property
    def saved_tokens(self) -> int:
        """The prompt tokens that were not computed, because rows share prefixes."""
        return self.copied_tokens - self.prefix_tokens

    @property
    def _prompt_tokens(self) -> int:
        return sum(use.real_tokens for use in self.prefill.values())

    @property
    def emitted_tokens(self) -> int:
        """The number of emitted tokens, without those past a stop string."""
        return self.decode.emitted_tokens - self.cut_tokens


def _scaled(value: Any, factor: float) -> Any:
    """Counters multiplied by a factor, in the tables and classes that have them."""
    if isinstance(value, dict):
        scaled = value.copy()
        scaled.update({key: _scaled(x, factor) for key, x in value.items()})
        return scaled
    if isinstance(value, _Use):
        return value.scaled(factor)
    if isinstance(value, BucketGrid | None):
        return value
    return round(value * factor) if isinstance(value, int) else value * factor


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None
