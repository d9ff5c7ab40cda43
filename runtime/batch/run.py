"""The batch job: scan the input, build the graphs, run the rows, put the output together.

Everything that touches a device comes through `JobModel`, so a job can be tested, and a finished
one recognised, without any. Files of a job beside `out.jsonl`: `.journal` while it is unfinished,
`.lock` while it runs, `.manifest.json` once it is complete.

Guarantees: every row of the input, or of the job's part of it, is exactly one row of the output, in
input order; a part gives the answers that the whole job would give; a job that is killed at any
moment and run again writes the file that it would have written at once; a complete job run again
does nothing.
"""

import hashlib
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..console import plural
from ..errors import (
    EXIT_BUILD,
    EXIT_MODEL,
    EXIT_OK,
    EXIT_RESUMABLE,
    EXIT_ROWS_FAILED,
    InputError,
    JobError,
    RowError,
)
from ..files.disk import Disk
from ..pods.peers import ALONE, GO, Peers
from ..request import Request, RequestOutput
from .finished import exit_code_of, finished_manifest, refuse_foreign_outputs
from .job import Build, JobModel, JobSettings
from .job_input import JobInput, decide_instant, open_input, record_instant
from .journal import RETRIED_CODES, Journal
from .journal_records import MODEL, PLAN, WEIGHTS
from .lines import BadRow, BatchRow
from .lock import JobLock
from .manifest import PhaseClock, fingerprint, manifest_path
from .output import finalise, summarise
from .progress import Progress
from .results import OutputLines, error_of_line, row_metrics
from .scan import ScannedRow, ScanSummary, check_input
from .stop_signals import EXIT_CODES, Drain, StopSignals

if TYPE_CHECKING:
    from ..engine.generation import GenerationSession


def run_job(
    settings: JobSettings,
    model: JobModel,
    *,
    peers: Peers = ALONE,
    progress: Progress | None = None,
    disk: Disk | None = None,
    phases: PhaseClock | None = None,
) -> int:
    """Run a job to its end, or go on with one that was stopped; returns the exit code."""
    progress, disk, phases = progress or Progress(), disk or Disk(), phases or PhaseClock()
    check_input(settings.input_path)
    of_run = {"peers": peers, "disk": disk, "progress": progress, "phases": phases}
    if not peers.is_leader:
        with StopSignals() as stop:
            # process 0 may have nothing to do
            if (code := peers.broadcast(None)) is not None:
                return code
            with open_input(settings, model, peers.broadcast("")) as source:
                return _Job(settings, model, source, None, stop=stop, **of_run).run()
    settings.check_files()
    with StopSignals() as stop, JobLock(settings.lock_path) as lock:
        # the next run may be on another host, which cannot tell that this process is gone
        peers.on_abort(lock.release)
        if settings.restart:
            # the manifest first: without it the old output no longer counts as complete
            disk.remove(manifest_path(settings.output_path))
            disk.remove(settings.journal_path)
        elif (manifest := finished_manifest(settings)) is not None:
            _check_finished_by(settings, manifest.get("weights"), model)
            disk.remove(settings.journal_path)
            errors = plural(manifest["rows"]["errors"], "error")
            progress.note(f"{settings.output_path}: complete already, {errors}, nothing to do")
            return peers.broadcast(exit_code_of(settings, manifest))
        refuse_foreign_outputs(settings)
        journal = Journal.open(
            settings.journal_path,
            settings.stored_configuration,
            may_differ=settings.may_differ,
            disk=disk,
        )
        with closing(journal):
            now = decide_instant(settings, journal)
            peers.broadcast(None)
            with open_input(settings, model, peers.broadcast(now)) as source:
                return _Job(settings, model, source, journal, stop=stop, **of_run).run()


