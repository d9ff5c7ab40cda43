"""Tables of a plan's file: keys read strictly, values written as TOML. Touches no disk."""

import math
from collections.abc import Mapping
from typing import Any


def check_keys(
    where: str, table: Any, required: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> None:
    """Raise ValueError for a table with keys that are not known, or without one that must be."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: expected a table, got {table!r}.")
    unknown, missing = set(table) - required - optional, required - set(table)
    if unknown or missing:
        raise ValueError(
            f"{where}: expected the keys {sorted(required | optional)}; "
            f"unknown {sorted(unknown)}, missing {sorted(missing)}."
        )


def check_number(name: str, value: Any, *, above: float | None = None) -> None:
    """Raise ValueError for what is no finite number from 0 up, or not above another one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_large = is_number and (value >= 0 if above is None else value > above)
    if not (is_large and math.isfinite(value)):
        wanted = "from 0 up" if above is None else f"above {above:g}"
        raise ValueError(f"{name}: expected a number {wanted}, got {value!r}.")


def table_lines(name: str, values: Mapping[str, Any]) -> list[str]:
    """A table as lines of TOML, with an empty one before it; None is a key left out."""
    lines = (f"{key} = {toml(value)}" for key, value in values.items() if value is not None)
    return ["", f"[{name}]", *lines]


def toml(value: Any) -> str:
    """One value in TOML's spelling."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
