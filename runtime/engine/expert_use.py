"""Counts of the experts' work in a run, by phase and sparse layer: load, rows, dropped choices.

A choice is one expert of one token in one layer; padding tokens make none. Rows are the rows that
the experts' products ran over, so `rows - (choices - dropped)` of them are padding. A capacity
reserves rows for each expert. If tokens are exchanged between devices, all of these rows run; on
one device, only tiles with a token run. Sums are 64-bit integers. Does not know about devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...compile.expert_plan import ExpertPlan
from ...modelzoo.moe.call import ExpertUse
from ...modelzoo.moe_config import Dispatch, Routing


@dataclass
class ExpertTotals:
    """Counts of one phase over all its calls; arrays after the first `add`, else 0."""

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
