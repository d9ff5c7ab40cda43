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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ..counted import counted
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
from .peers import ALONE, GO, Peers
from .progress import Progress
from .results import DROPPED, OutputLines
from .scan import InputError, ScannedRow, ScanSummary, check_input, read_again, scan
from .stop_signals import EXIT_CODES, Drain, StopSignals


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
    if not peers.leads:
        with StopSignals() as stop:
            return _follow(settings, model, peers, disk, progress, phases, stop)
    check_outputs(settings.outputs, [settings.input_path], "the input")
    with StopSignals() as stop, JobLock(settings.lock_path) as lock:
        # the next run may be on another host, which cannot tell that this process is gone
        peers.before_end(lock.release)
        if settings.restart:
            # the manifest first: without it the old output no longer counts as complete
            disk.remove(manifest_path(settings.output_path))
            disk.remove(settings.journal_path)
        elif (manifest := _complete(settings)) is not None:
            disk.remove(settings.journal_path)
            progress.note(f"{settings.output_path}: complete already, nothing to do")
            return peers.share(_exit_code(settings, manifest))
        _refuse_foreign_outputs(settings)
        journal = Journal.open(
            settings.journal_path,
            settings.stored_configuration,
            may_differ=settings.may_differ,
            disk=disk,
        )
        peers.share(None)
        with closing(journal), _inputs(settings, model) as (file, text):
            return _Job(
                settings, model, text, file, journal, peers, disk, progress, phases, stop
            ).run()


def _follow(
    settings: JobSettings,
    model: JobModel,
    peers: Peers,
    disk: Disk,
    progress: Progress,
    phases: PhaseClock,
    stop: StopSignals,
) -> int:
    """Run the steps of a job whose files are process 0's."""
    if (code := peers.share(None)) is not None:
        return code
    with _inputs(settings, model) as (file, text):
        return _Job(settings, model, text, file, None, peers, disk, progress, phases, stop).run()


@contextmanager
def _inputs(settings: JobSettings, model: JobModel) -> Iterator[tuple[BinaryIO, JobText]]:
    with settings.input_path.open("rb") as file, model.open_text() as text:
        yield file, text


