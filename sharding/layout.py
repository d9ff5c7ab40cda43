"""A layout as data: a mesh, rules, and the rules that differ in one phase.

The base rules govern the weights. They also govern everything else, unless a phase has rules of its
own. The rules of a phase govern activations and cache. Where they name an axis of a weight, the
weight is gathered inside the graphs of that phase. Does not touch any file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..modelzoo import axes
from ..modelzoo.errors import UserError
from .axis_rules import AxisRules
from .mesh_layout import MeshLayout

PHASES = ("prefill", "decode")
"""The phases that may have rules of their own."""
MAX_REPLICATED = 0.05

_KEYS = {"name", "mesh", "rules", "prefill", "decode", "max_replicated"}
_RULE = "a mesh axis, a list of them, or \"\" for replicated"  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules by which a model is split over it."""

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
    """The maximum share of the weights that may be replicated along a mesh axis that does not split
    the batch. A layout with a larger share is refused. Unit: share from 0 to 1."""

    def phase(self, phase: str) -> AxisRules:
        """Rules of a phase.

        Args:
          phase: `prefill`, `decode` or `chunk`. A chunk has the rules of prefill, and the cache is
            split as in decode.
        """
        if phase == "chunk":
            cache_axes = self.phase("decode")[axes.CACHE_LENGTH]
            return self.phase("prefill").updated({axes.CACHE_LENGTH: cache_axes})
        return self.rules.updated(self.prefill if phase == "prefill" else self.decode)

    def with_mesh(self, mesh: MeshLayout) -> "Layout":
        """Copy with the same rules on another mesh."""
        return replace(self, mesh=mesh)

    def fitted(self, num_devices: int) -> "Layout":
        """Copy with a mesh of so many devices in the nearest proportions; itself for one device."""
        return self if num_devices == 1 else self.with_mesh(self.mesh.fitted(num_devices))

    def to_table(self) -> dict[str, Any]:
        """Tables of the layout's file."""
        table: dict[str, Any] = {"name": self.name, "max_replicated": self.max_replicated}
        table["mesh"] = self.mesh.sizes
        table["rules"] = _rules_table(self.rules.table)
        for phase in PHASES:
            if rules := getattr(self, phase):
                table[phase] = {"rules": _rules_table(rules)}
        return table

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "layout") -> "Layout":
        """Read a layout from parsed TOML.

        Does not check that axes exist and that sizes fit: `legality.check` does.

        Args:
          table: The tables of the file.
          where: Beginning of error messages, and the name of a layout that has none.

        Raises:
          ValueError: A key is unknown, or a value has the wrong kind.
        """
        unknown = sorted(set(table) - _KEYS)
        if unknown:
            raise UserError(f"{where}: expected the keys {sorted(_KEYS)}, got {unknown} too.")
        mesh = table.get("mesh")
        if not isinstance(mesh, Mapping) or not mesh:
            raise UserError(f"{where}: expected a table [mesh] of axis sizes, got {mesh!r}.")
        phases = {}
        for phase in PHASES:
            phase_table = table.get(phase, {})
            if not isinstance(phase_table, Mapping) or set(phase_table) - {"rules"}:
                raise UserError(
                    f"{where}: expected [{phase}.rules] and nothing else, got {phase_table!r}."
                )
            phases[phase] = _rules(phase_table.get("rules", {}), f"{where} [{phase}.rules]")
        share = table.get("max_replicated", MAX_REPLICATED)
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise UserError(f"{where} max_replicated: expected a share of 0 to 1, got {share!r}.")
        return cls(
            str(table.get("name", where)),
            MeshLayout.from_table(mesh),
            AxisRules(_rules(table.get("rules", {}), f"{where} [rules]")),
            phases["prefill"],
            phases["decode"],
            float(share),
        )


def _rules(table: object, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, Mapping):
        raise UserError(f"{where}: expected a table of rules, got {table!r}.")
    return {axis: _mesh_axes(value, f"{where} {axis}") for axis, value in table.items()}


def _mesh_axes(value: object, where: str) -> tuple[str, ...]:
    if value == "":
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
        raise UserError(f"{where}: expected {_RULE}, got {value!r}.")
    return tuple(names)


def _rules_table(rules: Mapping[str, tuple[str, ...]]) -> dict[str, str | list[str]]:
    """Rules in the spelling of layout files."""
    spelling: dict[str, str | list[str]] = {}
    for axis, names in rules.items():
        spelling[axis] = "".join(names) if len(names) < 2 else list(names)
    return spelling
