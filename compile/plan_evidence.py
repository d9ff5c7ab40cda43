"""The evidence of a plan: the prices that it was made from, and the run that they predict.

It changes no graph and no answer, so two plans that differ in it alone are the same plan.
"""

from dataclasses import asdict, dataclass
from typing import Any

from .plan_tables import PlanTable, check_number, check_text


@dataclass(frozen=True)
class PlanEvidence(PlanTable, name="evidence"):
    """The evidence of a plan's seconds, and what they predict for the planned workload."""

    costs: str
    """The evidence of the seconds: `measured h200, jax 0.11.2`, `calibration FILE`, `compiler's
    cycles`, `assumed peaks` or `published peaks`."""
    build_seconds: float
    """Predicted seconds to compile the graphs. Unit: seconds."""
    run_seconds: float
    """Predicted seconds of all calls, after the build. Unit: seconds."""
    output_tokens_per_second: float
    """Predicted rate of output tokens over the run. Unit: tokens a second."""
    rows_per_hour: float
    """Predicted rate of rows over the run. Unit: rows an hour."""
    price: float | None = None
    """Predicted price of build and run on all devices, if the hardware has a price. Unit: that of
    `price_per_hour`."""

    def __post_init__(self):
        """Refuse values of a wrong type."""
        check_text("[evidence] costs", self.costs)
        for key, value in asdict(self).items():
            if key != "costs" and value is not None:
                check_number(f"[evidence] {key}", value)

    def to_table(self) -> dict[str, Any]:
        """The table that `from_table` reads, its figures with four digits."""
        return {
            key: float(f"{value:.4g}") if isinstance(value, int | float) else value
            for key, value in asdict(self).items()
        }
