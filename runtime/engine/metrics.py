"""What a run did: calls, seconds and tokens, real and computed, per graph.

Knows nothing of devices. Padding is stated as the field argues about it: real tokens (prompt
tokens, emitted tokens) against computed ones (B * T of every prefill call, slots * steps of every
decode call), with prefill padding, idle slots and overshoot apart. Overshoot is what a live slot
computed without emitting, or emitted past a stop string.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ...compile.grids.bucket_grid import PrefillBucket
from .expert_use import ExpertTotals


@dataclass
class PrefillUse:
    """Use of one prefill bucket."""

    calls: int = 0
    rows: int = 0
    real_tokens: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0


@dataclass
class DecodeUse:
    """Use of one decode span."""

    calls: int = 0
    steps: int = 0
    emitted_tokens: int = 0
    live_tokens: int = 0
    """Slot-steps of slots that held a row, whether or not it emitted."""
    computed_tokens: int = 0
    seconds: float = 0.0


@dataclass
class EngineMetrics:
    """Counters of one engine, from its first action."""

    prefill: dict[str, PrefillUse] = field(default_factory=lambda: defaultdict(PrefillUse))
    decode: dict[str, DecodeUse] = field(default_factory=lambda: defaultdict(DecodeUse))
    forks: int = 0
    fork_seconds: float = 0.0
    """Seconds of forks on the host; the next call counts those of the device."""
    cut_tokens: int = 0
    """Emitted past a stop string, and cut."""
    experts: dict[str, ExpertTotals] = field(default_factory=lambda: defaultdict(ExpertTotals))
    """By phase, for a model with experts."""

    def count_prefill(
        self,
        bucket: PrefillBucket,
        *,
        is_scored: bool,
        rows: int,
        real_tokens: int,
        computed_tokens: int,
        seconds: float,
    ) -> None:
        """Note one call that prefilled prompts, or chunks of them."""
        kind = " scored" if is_scored else ""
        use = self.prefill[f"{bucket}{kind}"]
        use.calls += 1
        use.rows += rows
        use.real_tokens += real_tokens
        use.computed_tokens += computed_tokens
        use.seconds += seconds

    def count_decode(
        self, span: int, *, steps: int, emitted: int, live_slots: int, slots: int, seconds: float
    ) -> None:
        """Note one decode call: steps that ran, and tokens that its live slots emitted."""
        use = self.decode[str(span)]
        use.calls += 1
        use.steps += steps
        use.emitted_tokens += emitted
        use.live_tokens += steps * live_slots
        use.computed_tokens += steps * slots
        use.seconds += seconds

    def count_fork(self, seconds: float = 0.0) -> None:
        """Note that a slot was copied for another sequence of its request."""
        self.forks += 1
        self.fork_seconds += seconds

    def scaled(self, factor: float) -> "EngineMetrics":
        """The counters multiplied by a factor; integers stay integers."""

        def times(value: float) -> Any:
            return round(value * factor) if isinstance(value, int) else value * factor

        found = EngineMetrics(
            forks=round(self.forks * factor),
            fork_seconds=self.fork_seconds * factor,
            cut_tokens=round(self.cut_tokens * factor),
        )
        for name, use in self.prefill.items():
            found.prefill[name] = PrefillUse(**{k: times(v) for k, v in vars(use).items()})
        for name, use in self.decode.items():
            found.decode[name] = DecodeUse(**{k: times(v) for k, v in vars(use).items()})
        return found

    @property
    def padding(self) -> dict[str, int]:
        """Computed tokens, those of them that are real, and what the others are."""
        prefill_computed = sum(use.computed_tokens for use in self.prefill.values())
        decode_computed = sum(use.computed_tokens for use in self.decode.values())
        live = sum(use.live_tokens for use in self.decode.values())
        return {
            "real_tokens": self._prompt_tokens + self.emitted_tokens,
            "computed_tokens": prefill_computed + decode_computed,
            "prefill_padding_tokens": prefill_computed - self._prompt_tokens,
            "idle_slot_tokens": decode_computed - live,
            "overshoot_tokens": live - self.emitted_tokens,
        }

    @property
    def padding_waste(self) -> float | None:
        """Share of the computed tokens that are not real; None before the first call."""
        padding = self.padding
        computed = padding["computed_tokens"]
        return 1 - padding["real_tokens"] / computed if computed else None

    def report(self) -> dict[str, Any]:
        """The counters and their totals, ready for JSON."""
        prefill_seconds = sum(use.seconds for use in self.prefill.values())
        decode_seconds = sum(use.seconds for use in self.decode.values())
        return {
            "buckets": {
                "prefill": {name: vars(use) for name, use in self.prefill.items()},
                "decode": {name: vars(use) for name, use in self.decode.items()},
            },
            "padding": self.padding,
            "phases": {
                "prefill_seconds": prefill_seconds,
                "prefill_tokens_per_second": _rate(self._prompt_tokens, prefill_seconds),
                "fork_seconds": self.fork_seconds,
                "decode_seconds": decode_seconds,
                "decode_tokens_per_second": _rate(self.emitted_tokens, decode_seconds),
            },
        }

    @property
    def _prompt_tokens(self) -> int:
        return sum(use.real_tokens for use in self.prefill.values())

    @property
    def emitted_tokens(self) -> int:
        """Tokens that rows emitted, without those past a stop string."""
        return sum(use.emitted_tokens for use in self.decode.values()) - self.cut_tokens


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None
