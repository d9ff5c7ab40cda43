"""`noria experts`: what capacities would have dropped and taken in finished jobs, and a plan of it.

Reads manifests alone. Figures are those of the tokens, batches and buckets of their runs. Rows of a
capacity are those set aside, which all run where tokens are exchanged between devices; rows of
lossless are those that run. Whole tiles hold a little more than the capacity that drops are counted
against, so a share is what is dropped at most.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compile.expert_plan import dispatch_lines
from ..modelzoo.moe.config import LOSSLESS, Dispatch
from ..modelzoo.moe.use import FACTORS
from ..sharding.layout import PHASES
from .console import tell
from .counted import counted

_NOTE = """\
# Rows that lose a choice end as errors; [experts] overflow = "drop" answers them, each with the
# number of choices it lost. A share of choices touches a larger share of rows."""


@dataclass(frozen=True)
class PhaseUse:
    """One phase of all given jobs together."""

    choices: int
    dropped: Mapping[float, float]
    """Share of choices by capacity factor."""
    rows: Mapping[float, int]
    """Rows set aside by capacity factor."""
    lossless_rows: int
    is_bound: bool = False
    """Whether a job ran this phase otherwise, so that of `lossless_rows` only a bound is known."""

    def advise(self, max_dropped: float) -> tuple[Dispatch, str]:
        """The cheapest dispatch that drops no more than this share, and why it is."""
        factor = next((f for f in FACTORS if self.dropped[f] <= max_dropped), None)
        if factor is None:
            return LOSSLESS, f"no factor of {FACTORS} drops at most {max_dropped:g} of the choices"
        cost = f"capacity {factor} sets aside {self.cost(self.rows[factor])} rows a choice"
        cost += f", lossless runs {self.lossless_cost}"
        if self.lossless_rows <= self.rows[factor]:
            return LOSSLESS, f"{cost}: lossless is no dearer, and drops nothing"
        return Dispatch("capacity", factor), cost

    @property
    def lossless_cost(self) -> str:
        """The cost of dropping nothing, or the bound that is known."""
        return f"{'<= ' if self.is_bound else ''}{self.cost(self.lossless_rows)}"

    def cost(self, rows: int) -> str:
        """Rows over choices, as text."""
        return f"{rows / self.choices:.2f}"


def main(paths: Sequence[Path], max_dropped: float) -> int:
    """Print a table of each phase, and tables for a plan."""
    if not 0 <= max_dropped < 1:
        raise ValueError(f"--max-dropped: expected a share from 0 to below 1, got {max_dropped}.")
    tell(
        sys.stdout,
        report([section for path in paths for section in read_sections(path)], max_dropped),
    )
    return 0


def report(sections: Sequence[Mapping[str, Any]], max_dropped: float) -> str:
    """The whole text, from the `experts` sections of manifests of one model."""
    _check_same_model(sections)
    first = sections[0]
    lines = [
        f"{first['num_experts']} experts, {first['num_chosen']} a token; "
        f"{counted(len(sections), 'run')}; at most {max_dropped:g} of the choices dropped"
    ]
    planned: list[str] = []
    is_lossy = False
    for phase in PHASES:
        use = _together([section[phase] for section in sections if phase in section])
        if use is None:
            lines += ["", f"{phase}: no choices"]
            continue
        dispatch, reason = use.advise(max_dropped)
        is_lossy |= dispatch.kind == "capacity"
        lines += ["", *_table(phase, use)]
        planned += ["", f"# {reason}", *dispatch_lines(phase, dispatch)[1:]]
    if is_lossy:
        planned += ["", *_NOTE.splitlines()]
    return "\n".join([*lines, *planned])


def read_sections(path: Path) -> list[Mapping[str, Any]]:
    """The `experts` sections of a manifest: of its run, or of the parts that were merged."""
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path}: expected a manifest, got no JSON ({error}). Give the file that ends in "
            f".manifest.json, beside a job's output."
        ) from None
    runs = manifest.get("parts", [manifest]) if isinstance(manifest, dict) else []
    statistics = [run["generator"] for run in runs if run.get("generator")]
    if not statistics:
        raise ValueError(
            f"{path}: expected a manifest with the statistics of a run, got one without. A run "
            f"that finds all rows finished has none."
        )
    if "experts" not in statistics[0]:
        raise ValueError(
            f"{path}: expected the manifest of a model with experts, got that of "
            f"{manifest.get('model')}, which is dense."
        )
    model = manifest["configuration"]["model"]
    return [{**of_run["experts"], "model": model} for of_run in statistics]


def _check_same_model(sections: Sequence[Mapping[str, Any]]) -> None:
    models = sorted({section["model"] for section in sections})
    if len(models) > 1:
        raise ValueError(
            f"manifests: expected runs of one model, got {', '.join(models)}. Ask for each apart."
        )


def _together(phases: Sequence[Mapping[str, Any]]) -> PhaseUse | None:
    """One phase of several runs; None where it made no choice."""
    choices = sum(phase["choices"] for phase in phases)
    if not choices:
        return None
    return PhaseUse(
        choices,
        {
            f: sum(phase["would_drop"][str(f)] * phase["choices"] for phase in phases) / choices
            for f in FACTORS
        },
        {f: sum(phase["would_set_aside_rows"][str(f)] for phase in phases) for f in FACTORS},
        sum(
            phase["rows"] if phase["dispatch"] == "lossless" else phase["lossless_rows_at_most"]
            for phase in phases
        ),
        is_bound=any(phase["dispatch"] != "lossless" for phase in phases),
    )


def _table(phase: str, use: PhaseUse) -> list[str]:
    lines = [f"{phase}: {use.choices} choices", "  dispatch        dropped  rows a choice"]
    for factor in FACTORS:
        name, rows = f"capacity {factor}", use.cost(use.rows[factor])
        lines.append(f"  {name:<14}{use.dropped[factor]:>9.3%}  {rows:>13}")
    return [*lines, f"  {'lossless':<14}{0:>9.3%}  {use.lossless_cost:>13}"]
