"""Pictures of a plan: rows in buckets, graphs under the roofline, memory, other grids, layouts.

Knows nothing of how any of it was found. Each picture is a PNG as bytes.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

_PREFILL, _DECODE, _WASTE = "#4c72b0", "#dd8452", "#c44e52"
_PALE = "#c8c8c8"
_SIZE, _DPI = (7.2, 3.6), 110


def workload(prompts: Sequence[int], outputs: Sequence[int], lengths: Sequence[int]) -> bytes:
    """How many rows have which prompt and output, with the borders of prefill lengths or spans."""
    with figure_of() as (figure, panel, png):
        most = max(max(lengths), max(prompts))
        bins = (np.geomspace(1, most, 60), np.geomspace(1, max(2, *outputs), 30))
        # a row without output is drawn with those of one token
        drawn = np.maximum(outputs, 1)
        *_, image = panel.hist2d(prompts, drawn, bins=bins, cmin=1, vmin=0, cmap="viridis")
        for length in lengths:
            panel.axvline(length, color=_WASTE, linewidth=1)
        panel.set(xlabel="prompt tokens", ylabel="expected output tokens")
        _logarithmic(panel)
        # the last line stands inside the frame
        panel.set_xlim(1, 1.1 * most)
        figure.colorbar(image, ax=panel, label="rows").locator = _ticker().MaxNLocator(integer=True)
        panel.set_title("rows by length, and lengths of prefill graphs", fontsize=9)
    return png.getvalue()


def roofline(graphs: Sequence[Mapping[str, Any]], peak: float, memory_rate: float) -> bytes:
    """Every graph by operations a byte and predicted operations a second, under the peaks."""
    with figure_of() as (_, panel, png):
        intensity = [graph["flops"] / graph["bytes"] for graph in graphs]
        ridge = peak / memory_rate
        line = np.geomspace(min(*intensity, ridge) / 3, max(*intensity, ridge) * 3, 100)
        panel.plot(line, np.minimum(peak, line * memory_rate) / 1e9, color="black", linewidth=1)
        for number, (graph, x) in enumerate(zip(graphs, intensity, strict=True)):
            is_decode = graph["graph"].startswith("decode")
            color = _DECODE if is_decode else _PREFILL
            y = graph["flops"] / graph["seconds"] / 1e9
            panel.scatter(x, y, color=color, zorder=3)
            # one below the other, as prefill graphs lie close together; they come first
            below = (4, -8 if is_decode else -8 * (number + 1))
            panel.annotate(
                graph["graph"], (x, y), fontsize=6, xytext=below, textcoords="offset points"
            )
        panel.set(xlabel="operations a byte", ylabel="predicted GFLOP/s")
        _logarithmic(panel)
        panel.set_title("graphs under the roofline of one device", fontsize=9)
    return png.getvalue()


def memory(parts: Mapping[str, int], device: float) -> bytes:
    """What lies on a device, and what it has."""
    with figure_of((7.2, 1.5)) as (figure, panel, png):
        start = 0.0
        colors = (_PREFILL, _DECODE, _WASTE)
        for (name, num_bytes), color in zip(parts.items(), colors, strict=False):
            width = num_bytes / 1e9
            label = f"{name} {width:.2f} GB"
            panel.barh(0, width, left=start, color=color, label=label)
            start += width
        panel.axvline(
            device / 1e9, color="black", linewidth=1, label=f"device {device / 1e9:.1f} GB"
        )
        panel.set(xlabel="GB on each device", yticks=[])
        figure.legend(fontsize=7, ncols=3, loc="outside upper center", frameon=False)
    return png.getvalue()


def tradeoffs(points: Sequence[Mapping[str, Any]]) -> bytes:
    """Tokens a second of a device against seconds between tokens; a line for each layout."""
    with figure_of((7.2, 4.6)) as (figure, panel, png):
        lines, labelled = _lines(points), set()
        on_front = [key for key in sorted(lines) if any(p["is_best"] for p in lines[key])]
        for key, line in lines.items():
            if key not in on_front:
                panel.plot(*_tradeoff(line), color=_PALE, linewidth=0.8, zorder=1)
        for number, key in enumerate(on_front):
            devices, layout, mesh = key
            label = f"{layout} ({mesh}), {devices} devices" if devices > 1 else "one device"
            color = f"C{number % 10}"
            panel.plot(*_tradeoff(lines[key]), color=color, marker=".", linewidth=1, label=label)
            best = [point for point in lines[key] if point["is_best"]]
            panel.scatter(*_tradeoff(best), s=60, facecolors="none", edgecolors=color, zorder=3)
            for x, y, point in zip(*_tradeoff(best), best, strict=True):
                # layouts that do the same lie on each other, and one number says it
                if (place := (f"{x:.3g}", f"{y:.3g}")) in labelled:
                    continue
                labelled.add(place)
                panel.annotate(
                    f"{point['slots']}", (x, y), fontsize=6, xytext=(-7, 6),
                    textcoords="offset points", ha="center",
                )  # fmt: skip
        panel.set(xlabel="predicted ms between two tokens of a row")
        panel.set_ylabel("predicted tokens a second, of each device")
        _logarithmic(panel)
        if len(on_front) < len(lines):
            panel.plot([], [], color=_PALE, label="others")
        figure.legend(fontsize=6, ncols=2, loc="outside lower center", frameon=False)
    return png.getvalue()


def _lines(
    points: Sequence[Mapping[str, Any]],
) -> dict[tuple[int, str, str], list[Mapping[str, Any]]]:
    """Points by devices, layout and mesh."""
    lines: dict[tuple[int, str, str], list[Mapping[str, Any]]] = {}
    for point in points:
        key = point["devices"], point["layout"], point["mesh"]
        lines.setdefault(key, []).append(point)
    return lines


def _tradeoff(points: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return (
        [point["step_seconds"] * 1e3 for point in points],
        [point["tokens_per_second_a_device"] for point in points],
    )


def grids(figures: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Predicted seconds of each grid, of prefill and of decode."""
    with figure_of((7.2, 1.2 + 0.34 * len(figures))) as (figure, panel, png):
        names = list(figures)
        prefill = [figures[name]["prefill_seconds"] for name in names]
        decode = [figures[name]["decode_seconds"] for name in names]
        panel.barh(names, prefill, color=_PREFILL, label="prefill")
        panel.barh(names, decode, left=prefill, color=_DECODE, label="decode")
        panel.invert_yaxis()
        panel.set(xlabel="predicted seconds")
        for number, (name, end) in enumerate(zip(names, np.add(prefill, decode), strict=True)):
            panel.annotate(
                f"{figures[name]['run_seconds']:.1f} s", (end, number), fontsize=7, va="center",
                xytext=(3, 0), textcoords="offset points",
            )  # fmt: skip
        panel.margins(x=0.1)
        figure.legend(fontsize=7, ncols=2, loc="outside upper center", frameon=False)
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


def matplotlib() -> ModuleType:
    """The package, or an ImportError with the remedy."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib. Install it with: pip install 'noria[report]'"
        ) from error
    return matplotlib


@contextmanager
def figure_of(size: tuple[float, float] = _SIZE, num_panels: int = 1):
    """A figure, its panel or panels, and the buffer that has it as a PNG afterwards."""
    matplotlib().use("agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(
        1, num_panels, figsize=size, sharey=num_panels > 1, layout="constrained"
    )
    png = io.BytesIO()
    try:
        yield figure, panel, png
        figure.savefig(png, dpi=_DPI, format="png")
    finally:
        pyplot.close(figure)
