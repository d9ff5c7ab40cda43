"""Draw layouts side by side: memory of a device, and bytes that it sends in prefill and decode.

Does not know how the results were measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...compile.layout_measure import LayoutResult
from ..files.png_figure import png_figure
from .table import unconditional_collectives

_MEMORY = {"params": "#4c72b0", "cache": "#dd8452", "temp": "#937860"}
_KINDS = {
    "all-reduce": "#c44e52",
    "all-gather": "#55a868",
    "reduce-scatter": "#8172b3",
    "all-to-all": "#ccb974",
    "collective-permute": "#64b5cd",
}


def draw(results: Sequence[LayoutResult], title: str) -> bytes:
    """Draw a PNG with three panels, each with one bar for each layout."""
    height = 2.2 + 0.42 * len(results)
    with png_figure((15, height), num_panels=3) as (figure, panels, png):
        figure.suptitle(title, fontsize=10)
        _memory_panel(panels[0], results)
        _traffic_panel(panels[1], results, "prefill", "sent by a device in a prefill call")
        _traffic_panel(panels[2], results, "decode", "sent by a device in a decode step")
        meshes = (" ".join(f"{axis}={size}" for axis, size in r.mesh.items()) for r in results)
        labels = [f"{r.name}\n{mesh}" for r, mesh in zip(results, meshes, strict=True)]
        panels[0].set_yticks(range(len(results)), labels, fontsize=8)
        panels[0].invert_yaxis()
        named = {}
        for panel in panels:
            handles, labels = panel.get_legend_handles_labels()
            named |= dict(zip(labels, handles, strict=True))
        position = {"loc": "outside lower center", "ncols": 8, "fontsize": 8, "frameon": False}
        figure.legend(named.values(), named.keys(), **position)
    return png.getvalue()


def _memory_panel(panel: Any, results: Sequence[LayoutResult]) -> None:
    # a layout that does not compile has known parameters and cache only, so nothing is drawn
    parts = [
        {kind: 0 if result.findings else result.bytes_per_device[kind] for kind in _MEMORY}
        for result in results
    ]
    _stack(panel, parts, _MEMORY)
    for row, result in enumerate(results):
        if result.findings:
            panel.text(0, row, f" {result.verdict}", va="center", fontsize=8, color="#b22222")
    _finish(panel, "memory per device")


def _traffic_panel(panel: Any, results: Sequence[LayoutResult], phase: str, title: str) -> None:
    parts: list[dict[str, float]] = []
    for result in results:
        chosen = [] if result.findings else unconditional_collectives(result, phase)
        parts.append({k: sum(c.sent_bytes for c in chosen if c.kind == k) for k in _KINDS})
    _stack(panel, parts, _KINDS)
    for row, (result, part) in enumerate(zip(results, parts, strict=True)):
        if not result.findings and not any(part.values()):
            panel.text(0, row, " nothing", va="center", fontsize=8, color="#555555")
    _finish(panel, title)


def _stack(panel: Any, parts: Sequence[Mapping[str, float]], colours: dict[str, str]) -> None:
    """Draw stacked bars in megabytes; parts without bytes get no entry in the legend."""
    left = [0.0] * len(parts)
    for kind, colour in colours.items():
        widths = [part[kind] / 1e6 for part in parts]
        if any(widths):
            panel.barh(range(len(parts)), widths, left=left, color=colour, label=kind, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        if total:
            panel.text(total, row, f" {_shown(total)}", va="center", fontsize=8)


def _shown(megabytes: float) -> str:
    if megabytes >= 1000:
        return f"{megabytes / 1000:.2f} GB"
    return f"{megabytes:.0f} MB" if megabytes >= 10 else f"{megabytes:.2g} MB"


def _finish(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("MB", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.margins(x=0.18)
    panel.spines[["top", "right"]].set_visible(False)
