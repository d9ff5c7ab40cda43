"""The report of a comparison: a table in Markdown, the figures as JSON, and a picture.

Does not know how figures were measured.
"""

import textwrap
from pathlib import Path
from typing import Any

from ..devices.machine import describe_machine
from ..files.png_figure import png_figure
from .compare import ComparedModel, Comparison
from .statistics import Estimate, decimal

_HEAD = (
    "| model | divergence | largest | same choice | widest gap | perplexity |",
    "|:--|--:|--:|--:|--:|--:|",
)
_LONGEST_BAR = 1e300
"""The longest bar of the picture; axes need numbers above it."""


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as an object."""
    reference, *others = comparison.models
    return {
        "reference": _named(reference),
        "rows": comparison.num_rows,
        "tokens": comparison.num_tokens,
        "tokens_of": _tokens_of(comparison),
        "machine": describe_machine(),
        "compared": [
            {**_named(model), **figures.as_json()}
            for model, figures in zip(others, comparison.figures, strict=True)
        ],
    }


def markdown(comparison: Comparison) -> str:
    """The comparison as a table in Markdown, with the words that explain it."""
    reference, *others = comparison.models
    first = comparison.figures[0]
    text = (
        f"{comparison.num_tokens} tokens of {comparison.num_rows} rows: {_tokens_of(comparison)}, "
        f"which all models read. Divergence is the mean Kullback-Leibler divergence of next-token "
        f"distributions from the first model's, in nats. The gap of a choice is the first model's "
        f"log-probability of its own choice, less that of the other model's. ± is one standard "
        f"error, over rows."
    )
    lines = [
        *textwrap.wrap(text, 120),
        "",
        *_HEAD,
        f"| {reference} | 0 | 0 | 100 % | 0 | {first.reference_perplexity.text(3)} |",
    ]
    for model, figures in zip(others, comparison.figures, strict=True):
        largest = figures.divergence_quantiles[1.0]
        cells = [
            str(model),
            figures.divergence.text(4),
            decimal(largest, 3),
            f"{figures.agreement.text(1, 100)} %",
            decimal(figures.widest_gap, 3),
            figures.perplexity.text(3),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(comparison: Comparison) -> bytes:
    """Draw a PNG with one bar for each compared model: divergence, agreement and perplexity."""
    names = [str(model).replace(" ", "\n", 1) for model in comparison.models[1:]]
    with png_figure((13, 2.2 + 0.6 * len(names)), num_panels=3) as (figure, panels, png):
        figure.suptitle(
            f"against {comparison.models[0]}: {comparison.num_tokens} tokens, one standard error",
            fontsize=10,
        )
        chosen = {
            "divergence, in nats": [f.divergence for f in comparison.figures],
            "share of equal choices": [f.agreement for f in comparison.figures],
            "perplexity; line: the reference": [f.perplexity for f in comparison.figures],
        }
        for panel, (title, estimates) in zip(panels, chosen.items(), strict=True):
            for row, estimate in enumerate(estimates):
                _draw_bar(panel, row, estimate)
            panel.set_title(title, fontsize=10)
            panel.margins(x=0.15)
            panel.spines[["top", "right"]].set_visible(False)
        if (reference := comparison.figures[0].reference_perplexity.mean) <= _LONGEST_BAR:
            panels[2].axvline(reference, color="#c44e52")
        panels[0].set_yticks(range(len(names)), names, fontsize=8)
        panels[0].invert_yaxis()
    return png.getvalue()


def _draw_bar(panel: Any, row: int, estimate: Estimate) -> None:
    """Draw a mean with its error; a bar that is too long is left out, and its number stays."""
    error = estimate.error or 0.0
    end, mean = estimate.mean + error, estimate.mean
    if end > _LONGEST_BAR:
        end = mean = error = 0.0
    panel.barh(row, mean, xerr=error, color="#4c72b0", height=0.6)
    panel.text(end, row, f" {estimate.mean:.4g}", va="center", fontsize=8)


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a report, by description."""
    return {
        "the figures": folder / "compare.json",
        "the table": folder / "compare.md",
        "the picture": folder / "compare.png",
    }


def _tokens_of(comparison: Comparison) -> str:
    return "the first model's greedy answers" if comparison.read_answers else "the rows' own tokens"


def _named(model: ComparedModel) -> dict[str, Any]:
    return {"model": model.model, "numbers": dict(model.numbers)}
