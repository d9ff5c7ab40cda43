"""The plan: the file that fixes target, model, buckets, layout, attention and dispatch to experts.

Reads and writes its text; touches no disk.

Guarantees: `Plan.from_table(tomllib.loads(plan.to_toml())) == plan`, and keys that are not known
are refused.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from ..sharding.layout import PHASES, Layout
from .attention_kernels import AUTO_ATTENTION, AttentionPlan
from .bucket_grid import BucketGrid
from .expert_plan import ExpertPlan
from .plan_tables import check_keys, key_lines, table_lines
from .target_names import TargetName

SCHEMA = 1
_LAYOUT_KEYS = {"layout", "max_replicated", "mesh", "rules", *PHASES}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class PlannedModel:
    """Which model a plan was made for, and the dtype it runs in."""

    source: str
    fingerprint: str
    """Of the model's files; empty where the plan is for any model that fits it."""
    dtype: str
    scan_layers: bool = False
    """Whether layers that repeat a pattern run in a loop: programs compile in a fraction of the
    time, however deep the model, and are slower to run on the CPU."""

    def __post_init__(self):
        for name in ("source", "fingerprint"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"model.{name}: expected a string, got {getattr(self, name)!r}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype: expected {' or '.join(DTYPES)}, got {self.dtype!r}.")
        if not isinstance(self.scan_layers, bool):
            raise ValueError(
                f"model.scan_layers: expected true or false, got {self.scan_layers!r}."
            )

    def to_table(self) -> dict[str, Any]:
        """What a plan's `[model]` says: layers only where they are scanned."""
        table = asdict(self)
        if not self.scan_layers:
            del table["scan_layers"]
        return table


@dataclass(frozen=True)
class Plan:
    """All that decides which graphs exist."""

    target: str
    model: PlannedModel
    buckets: BucketGrid
    layout: Layout | None = None
    """How the model lies on several devices; None on one."""
    experts: ExpertPlan | None = None
    """Of a model with experts, where None means without loss; others have none."""
    attention: AttentionPlan = AUTO_ATTENTION
    max_length_reason: str = ""
    """The reason why rows without `max_tokens` end at `buckets.max_length`, before the model's
    context. It is empty if they do not, or if the user set the limit."""

    def __post_init__(self):
        TargetName.of(self.target)
        if not isinstance(self.max_length_reason, str):
            raise ValueError(
                f"plan max_length_reason: expected a string, got {self.max_length_reason!r}."
            )

    def to_toml(self) -> str:
        """The plan as TOML text."""
        head = {"schema": SCHEMA, "target": self.target}
        head["max_length_reason"] = self.max_length_reason or None
        lines = key_lines(head)
        lines += table_lines("model", self.model.to_table())
        lines += table_lines("buckets", self.buckets.to_table())
        if self.attention != AUTO_ATTENTION:
            lines += table_lines("attention", asdict(self.attention))
        if self.experts is not None:
            lines += self.experts.to_lines()
        if self.layout is not None:
            table = self.layout.to_table()
            table["layout"] = table.pop("name")
            scalars = ("layout", "max_replicated")
            lines[2:2] = key_lines({key: table.pop(key) for key in scalars})
            for phase in PHASES:
                table[f"{phase}.rules"] = table.pop(phase, {}).get("rules", {})
            for name, values in table.items():
                if values:
                    lines += table_lines(name, values)
        return "\n".join(lines) + "\n"

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Plan":
        """Read a parsed TOML table; raises ValueError naming a key that is wrong or missing."""
        optional = {*_LAYOUT_KEYS, "experts", "attention", "max_length_reason"}
        check_keys("plan", table, {"schema", "target", "model", "buckets"}, optional)
        if table["schema"] != SCHEMA or type(table["schema"]) is not int:
            raise ValueError(f"plan schema: expected {SCHEMA}, got {table['schema']!r}.")
        model, buckets = table["model"], table["buckets"]
        check_keys("[model]", model, {"source", "fingerprint", "dtype"}, {"scan_layers"})
        required = {key.name for key in fields(BucketGrid) if key.default is MISSING}
        optional = {key.name for key in fields(BucketGrid)} - required | {"chunk"}
        check_keys("[buckets]", buckets, required, optional)
        experts = ExpertPlan.from_table(table["experts"]) if "experts" in table else None
        attention = AttentionPlan.from_table(table.get("attention", {}))
        grid, planned = BucketGrid.from_table(buckets), PlannedModel(**model)
        reason = table.get("max_length_reason", "")
        return cls(table["target"], planned, grid, _layout(table), experts, attention, reason)


def _layout(table: Mapping[str, Any]) -> Layout | None:
    found = {key: table[key] for key in _LAYOUT_KEYS if key in table}
    if not found:
        return None
    found["name"] = found.pop("layout", "of the plan")
    return Layout.from_table(found, "plan")
