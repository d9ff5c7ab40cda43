"""Render the report of a plan as one HTML page that needs no other file and no network.

Its pictures are PNGs, as bytes: layouts by cause of their seconds, the memory of a device, the run
in time, rows in buckets, and graphs under the roofline.
"""

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import ModuleType
from typing import Any

import numpy as np

from ..console import GIGABYTE
from ..files.png_figure import png_figure
from .layout_table import layout_name
from .simulator import Timeline
from .summary import summary

_PREFILL, _DECODE, _WASTE = "#4c72b0", "#dd8452", "#c44e52"
_SLOTS, _PAGES, _FREE = "#55a868", "#8172b3", "#e5e5e5"
_NUM_BINS = 240
"""The intervals of a run in which prefill and decode are drawn by their shares."""
_MEMORY = {
    "weights": ("weights", _PREFILL),
    "held": ("pages that rows hold at most", _PAGES),
    "unused": ("pages that no row ever holds", "#cfc9e2"),
    "cache": ("cache", "#937860"),
    "working": ("working memory of graphs", _DECODE),
    "free": ("free", _FREE),
}
"""The label and the color of each kind of memory, in the order of the bar."""

_CAUSES = {
    "products": _PREFILL,
    "attention": "#64b5cd",
    "weights": _DECODE,
    "cache": _PAGES,
    "activations": "#937860",
    "calls": "#8c8c8c",
}
"""The color of each cause of seconds that is no collective."""
_MIN_CAUSE = 0.02
"""The share of the slowest run above which a cause has a color of its own."""
_MAX_LAYOUTS = 20

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; }
img { max-width: 100%; display: block; margin: 1rem 0; }
.note { color: #666; }
"""


@dataclass(frozen=True)
class Picture:
    """A PNG with a title and a caption that explains how to read it."""

    title: str
    caption: str
    png: bytes


def render_page(report: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """Render the page: the summary of the report, the pictures and the plan."""
    hardware, costs = report["hardware"], report["evidence"]["costs"]
    body = [
        f"<h1>Plan for {_text(report['workload']['name'])} on {_text(report['target'])}</h1>",
        f'<p class="note">All figures are predictions. Evidence of the seconds: {_text(costs)}. '
        f"Peaks of {_text(hardware['name'])}: {_text(hardware['source'])}.</p>",
        f"<pre>{_text(summary(report))}</pre>",
        *map(_picture, pictures),
        "<h2>The plan</h2>",
        f"<pre>{_text(report['plan'])}</pre>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>noria plan</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return (
        f'<h2>{_text(picture.title)}</h2><p class="note">{_text(picture.caption)}</p>'
        f'<img alt="{_text(picture.title)}" src="data:image/png;base64,{data}">'
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def draw_layouts(layouts: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the seconds of a run under each of the first layouts by cause, as one bar for each."""
    layouts = layouts[:_MAX_LAYOUTS]
    smallest = _MIN_CAUSE * max(layout["run_seconds"] for layout in layouts)
    every = [layout["seconds_by_cause"] for layout in layouts]
    causes = dict.fromkeys((*_CAUSES, *(cause for one in every for cause in one)))
    shown = [c for c in causes if any(one.get(c, 0.0) >= smallest for one in every)]
    colors = _colors()
    with png_figure((9.5, 1.4 + 0.26 * len(layouts))) as (figure, panel, png):
        left = np.zeros(len(layouts))
        for cause in shown:
            seconds = np.array([one.get(cause, 0.0) for one in every])
            color = _CAUSES.get(cause) or next(colors)
            panel.barh(range(len(layouts)), seconds, left=left, color=color, label=cause)
            left += seconds
        rest = np.array([layout["run_seconds"] for layout in layouts]) - left
        panel.barh(range(len(layouts)), rest, left=left, color=_FREE, label="other")
        panel.set_yticks(range(len(layouts)), map(layout_name, layouts))
        panel.invert_yaxis()
        panel.set(xlabel="predicted seconds of the run")
        panel.tick_params(labelsize=7)
        figure.legend(loc="outside upper left", ncols=5, fontsize=7, frameon=False)
    return png.getvalue()


def _colors() -> Iterator[Any]:
    """The colors of collectives, which begin again after the last one."""
    from matplotlib import colormaps

    sets = (colormaps[name](range(8)) for name in ("Set2", "Pastel1"))
    return cycle(color for colors in sets for color in colors.tolist())


def draw_memory(kinds: Mapping[str, float]) -> bytes:
    """Draw the bytes of a device by kind, one of `_MEMORY`, as one bar."""
    with png_figure((7.2, 1.7)) as (figure, panel, png):
        left = 0.0
        for kind, (label, color) in _MEMORY.items():
            if size := kinds.get(kind, 0.0) / GIGABYTE:
                panel.barh(0, size, left=left, color=color, label=f"{label}: {size:.1f} GB")
                left += size
        panel.set(xlim=(0, left), xlabel="GB of a device", yticks=[])
        panel.tick_params(labelsize=7)
        figure.legend(loc="outside upper left", ncols=3, fontsize=7, frameon=False)
    return png.getvalue()


def draw_run(timeline: Timeline, num_slots: int, num_pages: int | None) -> bytes:
    """Draw what rows hold over the seconds of a run, and the calls.

    Args:
      timeline: The run.
      num_slots: All slots; 0 to draw none.
      num_pages: All pages; None to draw none.
    """
    held = []
    if num_slots:
        held.append(("slots", timeline.slots_T, num_slots, _SLOTS))
    if num_pages is not None:
        held.append(("pages", timeline.pages_T, num_pages, _PAGES))
    heights = [2.0] * len(held) + [1.0]
    with png_figure((7.2, 1.1 + 1.3 * len(held)), heights=heights) as (_, panels, png):
        *of_held, of_calls = np.atleast_1d(panels)
        for panel, (name, taken_T, count, color) in zip(of_held, held, strict=True):
            panel.fill_between(
                timeline.end_T, taken_T, step="post", color=color, label=f"{name} that rows hold"
            )
            panel.axhline(count, color="black", linewidth=1, label=f"all {count:,} {name}")
            if name == "pages" and timeline.waiting_T.any():
                _draw_waits(panel, timeline)
            panel.set(ylim=(0, 1.08 * count), ylabel=name)
        _draw_calls(of_calls, timeline)
        for panel in (*of_held, of_calls):
            panel.tick_params(labelsize=7)
            panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False)
    return png.getvalue()


