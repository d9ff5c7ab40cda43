"""The plan: the file that fixes target, model, buckets and layout.

Reads and writes its text; touches no disk.

Guarantees: `Plan.from_table(tomllib.loads(plan.to_toml())) == plan`, and keys that are not known
are refused.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..sharding.layout import PHASES, Layout
from .bucket_grid import BucketGrid

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

    def __post_init__(self):
        for name in ("source", "fingerprint"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"model.{name}: expected a string, got {getattr(self, name)!r}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype: expected {' or '.join(DTYPES)}, got {self.dtype!r}.")


@dataclass(frozen=True)
class Plan:
    """All that decides which graphs exist."""

    target: str
    model: PlannedModel
    buckets: BucketGrid
    layout: Layout | None = None
    """How the model lies on several devices; None on one."""

    def to_toml(self) -> str:
        """The plan as TOML text."""
        lines = [f"schema = {SCHEMA}", f'target = "{self.target}"', "", "[model]"]
        lines += [f"{key} = {_toml(value)}" for key, value in asdict(self.model).items()]
        lines += ["", "[buckets]"]
        lines += [f"{key} = {_toml(value)}" for key, value in asdict(self.buckets).items()]
        if self.layout is not None:
            table = self.layout.to_table()
            lines.insert(2, f"layout = {_toml(table.pop('name'))}")
            lines.insert(3, f"max_replicated = {table.pop('max_replicated')}")
            for phase in PHASES:
                table[f"{phase}.rules"] = table.pop(phase, {}).get("rules", {})
            for name, values in table.items():
                if values:
                    lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in values.items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Plan":
        """Read a parsed TOML table; raises ValueError naming a key that is wrong or missing."""
        _check_keys("plan", table, {"schema", "target", "model", "buckets"}, _LAYOUT_KEYS)
        if table["schema"] != SCHEMA:
            raise ValueError(f"plan schema: expected {SCHEMA}, got {table['schema']!r}.")
        model, buckets = table["model"], table["buckets"]
        _check_keys("[model]", model, {"source", "fingerprint", "dtype"})
        optional = {"steps_per_call", "score"}
        _check_keys("[buckets]", buckets, set(BucketGrid.__dataclass_fields__) - optional, optional)
        return cls(table["target"], PlannedModel(**model), BucketGrid(**buckets), _layout(table))


def _layout(table: Mapping[str, Any]) -> Layout | None:
    found = {key: table[key] for key in _LAYOUT_KEYS if key in table}
    if not found:
        return None
    found["name"] = found.pop("layout", "of the plan")
    return Layout.from_table(found, "plan")


def _check_keys(
    where: str, table: Any, required: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: expected a table, got {table!r}.")
    unknown, missing = set(table) - required - optional, required - set(table)
    if unknown or missing:
        raise ValueError(
            f"{where}: expected the keys {sorted(required | optional)}; "
            f"unknown {sorted(unknown)}, missing {sorted(missing)}."
        )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
