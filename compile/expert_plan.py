"""The expert settings of a plan: dispatch by phase, and the outcome of rows with dropped choices.

In a plan's file these are the tables `[experts]`, `[experts.prefill]` and `[experts.decode]`. Knows
nothing of the model. Guarantees: without these tables no choice is ever dropped.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..modelzoo.config import DecoderConfig
from ..modelzoo.config_values import check_choice
from ..modelzoo.errors import UserError
from ..modelzoo.moe_config import LOSSLESS, Dispatch
from ..sharding.layout import PHASES
from .plan_tables import PlanTable, check_keys, table_lines
from .targets import EXPERT_TILES, TILES_BY_KIND

Overflow = Literal["error", "drop"]
"""The outcome of a row with dropped expert choices: an error, or an answer with their number."""


@dataclass(frozen=True)
class ExpertPlan(PlanTable, name="experts"):
    """Dispatch of the two phases, and the policy for rows with dropped choices."""

    prefill: Dispatch = LOSSLESS
    """The dispatch of tokens to experts in prefill graphs."""
    decode: Dispatch = LOSSLESS
    """The dispatch of tokens to experts in decode graphs."""
    overflow: Overflow = "error"
    """The outcome of a row that loses an expert choice. With `error` it becomes an error row. With
    `drop` it is answered, and its output has the number of dropped choices."""

    def __post_init__(self):
        check_choice("[experts] overflow", self.overflow, get_args(Overflow))
        for phase in PHASES:
            dispatch = getattr(self, phase)
            if not isinstance(dispatch, Dispatch):
                raise UserError(
                    f"[experts.{phase}]: expected a Dispatch such as Dispatch('capacity', 1.5), "
                    f"got {dispatch!r}."
                )
            if dispatch.tiles != LOSSLESS.tiles:
                raise UserError(
                    f"[experts.{phase}] tiles: expected the target's tiles, got others. Leave "
                    f"them out of the dispatch."
                )

    @property
    def has_capacity(self) -> bool:
        """Whether an expert has a capacity in some phase, so that the rows of a call decide what
        it drops."""
        return any(getattr(self, phase).kind == "capacity" for phase in PHASES)

    def dispatch(self, phase: str, platform: str, kind: str | None = None) -> Dispatch:
        """Dispatch of a phase's graphs, with the tile sizes of a platform or a kind of devices."""
        tiles = TILES_BY_KIND.get(kind or "", EXPERT_TILES[platform])
        return replace(getattr(self, phase), tiles=tiles)

    def to_lines(self) -> list[str]:
        """The tables as lines of TOML."""
        lines = table_lines(self.NAME, {"overflow": self.overflow})
        for phase in PHASES:
            own = getattr(self, phase)
            table = {"dispatch": own.kind, "capacity_factor": own.capacity_factor}
            lines += table_lines(f"experts.{phase}", table)
        return lines

    @classmethod
    def from_table(cls, table: Any) -> "ExpertPlan":
        """Read the parsed table `[experts]`; raises ValueError naming a wrong key or value."""
        cls.check(table)
        phases = {phase: _dispatch(phase, table[phase]) for phase in PHASES if phase in table}
        return cls(**{**table, **phases})


LOSSLESS_EXPERTS = ExpertPlan()


def default_experts(config: DecoderConfig) -> ExpertPlan | None:
    """Default expert settings of a model; None for a model without experts."""
    return None if config.moe is None else LOSSLESS_EXPERTS


def _dispatch(phase: str, table: Any) -> Dispatch:
    where = f"[experts.{phase}]"
    check_keys(where, table, {"dispatch"}, {"capacity_factor"})
    try:
        return Dispatch(table["dispatch"], table.get("capacity_factor"))
    except ValueError as error:
        raise UserError(f"{where} {error}") from None