@dataclass
class _Job:
    """One run of a job, its journal open and its output locked where this process leads."""

    settings: JobSettings
    model: JobModel
    text: JobText
    input_file: BinaryIO
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
        self.lines = OutputLines(
            model_name=self.settings.model_name,
            fingerprint=fingerprint(self.settings.configuration),
            tokens=self.text.tokens,
        )

    def run(self) -> int:
        summary = scan(
            self.input_file,
            self.text.encode,
            defaults=self.settings.sampling_defaults,
            on_error=self._refuse_if_asked,
        )
        self.peers.agree(lambda: _facts(self.settings, summary))
        # the scan is of the whole input: duplicates, and the plan, are those of the whole job
        rows = self.settings.part.take(summary.rows)
        kept = set(self.peers.share([row.row for row in rows if self._is_kept(row)]))
        waiting = [row for row in rows if row.need is not None and row.row not in kept]
        num_bad = sum(row.bad is not None for row in rows)
        num_kept = len(rows) - num_bad - len(waiting)
        if num_kept:
            kept_rows = counted(num_kept, "finished row")
            self.progress.note(f"resumed: {kept_rows}, {len(waiting)} to go")

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
        self.phases.enter("run")
        return self._finish(summary, statistics, num_kept)

    def _is_kept(self, row: ScannedRow) -> bool:
        known = self.journal and row.need and self.journal.rows.get(row.key)
        return bool(known) and known.code not in RETRIED_CODES

    def _build(self, summary: ScanSummary) -> Build:
        self.phases.enter("load")
        stored_plan = self.peers.share(self.journal and self.journal.plan)
        try:
            built = self.model.build(
                summary, stored_plan, phases=self.phases, progress=self.progress
            )
        except JobError:
            raise
        except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
            code = EXIT_MODEL if self.phases.phase == "load" else EXIT_BUILD
            raise JobError(str(error) or type(error).__name__, code) from error
        if stored_plan is None:
            if self.journal is not None:
                self.journal.record_plan(built.plan)
        elif stored_plan != built.plan:
            raise JobError(
                f"{self.settings.journal_path}: expected the plan that the job was begun with, got "
                "another one from the build. Discard the journal with --restart.",
                EXIT_BUILD,
            )
        return built

    def _run_rows(self, built: Build, rows: Sequence[ScannedRow]) -> str | None:
        """Run rows until none waits, or until a signal; returns its name if it left any."""
        generator = built.generator
        needs = [row.need for row in rows if row.need is not None]
        assert len(needs) == len(rows)
        order = built.order([(need.prompt_length, need.max_tokens) for need in needs])
        waiting = deque(rows[i] for i in order)
        drain = Drain(self.stop, self.peers, self.settings.grace_seconds)
        word = GO
        while True:
            if word.course == "go":
                self._feed(generator, waiting)
            # after the feeding and after the last row: a process that was fed or got something
            # else is found before it leaves the others alone in a collective
            was, word = word, drain.next_word()
            if word.course != "go" and was.course == "go" and generator.unfinished:
                generator.drain()
                self.progress.note(
                    f"{word.signal}: finishing {counted(generator.unfinished, 'row')} in flight, "
                    f"at most {self.settings.grace_seconds:g} s"
                )
            if word.course == "stop" or not generator.unfinished:
                break
            for output in self._step(generator):
                self._record(self.in_flight.pop(output.request_id), output)
            if self.journal is not None:
                self.journal.sync_if_due()
            self.progress.update(lambda: generator.padding_waste)
        drain.end()
        if self.journal is not None:
            self.journal.sync()
        return word.signal if waiting or self.in_flight else None

    def _feed(self, generator: Generator, waiting: deque[ScannedRow]) -> None:
        """Submit rows while the generator wants them; a row that it refuses is finished."""
        while waiting and generator.wants_more:
            scanned = waiting.popleft()
            try:
                row = read_again(self.input_file, scanned, defaults=self.settings.sampling_defaults)
            except InputError as error:
                raise JobError(str(error), EXIT_RESUMABLE) from None
            self.in_flight[row.custom_id] = row
            try:
                token_ids = self.text.encode(row)
                generator.submit(Request(row.custom_id, token_ids, row.params, row.prompt))
                self.peers.saw(row.row, len(token_ids))
            except RowError as error:
                del self.in_flight[row.custom_id]
                self._record(row, RequestOutput(row.custom_id, None, [], error=error))

    def _step(self, generator: Generator) -> list[RequestOutput]:
        if not generator.unfinished:
            return []
        try:
            return generator.step()
        except (RuntimeError, MemoryError) as error:
            # where processes share a collective, one that is lost fails all others
            self.peers.blame()
            raise JobError(
                f"the device failed: {error}. Finished rows are kept in "
                f"{self.settings.journal_path}.",
                EXIT_BUILD,
            ) from error

    def _record(self, row: BatchRow, output: RequestOutput) -> None:
        """Write one finished row to the journal."""
        self.peers.saw(row.row, [completion.token_ids for completion in output.outputs])
        if self.journal is None:
            return
        try:
            line = self.lines.result(row, output)
            error = output.error
        except RowError as problem:  # a log-probability that is no number
            line, error = self.lines.error(row, problem), problem
        metrics = _row_metrics(output)
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
        if error is not None and self.settings.on_error == "raise":
            raise _first_error(row, error)

    def _refuse_if_asked(self, bad: BadRow) -> None:
        if self.settings.on_error == "raise":
            raise _first_error(bad, bad.error)

    def _stopped(self, signal_name: str, num_rows: int) -> int:
        num_kept = len(self.journal.rows) if self.journal is not None else 0
        self.progress.note(
            f"stopped by {signal_name}: {num_kept} of {counted(num_rows, 'row')} finished, kept in "
            f"{self.settings.journal_path}; run the same command again to go on"
        )
        return EXIT_CODES[signal.Signals[signal_name]]

    def _finish(self, summary: ScanSummary, statistics: Mapping[str, Any], num_kept: int) -> int:
        if self.journal is None:
            return self.peers.share(EXIT_OK)
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
        return self.peers.share(_exit_code(self.settings, manifest))


def _facts(settings: JobSettings, summary: ScanSummary) -> dict[str, str]:
    """What all processes of a job must have in common before they run it."""
    rows = hashlib.sha256()
    for row in summary.rows:
        rows.update(repr((row.key, row.need, row.bad and row.bad.error.code)).encode())
    return {
        **settings.stored_configuration,
        "on-error": settings.on_error,
        "input": f"sha256:{summary.input_sha256}",
        "rows as tokenized": f"sha256:{rows.hexdigest()}",
    }


def _complete(settings: JobSettings) -> dict[str, Any] | None:
    return is_complete(
        settings.output_path,
        input_path=settings.input_path,
        configuration=settings.stored_configuration,
        may_differ=settings.may_differ,
        error_file=settings.error_file,
    )


def _exit_code(settings: JobSettings, manifest: Mapping[str, Any]) -> int:
    """What a complete job ends with; a compile in its rows is an error, though it costs no row."""
    if num_compiles := manifest["compiles_during_run"]:
        raise JobError(
            f"{settings.output_path}: expected no compile after the build, got {num_compiles}. The "
            "output is complete and its rows are right, but they waited for the compiler. Please "
            f"report it with {manifest_path(settings.output_path)}.",
            EXIT_BUILD,
        )
    return EXIT_ROWS_FAILED if manifest["rows"]["errors"] else EXIT_OK


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
    if output.dropped_expert_choices:
        values[DROPPED] = output.dropped_expert_choices
    times = output.metrics
    if times is not None and times.first_token is not None:
        values["time_to_first_token"] = times.first_token - times.arrival
        longest = max(lengths, default=0)
        if longest > 1:
            values["inter_token_latency"] = (times.finished - times.first_token) / (longest - 1)
    return values