def _draw_waits(panel: Any, timeline: Timeline) -> None:
    """Mark the calls during which rows wait for pages, at the top of a panel."""
    panel.fill_between(
        timeline.end_T,
        1.0,
        0.94,
        where=timeline.waiting_T > 0,
        step="post",
        transform=panel.get_xaxis_transform(),
        color=_WASTE,
        label="rows wait for pages",
    )


def _draw_calls(panel: Any, timeline: Timeline) -> None:
    """Draw the share of decode and of prefill in each interval of a run."""
    edge_N = np.linspace(0, timeline.end_T[-1], _NUM_BINS + 1)
    share_N = 100 * timeline.share_of_decode(edge_N)
    panel.stairs(share_N, edge_N, fill=True, color=_DECODE, label="decode")
    panel.stairs(
        np.full(_NUM_BINS, 100), edge_N, baseline=share_N, fill=True, color=_PREFILL,
        label="prefill",
    )  # fmt: skip
    panel.set(xlim=(0, edge_N[-1]), ylim=(0, 100), ylabel="% of time", xlabel="predicted seconds")


def draw_workload(prompts: Sequence[int], outputs: Sequence[int], lengths: Sequence[int]) -> bytes:
    """Draw the number of rows by prompt and output length, with the lengths of prefill graphs."""
    with png_figure() as (figure, panel, png):
        max_length = max(max(lengths), max(prompts))
        bins = (np.geomspace(1, max_length, 60), np.geomspace(1, max(2, *outputs), 30))
        # the axis is logarithmic: a row without output is drawn at one token
        drawn = np.maximum(outputs, 1)
        *_, image = panel.hist2d(prompts, drawn, bins=bins, cmin=1, vmin=0, cmap="viridis")
        for length in lengths:
            panel.axvline(length, color=_WASTE, linewidth=1)
        panel.set(xlabel="prompt tokens", ylabel="expected output tokens")
        _logarithmic(panel)
        # the last line is drawn inside the frame
        panel.set_xlim(1, 1.1 * max_length)
        figure.colorbar(image, ax=panel, label="rows").locator = _ticker().MaxNLocator(integer=True)
        panel.set_title("rows by length, and lengths of prefill graphs", fontsize=9)
    return png.getvalue()


def draw_roofline(graphs: Sequence[Mapping[str, Any]], peak: float, memory_rate: float) -> bytes:
    """Draw the operations per byte and the predicted speed of each graph, under the peaks."""
    with png_figure() as (_, panel, png):
        intensity = [graph["flops"] / graph["bytes"] for graph in graphs]
        ridge = peak / memory_rate
        line = np.geomspace(min(*intensity, ridge) / 3, max(*intensity, ridge) * 3, 100)
        panel.plot(line, np.minimum(peak, line * memory_rate) / 1e9, color="black", linewidth=1)
        for number, (graph, x) in enumerate(zip(graphs, intensity, strict=True)):
            is_decode = graph["graph"].startswith("decode")
            color = _DECODE if is_decode else _PREFILL
            y = graph["flops"] / graph["seconds"] / 1e9
            panel.scatter(x, y, color=color, zorder=3)
            # labels of prefill graphs, which come first and lie close together, are stacked
            below = (4, -8 if is_decode else -8 * (number + 1))
            panel.annotate(
                graph["graph"], (x, y), fontsize=6, xytext=below, textcoords="offset points"
            )
        panel.set(xlabel="operations per byte", ylabel="predicted GFLOP/s")
        _logarithmic(panel)
        panel.set_title("graphs under the roofline of one device", fontsize=9)
    return png.getvalue()


def _logarithmic(panel: Any) -> None:
    """Both axes on a logarithmic scale, with plain numbers at 1, 2 and 5 of each decade."""
    panel.set(xscale="log", yscale="log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(_ticker().LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_locator(_ticker().NullLocator())
    panel.tick_params(labelsize=7)


def _ticker() -> ModuleType:
    from matplotlib import ticker

    return ticker
