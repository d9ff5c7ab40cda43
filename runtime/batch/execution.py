"""Executes one run of a job in one process: scan, build, run the rows, write the outputs.

Does not know about locks or about finished jobs: `run.py` opens the files. Guarantees: all
processes of a pod take the same steps in the same order.
"""

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..console import plural
from ..errors import (
    EXIT_BUG,
    EXIT_BUILD,
    EXIT_MODEL,
    EXIT_OK,
    EXIT_ROWS_FAILED,
    JobError,
    exit_code,
)
from ..files.manifest import fingerprint
from ..process.stop_signals import EXIT_CODES
from ..rows.lines import BadRow
from ..rows.results import OutputLines, error_of_line, error_text
from ..rows.scan import ScannedRow, ScanSummary
from .finished import check_same_answers, check_weights, exit_code_of
from .job import Build, Job, facts_to_agree_on
from .job_input import JobInput
from .journal import RETRIED_CODES, Journal
from .journal_records import INSTANT, MODEL, PLAN, WEIGHTS
from .output import FinishedRows, RunOutcome, finalise, summarise
from .row_runner import RowRunner
from .update import keep_answers


class BegunJob(NamedTuple):
    """The files of a job in one of its processes, ready for a run."""

    journal: Journal | None
    """The journal; None on processes other than the leader, which records all rows."""
    now: str
    """The local time that chat templates see; empty on processes other than the leader."""
    keeps_answers: bool = False
    """Whether rows keep the answers that the finished outputs have."""
    check_lock: Callable[[], None] = lambda: None
    """Raises an error if another process has taken over the output."""


