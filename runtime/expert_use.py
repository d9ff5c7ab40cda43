"""What a run made of its experts, by phase and sparse layer: load, rows, choices dropped.

A choice is one expert of one token in one layer; padding makes none. Rows are those that products
ran over, so the padded ones are `rows - (choices - dropped)`. What a capacity sets aside is more:
all of it runs where tokens are exchanged, on one device only tiles with a token do. Sums are of 64
bits. Knows nothing of devices.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..compile.expert_plan import ExpertPlan
from ..modelzoo.moe.config import Dispatch, MoeConfig
from ..modelzoo.moe.use import FACTORS, ExpertUse


@dataclass
class ExpertTotals:
    """Counts of one phase over all its calls; arrays once something was added."""

    load_LE: Any = 0
    rows_LE: Any = 0
    dropped_LE: Any = 0
    excess_LC: Any = 0
    num_batches: Counter[int] = field(default_factory=Counter)
    """Batches that were dispatched, by their number of tokens: one a call, step and shard."""

    def add(self, use: ExpertUse, num_tokens: int, num_steps: int = 1) -> None:
        """Count a call over `num_tokens` tokens a step, padding among them."""
        load_LE, rows_LE, dropped_LE, excess_LC = (x.sum(axis=1, dtype=np.int64) for x in use)
        self.load_LE += load_LE
        self.rows_LE += rows_LE
        self.dropped_LE += dropped_LE
        self.excess_LC += excess_LC
        num_shards = use.load_SE.shape[1]
        self.num_batches[num_tokens // num_shards] += num_steps * num_shards


@dataclass(frozen=True)
class ExpertSetup:
    """What a run knows of its experts beside their counts."""

    moe: MoeConfig
    plan: ExpertPlan
    platform: str

    def report(self, totals: Mapping[str, ExpertTotals]) -> dict[str, Any]:
        """The counts of each phase that ran, ready for JSON."""
        routing = self.moe.routing
        return {
            "num_experts": routing.num_experts,
            "num_chosen": routing.num_chosen,
            "overflow": self.plan.overflow,
            **{phase: self._phase(phase, of_phase) for phase, of_phase in totals.items()},
        }

    def _phase(self, phase: str, totals: ExpertTotals) -> dict[str, Any]:
        dispatch = self.plan.dispatch(phase, self.platform)
        choices, rows = int(totals.load_LE.sum()), int(totals.rows_LE.sum())
        dropped, excess_C = int(totals.dropped_LE.sum()), totals.excess_LC.sum(axis=0)
        sparse = [layer for layer, is_sparse in enumerate(self.moe.layers) if is_sparse]
        return {
            "dispatch": dispatch.kind,
            "capacity_factor": dispatch.capacity_factor,
            "choices": choices,
            "dropped": dropped,
            "rows": rows,
            "padded_share": _share(rows - (choices - dropped), rows),
            "would_drop": {
                str(factor): _share(int(excess), choices)
                for factor, excess in zip(FACTORS, excess_C, strict=True)
            },
            "would_set_aside_rows": {
                str(factor): self._rows_of_capacity(dispatch, factor, totals.num_batches)
                for factor in FACTORS
            },
            "lossless_rows_at_most": choices + self._tile_padding(dispatch, totals.num_batches),
            "layers": [
                _layer(*of_layer)
                for of_layer in zip(
                    sparse, totals.load_LE, totals.rows_LE, totals.dropped_LE, strict=True
                )
            ],
        }

    def _rows_of_capacity(
        self, dispatch: Dispatch, factor: float, num_batches: Mapping[int, int]
    ) -> int:
        """Rows set aside for batches of these sizes, in all sparse layers."""
        routing, num_layers = self.moe.routing, sum(self.moe.layers)
        k, E = routing.num_chosen, routing.num_experts
        capacity = replace(dispatch, kind="capacity", capacity_factor=factor).capacity
        return num_layers * sum(
            count * E * capacity(size, k, E) for size, count in num_batches.items()
        )

    def _tile_padding(self, dispatch: Dispatch, num_batches: Mapping[int, int]) -> int:
        """The most rows that whole tiles add without a capacity, in all sparse layers."""
        routing, num_layers = self.moe.routing, sum(self.moe.layers)
        k, E = routing.num_chosen, routing.num_experts
        return num_layers * sum(
            count * E * (dispatch.tile(size * k, E) - 1) for size, count in num_batches.items()
        )


def _layer(
    layer: int, load_E: np.ndarray, rows_E: np.ndarray, dropped_E: np.ndarray
) -> dict[str, Any]:
    """One sparse layer; balance is the largest load over the mean, 1.0 where all are equal."""
    mean = float(load_E.mean())
    return {
        "layer": layer,
        "load": load_E.tolist(),
        "rows": rows_E.tolist(),
        "dropped": dropped_E.tolist(),
        "balance": float(load_E.max()) / mean if mean else None,
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
