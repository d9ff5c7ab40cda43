"""Keeps the answers of a finished job whose input has changed; only new and changed rows run.

The id of an output line is a hash of the row's custom_id, its request and the configuration. So an
old answer belongs to a row of the new input if both have the same id, and the old input is not
needed.

Does not know how rows run. Guarantees: the finished output stays until the new one replaces it; the
plan, the weights and the time stay those of the finished job.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..rows.figures import figures_of_answer
from ..rows.results import OutputLines, error_in
from ..rows.row_files import output_lines
from ..rows.scan import ScannedRow
from ..rows.tables import CARRIED
from .journal import Journal
from .journal_records import INSTANT, MODEL, PLAN, WEIGHTS

_FACTS = {MODEL: "model", WEIGHTS: "weights", INSTANT: "instant", PLAN: "plan"}
"""The keys of a manifest by the facts of a journal; the plan binds, so it is recorded last."""


def keep_facts(manifest: Mapping[str, Any], journal: Journal) -> None:
    """Record the decisions of a finished job, unless the journal has decisions already."""
    if journal.plan is None and manifest["plan"] is not None:
        for fact, key in _FACTS.items():
            if fact not in journal.facts and manifest[key] is not None:
                journal.record_fact(fact, manifest[key])


def keep_answers(
    outputs: Iterable[Path], rows: Iterable[ScannedRow], journal: Journal, lines: OutputLines
) -> None:
    """Record the answers in finished outputs of all rows that the new input still has.

    Raises:
        InputError: A finished output is damaged.
    """
    wanted = {
        lines.id_of(row): row
        for row in rows
        if row.requirements is not None and row.key not in journal.rows
    }
    for path in outputs:
        with path.open("rb") as file:
            for content in output_lines(path, file):
                line = json.loads(content)
                # the row of the new input has cells of its own
                line.pop(CARRIED, None)
                if (row := wanted.get(line["id"])) is not None:
                    error, body = error_in(line), (line["response"] or {}).get("body") or {}
                    has_limit = row.requirements is None or row.requirements.max_tokens is not None
                    figures = figures_of_answer(body, has_limit=has_limit)
                    journal.record_row(row, line, error and error.code, figures)