@dataclass
class _Job:
    """One run of a job, its journal open and its output locked where this process leads."""

    settings: JobSettings
    model: JobModel
    source: JobInput
    journal: Journal | None
    """None on a process that follows: what it does is recorded by process 0."""
    peers: Peers
    disk: Disk
    progress: Progress
    phases: PhaseClock
    stop: StopSignals
    in_flight: dict[str, BatchRow] = field(default_factory=dict)
    num_tokens: int = 0

    def __post_init__(self):
        facts = {} if self.journal is None else self.journal.facts
        self.lines = OutputLines(
            # a folder may have another name by now
            model_name=facts.get(MODEL, self.settings.model_name),
            fingerprint=fingerprint(self.settings.configuration),
            tokens=self.source.text.tokens,
        )

    def run(self) -> int:
        summary = self.source.scan(self._saw_bad_row, self.progress)
        if self.journal is not None and self.source.text.reads_clock():
            # later runs of the job must show the same
            record_instant(self.source.now, self.journal)
            if self.settings.part.of > 1 and self.settings.now is None:
                # said before the work, as merging comes after it
                self.progress.note(
                    f"prompts show the time, and parts with different times cannot be merged: "
                    f"run every part with --now {self.source.now}"
                )
        self.peers.agree(lambda: _facts(self.settings, summary))
        # the scan is of the whole input: duplicates, and the plan, are those of the whole job
        rows = self.settings.part.take(summary.rows)
        kept = set(self.peers.broadcast([row.row for row in rows if self._is_kept(row)]))
        waiting = [row for row in rows if row.requirements is not None and row.row not in kept]
        num_bad = sum(row.bad is not None for row in rows)
        num_kept = len(rows) - num_bad - len(waiting)
        if num_kept:
            kept_rows = plural(num_kept, "finished row")
            self.progress.note(f"resumed: {kept_rows}, {len(waiting)} to go")
            self._show_kept_error(row for row in rows if row.row in kept)

        statistics: dict[str, Any] = {}
        if waiting:
            built = self._build(summary)
            self.phases.enter("run")
            self.progress.start_rows(len(rows), done=num_bad + num_kept, errors=num_bad)
            stopped_by = self._run_rows(built, waiting)
            self.progress.finish()
            if stopped_by is not None:
                return self._stopped(stopped_by, len(rows))
            statistics = built.generator.statistics()
        elif self.journal is not None:
            _check_finished_by(self.settings, self.journal.facts.get(WEIGHTS), self.model)
        self.phases.enter("run")
        return self._finish(summary, statistics, num_kept)

    def _is_kept(self, row: ScannedRow) -> bool:
        known = self.journal and row.requirements and self.journal.rows.get(row.key)
        return bool(known) and known.code not in RETRIED_CODES

    def _show_kept_error(self, rows: Iterable[ScannedRow]) -> None:
        """Show the error of a row that an earlier run of the job has finished."""
        known = self.journal.rows if self.journal is not None else {}
        for row in rows:
            if self.journal is not None and row.key in known and known[row.key].code is not None:
                error = error_of_line(self.journal.output_line(known[row.key]))
                if error is not None:
                    self.progress.show_error(_in_words(row, error))
                return

    def _build(self, summary: ScanSummary) -> Build:
        self.phases.enter("load")
        stored_plan = self.peers.broadcast(self.journal and self.journal.plan)
        try:
            built = self.model.build(
                summary, stored_plan, phases=self.phases, progress=self.progress
            )
        except JobError:
            raise
        except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
            usual = EXIT_MODEL if self.phases.phase == "load" else EXIT_BUILD
            code = getattr(error, "exit_code", usual)
            raise JobError(str(error) or type(error).__name__, code) from error
        if self.journal is not None:
            _check_weights(self.settings, self.journal.facts.get(WEIGHTS), built.weights)
            if stored_plan is None:
                self.journal.record_fact(MODEL, self.settings.model_name)
                self.journal.record_fact(WEIGHTS, built.weights)
            elif stored_plan != built.plan and _schema(stored_plan) == _schema(built.plan):
                raise JobError(
                    f"{self.settings.journal_path}: expected the plan that the job was begun with, "
                    f"got another one from the build. Discard the journal with --restart.",
                    EXIT_BUILD,
                )
            if stored_plan != built.plan:
                # recorded last: a journal with a plan binds later runs. A plan of an older schema
                # is the same plan in other words, and is recorded anew in today's
                self.journal.record_fact(PLAN, built.plan)
        return built

    def _run_rows(self, built: Build, rows: Sequence[ScannedRow]) -> str | None:
        """Run rows until none waits, or until a signal; returns its name if it left any."""
        generator = built.generator
        needs = [row.requirements for row in rows if row.requirements is not None]
        assert len(needs) == len(rows)
        order = built.order([(need.prompt_length, need.max_tokens) for need in needs])
        waiting = deque(rows[i] for i in order)
        drain = Drain(self.stop, self.peers, self.settings.grace_seconds)
        directive = GO
        while True:
            # a call is in flight, and what is fed now is not asked for before it ends
            if directive.action == "go":
                self._feed(generator, waiting)
            with self._device_errors():
                self.peers.record(generator.receive())
            # after the feeding and after the last row: a process that was fed or got something
            # else is found before it leaves the others alone in a collective
            previous, directive = directive, drain.next_directive()
            if directive.action != "go" and previous.action == "go":
                self._record_finished(generator)
                if generator.unfinished:
                    generator.drain()
                    self.progress.note(
                        f"{directive.signal}: finishing {plural(generator.unfinished, 'row')} in "
                        f"flight, at most {self.settings.grace_seconds:g} s"
                    )
            try:
                if directive.action != "stop":
                    with self._device_errors():
                        generator.dispatch()
            finally:
                # while the device runs
                self._record_finished(generator)
            if directive.action == "stop" or not generator.unfinished:
                break
            if self.journal is not None:
                self.journal.sync_if_due()
            self.progress.update(lambda: generator.padding_waste)
        drain.end()
        if self.journal is not None:
            self.journal.sync()
        return directive.signal if waiting or self.in_flight else None

    def _feed(self, generator: "GenerationSession", waiting: deque[ScannedRow]) -> None:
        """Submit rows while the generator wants them; a row that it refuses is finished."""
        while waiting and generator.wants_more:
            scanned = waiting.popleft()
            try:
                row = self.source.read(scanned)
            except InputError as error:
                raise JobError(str(error), EXIT_RESUMABLE) from None
            self.in_flight[row.custom_id] = row
            try:
                token_ids = self.source.token_ids_of(row, scanned)
                generator.submit(Request(row.custom_id, token_ids, row.params, row.prompt))
                self.peers.record(row.row, len(token_ids))
            except RowError as error:
                del self.in_flight[row.custom_id]
                self.peers.record(row.row, error.code)
                self._record(row, RequestOutput(row.custom_id, None, [], error=error))

    def _record_finished(self, generator: "GenerationSession") -> None:
        for output in generator.collect():
            self._record(self.in_flight.pop(output.request_id), output)

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        """Say where finished rows are if the device fails."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            # where processes share a collective, one that is lost fails all others
            self.peers.await_verdict()
            raise JobError(
                f"the device failed: {error}. Finished rows are kept in "
                f"{self.settings.journal_path}.",
                EXIT_BUILD,
            ) from error

    def _record(self, row: BatchRow, output: RequestOutput) -> None:
        """Write one finished row to the journal."""
        if self.journal is None:
            return
        try:
            line = self.lines.result(row, output)
            error = output.error
        except RowError as problem:  # a log-probability that is no number
            line, error = self.lines.error(row, problem), problem
        metrics = row_metrics(row, output)
        self.journal.record_row(
            row=row.row,
            custom_id=row.custom_id,
            request_hash=row.request_hash,
            line=line,
            code=error.code if error else None,
            metrics=metrics,
        )
        num_tokens = int(metrics.get("output_tokens", 0))
        self.num_tokens += num_tokens
        self.progress.row(tokens=num_tokens, is_error=error is not None)
        if error is not None:
            self.progress.show_error(_in_words(row, error))
            if self.settings.on_error == "raise":
                raise JobError(_in_words(row, error), EXIT_ROWS_FAILED)

    def _saw_bad_row(self, bad: BadRow) -> None:
        if self.settings.on_error == "raise":
            raise JobError(_in_words(bad, bad.error), EXIT_ROWS_FAILED)
        if self.settings.part.has(bad.row):
            self.progress.show_error(_in_words(bad, bad.error))

    def _stopped(self, signal_name: str, num_rows: int) -> int:
        num_kept = len(self.journal.rows) if self.journal is not None else 0
        self.progress.note(
            f"stopped by {signal_name}: {num_kept} of {plural(num_rows, 'row')} finished, kept in "
            f"{self.settings.journal_path}; run the same command again to go on"
        )
        return EXIT_CODES[signal.Signals[signal_name]]

    def _finish(self, summary: ScanSummary, statistics: Mapping[str, Any], num_kept: int) -> int:
        if self.journal is None:
            return self.peers.broadcast(EXIT_OK)
        manifest = finalise(
            self.settings,
            summary,
            self.journal,
            self.lines,
            disk=self.disk,
            phases=self.phases,
            statistics=statistics,
            num_kept=num_kept,
            num_tokens=self.num_tokens,
        )
        self.progress.note(summarise(self.settings.output_path, manifest))
        return self.peers.broadcast(exit_code_of(self.settings, manifest))


def _facts(settings: JobSettings, summary: ScanSummary) -> dict[str, str]:
    """What all processes of a job must have in common before they run it."""
    rows = hashlib.sha256()
    for row in summary.rows:
        rows.update(repr((row.key, row.requirements, row.bad and row.bad.error.code)).encode())
    return {
        **settings.stored_configuration,
        "on-error": settings.on_error,
        "input": f"sha256:{summary.input_sha256}",
        "rows as tokenized": f"sha256:{rows.hexdigest()}",
    }


def _check_finished_by(settings: JobSettings, stored: str | None, model: JobModel) -> None:
    """Refuse rows that other weights have answered; `stored` is None if no weights were used."""
    if stored is not None:
        _check_weights(settings, stored, model.weights())


def _schema(plan: str) -> str:
    """The line of a plan that names its schema."""
    return plan.partition("\n")[0]


def _check_weights(settings: JobSettings, stored: str | None, found: str) -> None:
    """Refuse weights other than those that the user expects or that the job began with."""
    if settings.expected_weights not in (None, found):
        raise JobError(
            f"--expect-weights: expected weights with the digest {settings.expected_weights}, got "
            f"{found}. Give the model that the digest is of, or the digest of this one.",
            EXIT_MODEL,
        )
    if stored not in (None, found):
        raise JobError(
            f"{settings.output_path}: expected the weights that its rows were answered with, got "
            f"others, although the model is the same in all else:\n  weights: there {stored}, now "
            f"{found}\nRun with the original weights, choose another output, or begin again with "
            f"--restart.",
            EXIT_MODEL,
        )


def _in_words(row: BatchRow | BadRow | ScannedRow, error: RowError) -> str:
    line = f"line {row.line_number}"
    name = line if row.custom_id is None else f"row {row.custom_id!r} ({line})"
    return f"{name}: {error.code}: {error.message.removeprefix(f'{line}: ')}"
