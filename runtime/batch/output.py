"""Writes the output files and the manifest of a finished job from its journal.

The order of the steps makes it safe to stop at any moment: first the output becomes durable, then
the manifest that proves it complete, and last the journal is removed. Before that, a rerun repeats
all steps and gets the same bytes, because the journal has the output lines as they are written.

Does not know about models. Guarantees: one line for each row of the job's part of the input, in
input order.
"""

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..console import plural
from ..devices.machine import versions
from ..errors import EXIT_RESUMABLE, JobError
from ..files.disk import Disk, replace_file
from ..files.manifest import SCHEMA, digest_table, fingerprint, write_manifest
from ..files.strict_json import dump_line
from ..rows.answer_tables import AddedColumns
from ..rows.figures import OF_ROWS, OTHERS, add, figures_over_rows
from ..rows.results import OutputLines
from ..rows.row_files import encoded
from ..rows.scan import ScannedRow, ScanSummary
from ..rows.tables import CarriedCells, with_carried
from .job import JobIdentity, ModelFacts
from .job_files import JobFiles
from .job_runs import FINISHED, PhaseClock, runs_of, sums_of_runs
from .journal import Journal
from .journal_records import INSTANT, MODEL, OUTPUTS, WEIGHTS


@dataclass(frozen=True)
class RunOutcome:
    """The figures that the last run of a job adds to its manifest."""

    num_kept: int
    """Rows that earlier runs finished."""
    statistics: Mapping[str, Any]
    """The counters of the run."""
    bundle: Mapping[str, Any] | None
    """The use of the bundle's executables; None without a bundle, or without a build."""
    ignored: Mapping[str, int]
    """The number of rows with each unknown key that was ignored."""


@dataclass(frozen=True)
class FinishedRows:
    """The rows of a job, all of which are finished."""

    files: JobFiles
    identity: JobIdentity
    summary: ScanSummary
    journal: Journal
    """The journal, which has every row of the job's part that the scan accepted."""
    lines: OutputLines
    """Makes the lines of rows that the scan found in error."""
    carried: CarriedCells
    """The cells of the input that output lines have."""

    @cached_property
    def rows(self) -> Sequence[ScannedRow]:
        """The rows of the job's part, in input order."""
        return self.identity.part.take(self.summary.rows)

    def code(self, row: ScannedRow) -> str | None:
        """The error code of a row; None for a result."""
        return row.bad.error.code if row.bad is not None else self.journal.rows[row.key].code

    def lines_of(self, path: Path) -> Iterator[bytes]:
        """The lines of one output file in input order."""
        error_file = self.files.error_file
        for row, cells in zip(self.rows, self.carried.of(self.identity.part), strict=False):
            is_error = self.code(row) is not None
            if error_file is not None and is_error != (path == error_file):
                continue
            if row.bad is not None:
                line = dump_line(self.lines.error(row.bad, row.bad.error))
            else:
                line = self.journal.output_line(self.journal.rows[row.key])
            yield with_carried(line, cells) + b"\n"


def finalise(
    finished: FinishedRows, facts: ModelFacts, outcome: RunOutcome, phases: PhaseClock, disk: Disk
) -> dict[str, Any]:
    """Write the outputs and the manifest, and remove the journal.

    Args:
        finished: The rows.
        facts: The facts of the model.
        outcome: The figures of the run.
        phases: The clock of the run, which is the journal's last one.
        disk: Disk operations.

    Returns:
        The manifest.

    Raises:
        JobError: The disk refused a file; the message says what is kept.
    """
    files, journal = finished.files, finished.journal
    try:
        if not journal.binds:
            journal.record_fact(OUTPUTS, "begun")
        outputs = write_outputs(
            disk, files.outputs, finished.lines_of, finished.identity.added_columns
        )
        manifest = _manifest(finished, facts, outcome, outputs, phases)
        write_manifest(disk, files.output, manifest)
        disk.remove(journal.path)
        disk.sync_folder(journal.path.parent)
    except OSError as error:
        kept = f"Every row is kept in {journal.path}; run the same command again to finish."
        if not journal.path.exists():
            kept = "Its journal is missing too, so the same command begins at the first row."
        raise JobError(
            f"{files.output}: cannot be written ({error.strerror or error}). {kept}",
            EXIT_RESUMABLE,
        ) from error
    return manifest


