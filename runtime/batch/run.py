"""The batch job: scan the input, build the graphs, run the rows, put the output together.

Everything that touches a device comes through `JobModel`, so a job can be tested, and a finished
one recognised, without any. Files of a job beside `out.jsonl`: `.journal` while it is unfinished,
`.lock` while it runs, `.manifest.json` once it is complete.

Guarantees: every row of the input, or of the job's part of it, is exactly one row of the output, in
input order; a part gives the answers that the whole job would give; a job that is killed at any
moment and run again writes the file that it would have written at once; a complete job run again
does nothing.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from typing import Any, BinaryIO

from ..request import Request, RequestOutput, RowError
from .disk import Disk
from .job import (
    EXIT_BUILD,
    EXIT_MODEL,
    EXIT_OK,
    EXIT_RESUMABLE,
    EXIT_ROWS_FAILED,
    Build,
    Generator,
    JobError,
    JobModel,
    JobSettings,
    JobText,
)
from .journal import RETRIED_CODES, Journal
from .lines import BadRow, BatchRow
from .lock import JobLock
from .manifest import PhaseClock, fingerprint, is_complete, manifest_path
from .output import check_outputs, finalise, summarise
from .progress import Progress
from .results import OutputLines
from .scan import InputError, ScannedRow, ScanSummary, check_input, read_again, scan
from .stop_signals import EXIT_CODES, StopSignals


def run_job(
    settings: JobSettings,
    model: JobModel,
    *,
    progress: Progress | None = None,
    disk: Disk | None = None,
    phases: PhaseClock | None = None,
) -> int:
    """Run a job to its end, or go on with one that was stopped; returns the exit code."""
    progress, disk, phases = progress or Progress(), disk or Disk(), phases or PhaseClock()
    check_input(settings.input_path)
    check_outputs(settings.outputs, [settings.input_path], "the input")
    with StopSignals() as stop, JobLock(settings.lock_path):
        if settings.restart:
            # the manifest first: without it the old output no longer counts as complete
            disk.remove(manifest_path(settings.output_path))
            disk.remove(settings.journal_path)
        elif (manifest := _complete(settings)) is not None:
            disk.remove(settings.journal_path)
            progress.note(f"{settings.output_path}: complete already, nothing to do")
            return EXIT_ROWS_FAILED if manifest["rows"]["errors"] else EXIT_OK
        _refuse_foreign_outputs(settings)
        journal = Journal.open(settings.journal_path, settings.stored_configuration, disk=disk)
        with (
            closing(journal),
            settings.input_path.open("rb") as input_file,
            model.open_text() as text,
        ):
            job = _Job(settings, model, text, input_file, journal, disk, progress, phases, stop)
            return job.run()


class _Job:
    """One run of a job, its journal open and its output locked."""

    def __init__(
        self,
        settings: JobSettings,
        model: JobModel,
        text: JobText,
        input_file: BinaryIO,
        journal: Journal,
        disk: Disk,
        progress: Progress,
        phases: PhaseClock,
        stop: StopSignals,
    ):
        self._settings = settings
        self._model = model
        self._text = text
        self._input_file = input_file
        self._journal = journal
        self._disk = disk
        self._progress = progress
        self._phases = phases
        self._stop = stop
        self._lines = OutputLines(
            model_name=settings.model_name,
            fingerprint=fingerprint(settings.configuration),
            tokens=text.tokens,
        )
        self._in_flight: dict[str, BatchRow] = {}
        self._num_tokens = 0

    def run(self) -> int:
        summary = scan(
            self._input_file,
            self._text.encode,
            defaults=self._settings.sampling_defaults,
            on_error=self._refuse_if_asked,
        )
        # the scan is of the whole input: duplicates, and the plan, are those of the whole job
        rows = self._settings.part.take(summary.rows)
        waiting = [row for row in rows if row.need is not None and not self._is_kept(row)]
        num_bad = sum(row.bad is not None for row in rows)
        num_kept = len(rows) - num_bad - len(waiting)
        if num_kept:
            self._progress.note(f"resumed: {num_kept} rows are finished, {len(waiting)} to go")

        statistics: dict[str, Any] = {}
        if waiting:
            built = self._build(summary)
            self._phases.enter("run")
            self._progress.start_rows(len(rows), done=num_bad + num_kept, errors=num_bad)
            is_finished = self._run_rows(built, waiting)
            self._progress.finish()
            if not is_finished:
                return self._stopped(len(rows))
            statistics = built.generator.statistics()
        self._phases.enter("run")
        manifest = finalise(
            self._settings,
            summary,
            self._journal,
            self._lines,
            disk=self._disk,
            phases=self._phases,
            statistics=statistics,
            num_kept=num_kept,
            num_tokens=self._num_tokens,
        )
        self._progress.note(summarise(self._settings.output_path, manifest))
        return EXIT_ROWS_FAILED if manifest["rows"]["errors"] else EXIT_OK

    def _is_kept(self, row: ScannedRow) -> bool:
        known = self._journal.rows.get(row.key)
        return known is not None and known.code not in RETRIED_CODES

    def _build(self, summary: ScanSummary) -> Build:
        self._phases.enter("load")
        try:
            built = self._model.build(
                summary, self._journal.plan, phases=self._phases, progress=self._progress
            )
        except JobError:
            raise
        except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
            code = EXIT_MODEL if self._phases.phase == "load" else EXIT_BUILD
            raise JobError(str(error) or type(error).__name__, code) from error
        if self._journal.plan is None:
            self._journal.record_plan(built.plan)
        elif self._journal.plan != built.plan:
            raise JobError(
                f"{self._journal.path}: expected the plan that the job was begun with, got another "
                "one from the build. Discard the journal with --restart.",
                EXIT_BUILD,
            )
        return built

    def _run_rows(self, built: Build, rows: Sequence[ScannedRow]) -> bool:
        """Run rows until none waits, or a signal came and what was in flight has ended."""
        generator = built.generator

        def order(row: ScannedRow) -> tuple[float, int]:
            assert row.need is not None
            return built.order(row.need.prompt_length, row.need.max_tokens), row.row

        waiting = deque(sorted(rows, key=order))
        self._stop.can_drain = True
        deadline = None
        while waiting or generator.unfinished:
            if self._stop.requested is not None:
                if deadline is None:
                    deadline = time.monotonic() + self._settings.grace_seconds
                    generator.drain()
                    self._progress.note(
                        f"{self._stop.requested.name}: finishing {generator.unfinished} rows in "
                        f"flight, at most {self._settings.grace_seconds:g} s"
                    )
                if not generator.unfinished or time.monotonic() >= deadline:
                    break
            else:
                self._feed(generator, waiting)
            for output in self._step(generator):
                self._record(self._in_flight.pop(output.request_id), output)
            self._progress.update(lambda: _padding_waste(generator))
        self._stop.can_drain = False
        self._journal.sync()
        return not waiting and not self._in_flight

    def _feed(self, generator: Generator, waiting: deque[ScannedRow]) -> None:
        """Submit rows while the generator wants them; a row that it refuses is finished."""
        while waiting and generator.wants_more and self._stop.requested is None:
            scanned = waiting.popleft()
            try:
                row = read_again(
                    self._input_file, scanned, defaults=self._settings.sampling_defaults
                )
            except InputError as error:
                raise JobError(str(error), EXIT_RESUMABLE) from None
            self._in_flight[row.custom_id] = row
            try:
                token_ids = self._text.encode(row)
                generator.submit(Request(row.custom_id, token_ids, row.params, row.prompt))
            except RowError as error:
                del self._in_flight[row.custom_id]
                self._record(row, RequestOutput(row.custom_id, None, [], error=error))

    def _step(self, generator: Generator) -> list[RequestOutput]:
        if not generator.unfinished:
            return []
        try:
            return generator.step()
        except (RuntimeError, MemoryError) as error:
            raise JobError(
                f"the device failed: {error}. Finished rows are kept in {self._journal.path}.",
                EXIT_BUILD,
            ) from error

    def _record(self, row: BatchRow, output: RequestOutput) -> None:
        """Write one finished row to the journal."""
        try:
            line = self._lines.result(row, output)
            error = output.error
        except RowError as problem:  # a log-probability that is no number
            line, error = self._lines.error(row, problem), problem
        metrics = _row_metrics(output)
        self._journal.record_row(
            row=row.row,
            custom_id=row.custom_id,
            request_hash=row.request_hash,
            line=line,
            code=error.code if error else None,
            metrics=metrics,
        )
        num_tokens = int(metrics.get("output_tokens", 0))
        self._num_tokens += num_tokens
        self._progress.row(tokens=num_tokens, is_error=error is not None)
        if error is not None and self._settings.on_error == "raise":
            raise _first_error(row, error)

    def _refuse_if_asked(self, bad: BadRow) -> None:
        if self._settings.on_error == "raise":
            raise _first_error(bad, bad.error)

    def _stopped(self, num_rows: int) -> int:
        assert self._stop.requested is not None, "rows are missing although nothing stopped the job"
        num_kept = len(self._journal.rows)
        self._progress.note(
            f"stopped by {self._stop.requested.name}: {num_kept} finished of {num_rows} rows are "
            f"in {self._journal.path}; run the same command again to go on"
        )
        return EXIT_CODES[self._stop.requested]


def _complete(settings: JobSettings) -> dict[str, Any] | None:
    return is_complete(
        settings.output_path,
        input_path=settings.input_path,
        configuration=settings.stored_configuration,
        error_file=settings.error_file,
    )


def _refuse_foreign_outputs(settings: JobSettings) -> None:
    """Never replace a file that this job has not begun; an unfinished job has a journal."""
    if settings.restart or settings.journal_path.exists():
        return
    for path in settings.outputs:
        if path.exists():
            raise InputError(
                f"{path}: exists and is not the finished output of this input, model and settings. "
                "Choose another output, or replace it with --restart."
            )


def _first_error(row: BatchRow | BadRow, error: RowError) -> JobError:
    name = f"row {row.custom_id!r} (line {row.line_number})"
    return JobError(f"{name}: {error.code}: {error.message}", EXIT_ROWS_FAILED)


def _row_metrics(output: RequestOutput) -> dict[str, float]:
    """The small numbers that the manifest sums over rows."""
    if output.error is not None:
        return {}
    lengths = [len(completion.token_ids) for completion in output.outputs]
    values: dict[str, float] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": sum(lengths),
    }
    times = output.metrics
    if times is not None and times.first_token is not None:
        values["time_to_first_token"] = times.first_token - times.arrival
        longest = max(lengths, default=0)
        if longest > 1:
            values["inter_token_latency"] = (times.finished - times.first_token) / (longest - 1)
    return values


def _padding_waste(generator: Generator) -> float | None:
    padding = generator.statistics().get("padding") or {}
    computed = padding.get("computed_tokens")
    return 1 - padding["real_tokens"] / computed if computed else None
