"""Runs the rows of a job on a built plan, and records each one as it ends.

Rows are submitted a few at a time, in the order that the plan gives them. A row that repeats a
finished row gets its output. A signal stops the submission: rows in flight finish in the time that
the settings allow, and the rest stay for the next run.

Guarantees: each row is recorded exactly once; the processes of a pod record the same work in the
same order, and compare it before every call.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..console import plural
from ..embedding.texts import lengths_of
from ..errors import EXIT_BUILD, EXIT_RESUMABLE, EXIT_ROWS_FAILED, InputError, JobError, RowError
from ..pods.peers import GO, Peers, StepDirective
from ..process.stop_signals import StopSignals
from ..progress.progress import Progress
from ..request import Request, RequestOutput
from ..rows.figures import REPEATED
from ..rows.lines import BatchRow
from ..rows.repeats import Answer, Repeats
from ..rows.results import OutputLines, error_text, row_metrics
from ..rows.scan import ScannedRow
from .job import Build
from .job_input import JobInput
from .journal import Journal
from .journal_records import FINISHED_AT

if TYPE_CHECKING:
    from ...compile.grids.prefix_table import PrefixTable
    from ..engine.shared_prefixes import RowLengths, SharedPrefix
    from ..session import Session

_WaitingRow: TypeAlias = "tuple[ScannedRow, SharedPrefix | None]"
"""A row that was not submitted yet, and the shared prefix with which it begins."""


@dataclass
class RowRunner:
    """Runs the rows of one job, in one process of it."""

    source: JobInput
    journal: Journal | None
    """The journal; None on processes other than the leader, which records all rows."""
    lines: OutputLines
    peers: Peers
    progress: Progress
    stop: StopSignals
    repeats: Repeats
    """Rows that are answered by the outputs of other rows."""
    journal_path: Path
    _in_flight: dict[str, BatchRow] = field(default_factory=dict)
    _answers: list[Answer] = field(default_factory=list)
    """Outputs that answer more rows in the next steps."""
    _deadline: float | None = None
    """The time at which rows in flight are left, once a signal has come."""

    def run(self, built: Build, rows: Sequence[ScannedRow], table: "PrefixTable") -> str | None:
        """Run rows until all are finished or a signal stops the job.

        Args:
            built: The compiled plan.
            rows: The rows.
            table: What the prompts of the rows share, by index in `rows`.

        Returns:
            The name of the signal, if it left rows unfinished; else None.
        """
        generator = built.generator
        submission = built.submission(list(map(_lengths_of, rows)), table)
        generator.reserve(submission.num_held)
        waiting = deque(
            (rows[row], prefix)
            for row, prefix in zip(submission.rows, submission.prefixes, strict=True)
        )
        del submission  # it would keep every prefix to the end
        directive, self.stop.can_drain = GO, True
        while True:
            # a call is in flight meanwhile, and it does not depend on the rows of this step
            self._answer_repeats(waiting)
            if directive.action == "go":
                self._submit_rows(generator, waiting)
            with self._device_errors():
                self.peers.record(generator.receive())
            # processes compare their work here, before the next collective and after the last row:
            # a process with other rows or tokens would leave the others waiting in a collective
            previous, directive = directive, self._next_directive()
            if directive.action != "go" and previous.action == "go":
                self._begin_drain(generator, directive)
            try:
                if directive.action != "stop":
                    with self._device_errors():
                        generator.dispatch()
            finally:
                # the device runs meanwhile
                self._record_finished(generator)
            if directive.action == "stop" or not (generator.unfinished or self._answers):
                break
            if self.journal is not None:
                self.journal.sync_if_due()
            self.progress.update(generator.figures)
        self.stop.can_drain = False  # no rows are in flight
        if self.journal is not None:
            self.journal.sync()
        return directive.signal if waiting or self._in_flight or self._answers else None

    def _next_directive(self) -> StepDirective:
        """The directive for the next step; process 0 decides it, whichever received the signal."""
        requested = self.stop.requested
        own_signal, directive = None if requested is None else requested.name, GO
        if (signal_name := own_signal or self.peers.remote_signal) is not None:
            now = time.monotonic()
            self._deadline = self._deadline or now + self.stop.grace_seconds
            directive = StepDirective("drain" if now < self._deadline else "stop", signal_name)
        return self.peers.exchange_directive(directive, own_signal)

    def _begin_drain(self, generator: "Session", directive: StepDirective) -> None:
        """Drop submitted rows that have no slot yet, so that only rows in flight finish."""
        self._record_finished(generator)
        if generator.unfinished:
            generator.drain()
            self.progress.warn(
                f"{directive.signal}: finishing {plural(generator.unfinished, 'row')} in flight, "
                f"at most {self.stop.grace_seconds:g} s"
            )

    def _submit_rows(self, generator: "Session", waiting: deque[_WaitingRow]) -> None:
        """Submit rows while the generator wants more; a row that it refuses becomes an error."""
        while waiting and generator.wants_more:
            scanned, prefix = waiting.popleft()
            row = self._read(scanned)
            self._in_flight[row.custom_id] = row
            try:
                token_ids = self.source.token_ids_of(row, scanned)
                places = row.pooled.places(len(lengths_of(token_ids))) if row.pooled else ()
                request = Request(
                    row.custom_id, token_ids, row.params, row.prompt, row.adapter, places
                )
                generator.submit(request, prefix)
                self.peers.record(row.row, len(token_ids))
            except RowError as error:
                del self._in_flight[row.custom_id]
                self.peers.record(row.row, error.code)
                self._record(row, RequestOutput(row.custom_id, None, [], error=error))
                # there is no output for its repeats, so each of them is tried
                waiting.extend((other, None) for other in self.repeats.of(row.row))

    def _read(self, scanned: ScannedRow) -> BatchRow:
        """Read a row again; if it has changed since the scan, the job cannot continue."""
        try:
            return self.source.read(scanned)
        except InputError as error:
            raise JobError(str(error), EXIT_RESUMABLE) from None

    def _record_finished(self, generator: "Session") -> None:
        """Write the rows that have finished to the journal, and keep outputs for their repeats."""
        for output in generator.collect():
            row = self._in_flight.pop(output.request_id)
            self._record(row, output)
            if repeats := self.repeats.of(row.row):
                self._answers.append(Answer(row, output, deque(repeats)))

    def _answer_repeats(self, waiting: deque[_WaitingRow]) -> None:
        """Answer rows that repeat finished rows; a row that differs after all must run itself."""
        for answer in self._answers:
            for scanned in answer.take():
                row = self._read(scanned)
                try:
                    is_equal = answer.fits(row, self.source.token_ids_of(row, scanned))
                except RowError:
                    is_equal = False  # its own run records the error
                if is_equal:
                    self.peers.record(row.row, REPEATED)
                    self._record(row, answer.output_for(row), is_repeat=True)
                else:
                    waiting.append((scanned, None))
        self._answers = [answer for answer in self._answers if answer.repeats]

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        """Turn device errors into a JobError that says where finished rows are kept."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            # the cause may be a lost process, whose collectives fail on all others
            self.peers.await_verdict()
            raise JobError(
                f"the device failed: {error}. Finished rows are kept in {self.journal_path}.",
                EXIT_BUILD,
            ) from error

    def _record(self, row: BatchRow, output: RequestOutput, *, is_repeat: bool = False) -> None:
        """Write one finished row to the journal; `is_repeat` says that its output is another's."""
        if self.journal is None:
            return
        try:
            line = self.lines.result(row, output)
            error = output.error
        except RowError as row_error:  # a log-probability is NaN
            line, error = self.lines.error(row, row_error), row_error
        metrics = {**row_metrics(row, output), FINISHED_AT: round(time.time(), 3)}
        if is_repeat:
            metrics[REPEATED] = 1
        self.journal.record_row(row, line, error.code if error else None, metrics)
        self.progress.count_row(is_error=error is not None)
        if error is not None:
            self.progress.show_error(error_text(row, error))
            if self.source.rules.on_error == "raise":
                raise JobError(error_text(row, error), EXIT_ROWS_FAILED)


def _lengths_of(row: ScannedRow) -> "RowLengths":
    assert row.requirements is not None
    longest = max(row.requirements.text_lengths, default=row.requirements.prompt_length)
    return longest, row.requirements.max_tokens