def _manifest(
    finished: FinishedRows,
    facts: ModelFacts,
    outcome: RunOutcome,
    outputs: Mapping[str, Any],
    phases: PhaseClock,
) -> dict[str, Any]:
    """The manifest of the job, whose run ends now."""
    journal = finished.journal
    done = [journal.rows[row.key].metrics for row in finished.rows if row.bad is None]
    journal.runs[-1].take(phases, FINISHED)
    runs = [run.figures() for run in journal.runs]
    return {
        **_job_facts(finished, facts, outputs),
        "rows": {
            **count_outcomes(map(finished.code, finished.rows)),
            "kept_from_earlier_runs": outcome.num_kept,
            **figures_over_rows(OF_ROWS, done),
        },
        "ignored_keys": dict(outcome.ignored),
        "bundle": outcome.bundle,
        **figures_over_rows(OTHERS, done),
        "compiles_during_run": outcome.statistics.get("compiles_during_run", 0),
        "generator": dict(outcome.statistics),
        **sums_of_runs(runs),
        "runs": runs,
    }


def _job_facts(
    finished: FinishedRows, facts: ModelFacts, outputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts of a job: its model, configuration, input and outputs."""
    identity, journal, summary = finished.identity, finished.journal, finished.summary
    files, plan = finished.files, journal.plan
    return {
        "schema": SCHEMA,
        "model": journal.facts.get(MODEL, facts.name),
        "weights": journal.facts.get(WEIGHTS),
        "versions": versions(),
        "platform": {"python": platform.python_version(), "system": platform.platform()},
        "configuration": identity.stored,
        "setups": journal.setups,
        "fingerprint": fingerprint(identity.configuration),
        "plan": plan,
        "plan_fingerprint": plan and "sha256:" + hashlib.sha256(plan.encode()).hexdigest(),
        "instant": journal.facts.get(INSTANT),
        "sampling_defaults": {
            "values": dict(facts.sampling_defaults),
            "source": facts.sampling_defaults_source,
        },
        "config_keys_ignored": list(facts.config_keys_ignored),
        "tensors_not_read": dict(facts.tensors_not_read),
        "input": {
            "name": "stdin" if files.reads_stdin else files.input_url or files.input.name,
            "sha256": summary.input_sha256,
            "bytes": summary.num_bytes,
            "rows": len(summary.rows),
        },
        "outputs": outputs,
    }


def write_outputs(
    disk: Disk,
    outputs: Sequence[Path],
    lines_of: Callable[[Path], Iterable[bytes]],
    added: AddedColumns,
) -> dict[str, Any]:
    """Write all outputs, each complete or not at all; return their digests by name."""
    # the main output last: if it exists, the others exist too
    return {
        path.name: digest_table(
            replace_file(disk, path, encoded(path, partial(lines_of, path), added))
        )
        for path in reversed(outputs)
    }


def summarise(output: Path, manifest: Mapping[str, Any]) -> str:
    """One line about a finished job, for people."""
    rows, rate = manifest["rows"], manifest["output_tokens_per_second"]
    message = f"{output}: {plural(rows['total'], 'row')}, {plural(rows['errors'], 'error')}"
    shown = [figure for figure in OF_ROWS if figure.shown and rows[figure.name]]
    message += "".join(f", {rows[figure.name]} {figure.shown}" for figure in shown)
    if rate:
        message += f", {rate:.1f} output tokens/s with prefill"
    # a job with stages has runs of its stages instead
    if (num_runs := len(manifest.get("runs", ()))) > 1:
        message += f" in {num_runs} runs"
    phases = ("scan", "load", "build", "run")
    seconds = (f"{phase} {manifest[f'{phase}_seconds']:.1f} s" for phase in phases)
    return f"{message}  ({', '.join(seconds)})"


def count_outcomes(codes: Iterable[str | None]) -> dict[str, Any]:
    """The numbers of rows by outcome, from the error code of every row; None is a result."""
    counts = Counter(codes)
    num_ok = counts.pop(None, 0)
    return {
        "total": num_ok + counts.total(),
        "ok": num_ok,
        "errors": counts.total(),
        "errors_by_code": {str(code): counts[code] for code in sorted(counts, key=str)},
    }


def add_outcomes(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of the row counts of several parts."""
    return {key: add([rows[key] for rows in parts]) for key in parts[0]}


def add_figures(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the job of parts or stages: their sums, and those of all their runs."""
    runs = [run for manifest in manifests for run in runs_of(manifest)]
    sums = {figure.name: figure.zero for figure in OTHERS if figure.over_parts == "sum"}
    # parts of an earlier noria do not have all figures
    added = {
        name: add([zero, *(m[name] for m in manifests if name in m)]) for name, zero in sums.items()
    }
    return {**added, **sums_of_runs(runs)}
