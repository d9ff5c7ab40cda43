"""Draw docs/architecture.svg: what is fixed before the first row, and what happens to a row.

python scripts/architecture_picture.py                  # bring docs/architecture.svg up to date
python scripts/architecture_picture.py --output a.png   # or any other format of matplotlib
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams |= {"svg.hashsalt": "noria", "font.size": 9.8}

import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "architecture.svg"
BUILD, RUN, REAL, PADDING = "#dce8f5", "#e8f3e0", "#5b8f3c", "#e3e3e3"
OUTPUT, EDGE, DEVICE = "#d98b2b", "#444444", "#f4f0fa"
SLOTS = ((30, 14), (12, 22), (44, 10), (20, 6), (8, 30), (36, 4))
"""Prompt and output tokens of the rows in the cache, in units of the picture's cells."""
PAGE = 6
"""The tokens of a page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=PICTURE)
    output = parser.parse_args().output
    figure, axes = plt.subplots(figsize=(12.5, 7.8))
    axes.set(xlim=(0, 125), ylim=(0, 78))
    axes.axis("off")
    _build(axes)
    _run(axes)
    options = {"metadata": {"Date": None}} if output.suffix == ".svg" else {"dpi": 110}
    figure.savefig(output, bbox_inches="tight", **options)


def _build(axes: Axes) -> None:
    """The upper half: from a model, a layout and a plan to executables."""
    _band(axes, 45, 31, BUILD, "BUILD, once: everything is compiled before the first row runs")
    _box(axes, 3, 64, 23, 6, "model files\nconfig.json, weights")
    _box(axes, 3, 55.5, 23, 6, "layout\nmesh and rules")
    _box(axes, 3, 47, 23, 6, "plan\nbuckets, slots, pages")
    _box(axes, 35, 64, 20, 6, "modelzoo\nFlax definition")
    _box(axes, 35, 55.5, 20, 6, "sharding\nplacement of arrays")
    _box(axes, 64, 55.5, 18, 14.5, "compile\n\nlower and compile\neach graph for\nits fixed shapes")
    for y in (67, 58.5):
        _arrow(axes, 26, y, 35, y)
        _arrow(axes, 55, y, 64, y)
    axes.plot((26, 73), (50, 50), color=EDGE, linewidth=1.3)
    _arrow(axes, 73, 50, 73, 55.5)
    _arrow(axes, 82, 62.7, 90, 62.7)
    axes.text(106, 71, "executables", ha="center", weight="bold")
    graphs = ("prefill 224 x 2", "prefill 400 x 1", "fork", "decode")
    for index, graph in enumerate(graphs):
        _box(axes, 90, 65.3 - index * 5.5, 32, 4.3, graph)


def _run(axes: Axes) -> None:
    """The lower half: from a line of the input to a line of the output."""
    _band(axes, 1, 41.5, RUN, "RUN: rows pass through the executables; nothing compiles any more")
    _box(axes, 2, 29.5, 17, 6.5, "in.jsonl\none row a line")
    _box(axes, 2, 18.5, 17, 6.5, "tokenize,\nfind the bucket")
    _box(axes, 2, 7.5, 17, 6.5, "scheduler:\nthe next graph")
    _arrow(axes, 10.5, 29.5, 10.5, 25)
    _arrow(axes, 10.5, 18.5, 10.5, 14)
    axes.add_patch(Rectangle((22, 2.5), 81.5, 35.5, facecolor=DEVICE, edgecolor="#9a86b8"))
    axes.text(23, 35.6, "device", style="italic", color="#6a5590")
    _prefill(axes)
    _cache(axes)
    _arrow(axes, 19, 10.7, 25.5, 14.5)
    axes.text(37, 9, "prefill writes a prompt\nstraight into its pages", ha="center", va="top")
    _arrow(axes, 48.5, 18.5, 53.5, 18.5)
    _box(axes, 107, 29.5, 17, 6.5, "ids to text")
    _box(axes, 107, 18.5, 17, 6.5, "journal:\nfinished rows")
    _box(axes, 107, 7.5, 17, 6.5, "out.jsonl\nin input order")
    _arrow(axes, 115.5, 29.5, 115.5, 25)
    _arrow(axes, 115.5, 18.5, 115.5, 14)
    _arrow(axes, 99.5, 31, 107, 32.7)


def _prefill(axes: Axes) -> None:
    """A prefill call: two prompts, padded to the length of the bucket."""
    axes.text(37, 29.5, "a prefill call: two prompts,\npadded to their bucket", ha="center")
    for y, length in ((20, 17), (14, 11)):
        _bar(axes, 26, y, 22, 4.2, PADDING)
        _bar(axes, 26, y, length, 4.2, REAL)
        axes.text(26 + length / 2, y + 2.1, "prompt", ha="center", va="center", color="white")
    axes.text(42.5, 16.1, "padding", ha="center", va="center", color="#666666")


def _cache(axes: Axes) -> None:
    """The cache: the pages of each row that decodes."""
    left, width = 54, 0.74
    axes.text(left, 35.6, "the cache: each row takes pages as it grows", weight="bold")
    for index, (prompt, answer) in enumerate(SLOTS):
        y = 30.3 - index * 3.4
        for page in range(-(-(prompt + answer) // PAGE)):
            _bar(axes, left + page * PAGE * width, y, PAGE * width, 2.6, "white")
        _bar(axes, left, y, prompt * width, 2.6, REAL)
        _bar(axes, left + prompt * width, y, answer * width, 2.6, OUTPUT)
        for page in range(1, -(-(prompt + answer) // PAGE)):
            x = left + page * PAGE * width
            axes.plot((x, x), (y, y + 2.6), color=EDGE, linewidth=0.7)
    for x, color, name in ((left, REAL, "prompt"), (left + 13, OUTPUT, "answer so far")):
        _bar(axes, x, 6.2, 2.4, 1.8, color)
        axes.text(x + 3.2, 7.1, name, va="center")
    axes.text(left, 3.4, "a decode call adds 8 tokens to every row")


def _band(axes: Axes, bottom: float, height: float, color: str, title: str) -> None:
    axes.add_patch(Rectangle((0, bottom), 125, height, facecolor=color, edgecolor="none"))
    axes.text(1.2, bottom + height - 0.9, title, weight="bold", va="top", size=11.5)


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str) -> None:
    style = "round,pad=0,rounding_size=0.8"
    corner = (x, y)
    patch = FancyBboxPatch(
        corner, width, height, boxstyle=style, facecolor="white", edgecolor=EDGE, linewidth=1.1
    )
    axes.add_patch(patch)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center")


def _bar(axes: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    patch = Rectangle((x, y), width, height, facecolor=color, edgecolor=EDGE, linewidth=0.8)
    axes.add_patch(patch)


def _arrow(axes: Axes, x: float, y: float, to_x: float, to_y: float) -> None:
    properties = {"arrowstyle": "-|>", "color": EDGE, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(to_x, to_y), xytext=(x, y), arrowprops=properties)


if __name__ == "__main__":
    main()