@dataclass
class Execution(Job):
    """One run of a job; on the leader the journal is open and the output is locked."""

    source: JobInput
    begun: BegunJob

    def __post_init__(self):
        self.files, self.identity = self.settings.files, self.settings.identity
        self.facts, self.journal = self.settings.facts, self.begun.journal
        facts = {} if self.journal is None else self.journal.facts
        self.lines = OutputLines(
            # the first run's name, as the model's folder may have been renamed since
            model_name=facts.get(MODEL, self.facts.name),
            fingerprint=fingerprint(self.identity.configuration),
            tokens=self.source.text.tokens,
            pooling=lambda: self.model.pooling(),
        )

    def run(self) -> int:
        """Run the job; return the exit code."""
        summary = self.source.scan(self._show_bad_row, self.progress)
        # the whole input was scanned, so a part has the duplicates and the plan of the whole job
        rows = self.identity.part.take(summary.rows)
        if self.begun.keeps_answers and self.journal is not None:
            keep_answers(self.files.outputs, rows, self.journal, self.lines)
        if self.journal is not None and self.source.text.reads_clock():
            self._bind_to_time(self.journal)
        self.peers.agree(lambda: facts_to_agree_on(self.identity, self.source.rules, summary))
        kept = set(self.peers.broadcast([row.row for row in rows if self._is_kept(row)]))
        waiting = [row for row in rows if row.requirements is not None and row.row not in kept]
        num_bad = sum(row.bad is not None for row in rows)
        num_kept = len(rows) - num_bad - len(waiting)
        if num_kept:
            kept_rows = plural(num_kept, "finished row")
            self.progress.note(f"resumed: {kept_rows}, {len(waiting)} to go")
            self._show_kept_error(row for row in rows if row.row in kept)

        statistics: dict[str, Any] = {}
        better_plan, bundle = None, None
        if waiting:
            computed, repeats = self.source.digests.split(waiting)
            if num_repeats := len(waiting) - len(computed):
                repeat = "repeats an earlier row" if num_repeats == 1 else "repeat earlier rows"
                self.progress.note(f"{plural(num_repeats, 'row')} {repeat}")
            built = self._build(summary)
            self.phases.enter("run")
            self.progress.start_rows(
                len(rows), done=num_bad + num_kept, errors=num_bad, max_tokens=_max_tokens(computed)
            )
            table = summary.prefixes.of_rows([row.row for row in computed])
            runner = RowRunner(
                self.source,
                self.journal,
                self.lines,
                self.peers,
                self.progress,
                self.stop,
                repeats,
                journal_path=self.files.journal,
            )
            stopped_by = runner.run(built, computed, table)
            self.progress.finish()
            if stopped_by is not None:
                return self._stopped(stopped_by, len(rows))
            statistics = built.with_waste(built.generator.statistics())
            bundle = built.bundle
            better_plan = partial(built.better_plan, self._output_lengths(computed))
        elif self.journal is not None and WEIGHTS in self.journal.facts:
            stored = self.journal.facts[WEIGHTS]
            check_weights(self.model.weights(), self.facts, stored, self.files)
        self.phases.enter("run")
        outcome = RunOutcome(num_kept, statistics, bundle, self.source.ignored)
        return self._finish(summary, outcome, better_plan)

    def _bind_to_time(self, journal: Journal) -> None:
        """Record the time that prompts show, as later runs of the job must show the same time."""
        if INSTANT not in journal.facts:
            journal.record_fact(INSTANT, self.source.now)
        part = self.identity.part_of_stages or self.identity.part
        if part.num_parts > 1 and self.identity.now is None:
            # before the rows run, so that the user can restart with the option
            self.progress.warn(
                f"prompts show the time, and parts with different times cannot be merged: "
                f"run every part with --now {self.source.now}"
            )

    def _is_kept(self, row: ScannedRow) -> bool:
        """Whether an earlier run has finished the row, and this run need not try it again."""
        known = self.journal and row.requirements and self.journal.rows.get(row.key)
        return bool(known) and known.code not in RETRIED_CODES

    def _show_kept_error(self, rows: Iterable[ScannedRow]) -> None:
        """Show the first error among rows that earlier runs of the job have finished."""
        known = self.journal.rows if self.journal is not None else {}
        for row in rows:
            if self.journal is not None and row.key in known and known[row.key].code is not None:
                error = error_of_line(self.journal.output_line(known[row.key]))
                if error is not None:
                    self.progress.show_error(error_text(row, error))
                return

    def _build(self, summary: ScanSummary) -> Build:
        """Build the model, and record the plan and the weights in the journal."""
        self.phases.enter("load")
        stored_plan = self.peers.broadcast(self.journal and self.journal.plan)
        try:
            built = self.model.build(
                summary, stored_plan, phases=self.phases, progress=self.progress
            )
        except Exception as error:
            if isinstance(error, JobError) or exit_code(error) == EXIT_BUG:
                raise
            default_code = EXIT_MODEL if self.phases.phase == "load" else EXIT_BUILD
            code = getattr(error, "exit_code", default_code)
            raise JobError(str(error) or type(error).__name__, code) from error
        if self.journal is not None:
            self._record_build(self.journal, stored_plan, built, summary)
        return built

    def _record_build(
        self, journal: Journal, stored_plan: str | None, built: Build, summary: ScanSummary
    ) -> None:
        """Record the plan and the weights, or check that they equal the stored ones."""
        check_weights(built.weights, self.facts, journal.facts.get(WEIGHTS), self.files)
        if stored_plan not in (None, built.plan):
            raise JobError(
                f"{journal.path}: expected the plan that the job was begun with, "
                f"got another one from the build. Discard the journal with --restart.",
                EXIT_BUILD,
            )
        if stored_plan is not None:
            return
        if journal.plan_before is not None:
            is_open = any(need.max_tokens is None for need in summary.requirements)
            before, plan = journal.plan_before, built.plan
            check_same_answers(self.files.output, before, plan, has_open_rows=is_open)
        else:
            journal.record_fact(MODEL, self.facts.name)
            journal.record_fact(WEIGHTS, built.weights)
        # recorded last, as a journal with a plan binds later runs
        journal.record_fact(PLAN, built.plan)

    def _show_bad_row(self, bad: BadRow) -> None:
        """Show a row that the scan found in error, or end the job if bad rows end it."""
        if self.source.rules.on_error == "raise":
            raise JobError(error_text(bad, bad.error), EXIT_ROWS_FAILED)
        if self.identity.part.has(bad.row):
            self.progress.show_error(error_text(bad, bad.error))

    def _stopped(self, signal_name: str, num_rows: int) -> int:
        """Say how many rows are kept; return the exit code of the signal."""
        num_kept = 0
        if self.journal is not None:
            num_kept = len(self.journal.rows)
            self.journal.runs[-1].take(self.phases, signal_name)
            self.journal.record_run(len(self.journal.runs) - 1)
        self.progress.warn(
            f"stopped by {signal_name}: {num_kept} of {plural(num_rows, 'row')} finished, kept in "
            f"{self.files.journal}; run the same command again to continue"
        )
        return EXIT_CODES[signal.Signals[signal_name]]

    def _output_lengths(self, rows: Iterable[ScannedRow]) -> dict[int, int]:
        """The average number of output tokens of a sequence, for each row that has a result."""
        known, lengths = {} if self.journal is None else self.journal.rows, {}
        for row in rows:
            done = known.get(row.key)
            if done is not None and done.code is None and row.requirements is not None:
                tokens = int(done.metrics.get("output_tokens", 0))
                lengths[row.row] = tokens // row.requirements.n
        return lengths

    def _finish(
        self,
        summary: ScanSummary,
        outcome: RunOutcome,
        better_plan: Callable[[float], str | None] | None,
    ) -> int:
        """Write the outputs on the leader; return the exit code."""
        if self.journal is None:
            return self.peers.broadcast(EXIT_OK)
        self.begun.check_lock()
        finished = FinishedRows(
            self.files, self.identity, summary, self.journal, self.lines, self.source.rows.carried
        )
        manifest = finalise(finished, self.facts, outcome, self.phases, self.disk)
        self.progress.note(summarise(self.files.output, manifest))
        run_seconds = manifest["runs"][-1]["run_seconds"]
        if better_plan is not None and (note := better_plan(run_seconds)):
            self.progress.note(note)
        return self.peers.broadcast(exit_code_of(self.files.output, manifest))


def _max_tokens(rows: Iterable[ScannedRow]) -> int | None:
    """The tokens that rows can have together; None if one has no `max_tokens`."""
    needs = [row.requirements for row in rows if row.requirements is not None]
    limits = [need.max_tokens * need.n for need in needs if need.max_tokens is not None]
    return sum(limits) if len(limits) == len(needs) else None
