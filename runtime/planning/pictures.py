"""Draw the pictures of a plan: rows in buckets, and graphs under the roofline.

Does not know about planning. Each picture is a PNG, as bytes.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..files.png_figure import png_figure

_PREFILL, _DECODE, _WASTE = "#4c72b0", "#dd8452", "#c44e52"


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
