"""Render ranked layouts for the terminal: a table, and what separates the first two.

The layouts are those of report.json. All seconds are predictions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..console import GIGABYTE, align_columns, plural

RANKED_LAYOUTS = (
    "layout", "build + run s", "at least", "build s", "GB a device", "padding", "idle slots",
    "seconds of the run by cause",
)  # fmt: skip
_MIN_SHARE = 0.05
"""The share of a run's seconds above which the table shows a cause."""
_NUM_REASONS = 2
"""The number of causes that a comparison names in each direction."""
_EQUAL = 5e-4
"""Layouts whose seconds differ by a smaller share count as equal."""


def layout_name(layout: Mapping[str, Any]) -> str:
    """The name of a layout with its mesh."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in (layout["mesh"] or {}).items())
    return f"{layout['name']} ({mesh})" if mesh else "one device"


def ranked_lines(layouts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of layouts with a plan, what separates the first two, and how many have none."""
    ranked = [layout for layout in layouts if layout["rank"] is not None]
    rows = [RANKED_LAYOUTS, *map(_row, ranked)]
    width = max(len(row[-1]) for row in rows)
    lines = align_columns([(*row[:-1], row[-1].ljust(width)) for row in rows])
    if len(ranked) > 1:
        lines += ["", f"why        {compared(*ranked[:2])}"]
    if refused := len(layouts) - len(ranked):
        lines.append(f"refused    {plural(refused, 'layout')} that cannot serve this workload")
    return lines


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """One sentence on what separates a layout from the next one."""
    names = layout_name(first), layout_name(second)
    key, by = "seconds", ""
    if first["compiled_seconds"] is not None and second["compiled_seconds"] is not None:
        key, by = "compiled_seconds", " by their compiled graphs"
    saved = second[key] - first[key]
    if saved < _EQUAL * second[key]:
        return f"{names[0]} and {names[1]} take the same time{by}, {first[key]:.1f} s"
    less, more = _differences(first, second)
    reasons = f": {less}" if less else ""
    reasons += f"{', but' if less else ':'} {more}" if more else ""
    return (
        f"{names[0]} takes {saved:.1f} s ({saved / second[key]:.1%}) less than {names[1]}{by}"
        f"{reasons}"
    )


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, str]:
    """The causes for which a layout takes less than another one, and those for which more."""
    causes = [
        {**one["seconds_by_cause"], "compiling": one["build_seconds"]} for one in (first, second)
    ]
    names = dict.fromkeys((*causes[0], *causes[1]))
    change = {name: causes[0].get(name, 0.0) - causes[1].get(name, 0.0) for name in names}
    notable = [name for name in change if abs(change[name]) > _EQUAL * second["seconds"]]
    texts = []
    for sign, word in ((-1, "less"), (1, "more")):
        chosen = sorted(
            (name for name in notable if sign * change[name] > 0), key=lambda n: -abs(change[n])
        )
        parts = (f"{abs(change[n]):.1f} s {word} for {n}" for n in chosen[:_NUM_REASONS])
        texts.append(" and ".join(parts))
    return texts[0], texts[1]


def _row(layout: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table `RANKED_LAYOUTS`."""
    causes = layout["seconds_by_cause"].items()
    shown = [
        f"{cause} {seconds:.0f}" if seconds >= 10 else f"{cause} {seconds:.2g}"
        for cause, seconds in causes
        if seconds >= _MIN_SHARE * layout["run_seconds"]
    ]
    return (
        layout_name(layout),
        f"{layout['seconds']:.1f}",
        f"{layout['bound']:.1f}",
        f"{layout['build_seconds']:.0f}",
        f"{sum(layout['memory_bytes'].values()) / GIGABYTE:.1f}",
        f"{layout['prefill_padding']:.1%}",
        f"{layout['idle_slots']:.1%}",
        ", ".join(shown),
    )
