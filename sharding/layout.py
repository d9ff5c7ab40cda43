"""A layout as data: a mesh, rules, and what differs in one phase. Touches no disk.

The base rules place the weights, and everything else too unless a phase has rules of its own: a
phase's rules govern activations and cache, and where they name a weight's axis, the weight is
gathered inside that phase's graphs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..modelzoo import axes
from .axis_rules import AxisRules
from .mesh_layout import MeshLayout

PHASES = ("prefill", "decode")
"""The phases that may have rules of their own."""
MAX_REPLICATED = 0.05

_KEYS = {"name", "mesh", "rules", "prefill", "decode", "max_replicated"}
_RULE = "a mesh axis, a list of them, or \"\" for replicated"  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How one model lies on one mesh."""

    name: str
    """The name in reports and errors; by default the name of the file."""
    mesh: MeshLayout
    """The mesh axes with their sizes, major to minor in device order. Unit: devices."""
    rules: AxisRules
    """The mesh axes of each logical axis, for all phases and for the weights."""
    prefill: Mapping[str, tuple[str, ...]]
    """Rules that differ in prefill."""
    decode: Mapping[str, tuple[str, ...]]
    """Rules that differ in decode."""
    max_replicated: float = MAX_REPLICATED
    """The largest share of the weights that may lie whole along a mesh axis that does not split the
    batch. A layout with a larger share is refused. Unit: share from 0 to 1."""

    def phase(self, phase: str) -> AxisRules:
        """The rules of `prefill`, `decode` or `chunk`: prefill beside the cache that decode has."""
        if phase == "chunk":
            of_cache = self.phase("decode")[axes.CACHE_LENGTH]
            return self.phase("prefill").updated({axes.CACHE_LENGTH: of_cache})
        return self.rules.updated(self.prefill if phase == "prefill" else self.decode)

    def on(self, mesh: MeshLayout) -> "Layout":
        """The same rules on another mesh."""
        return replace(self, mesh=mesh)

    def to_table(self) -> dict[str, Any]:
        """The layout as the tables of its file."""
        table: dict[str, Any] = {"name": self.name, "max_replicated": self.max_replicated}
        table["mesh"] = self.mesh.sizes
        table["rules"] = _written(self.rules.table)
        for phase in PHASES:
            if rules := getattr(self, phase):
                table[phase] = {"rules": _written(rules)}
        return table

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "layout") -> "Layout":
        """Read parsed TOML; ValueError for keys and values of the wrong kind.

        Whether axes exist and sizes fit is `legality.check`'s business.
        """
        unknown = sorted(set(table) - _KEYS)
        if unknown:
            raise ValueError(f"{where}: expected the keys {sorted(_KEYS)}, got {unknown} too.")
        mesh = table.get("mesh")
        if not isinstance(mesh, Mapping) or not mesh:
            raise ValueError(f"{where}: expected a table [mesh] of axis sizes, got {mesh!r}.")
        phases = {}
        for phase in PHASES:
            phase_table = table.get(phase, {})
            if not isinstance(phase_table, Mapping) or set(phase_table) - {"rules"}:
                raise ValueError(
                    f"{where}: expected [{phase}.rules] and no more, got {phase_table!r}."
                )
            phases[phase] = _rules(phase_table.get("rules", {}), f"{where} [{phase}.rules]")
        share = table.get("max_replicated", MAX_REPLICATED)
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise ValueError(f"{where} max_replicated: expected a share of 0 to 1, got {share!r}.")
        return cls(
            str(table.get("name", where)),
            MeshLayout.of(mesh),
            AxisRules(_rules(table.get("rules", {}), f"{where} [rules]")),
            phases["prefill"],
            phases["decode"],
            float(share),
        )


def _rules(table: object, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: expected a table of rules, got {table!r}.")
    return {axis: _mesh_axes(value, f"{where} {axis}") for axis, value in table.items()}


def _mesh_axes(value: object, where: str) -> tuple[str, ...]:
    if value == "":
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
        raise ValueError(f"{where}: expected {_RULE}, got {value!r}.")
    return tuple(names)


def _written(rules: Mapping[str, tuple[str, ...]]) -> dict[str, str | list[str]]:
    """Rules in the spelling of files."""
    spelling: dict[str, str | list[str]] = {}
    for axis, names in rules.items():
        spelling[axis] = "".join(names) if len(names) < 2 else list(names)
    return spelling
