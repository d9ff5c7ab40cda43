"""Runs the batch job: scan the input, build the graphs, run the rows, write the output.

Everything that uses a device comes through `JobModel`, so a job can be tested, and a finished job
recognised, without a device. Files of a job beside `out.jsonl`: `.journal` while it is unfinished,
`.lock` while it runs, `.manifest.json` when it is complete.

Guarantees: every row of the input, or of the job's part of it, is exactly one row of the output, in
input order; a part gives the same answers as the whole job; a job that is killed at any moment and
run again writes the same file as an uninterrupted job; a complete job that is run again does
nothing.
"""

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from ..errors import EXIT_RESUMABLE, exit_code
from ..files.disk import Disk
from ..files.manifest import manifest_path
from ..pods.peers import ALONE, Peers
from ..process.stop_signals import StopSignals
from ..progress.progress import Progress
from ..rows.row_files import check_input
from .execution import Execution
from .finished import (
    check_finished_by,
    complete_already,
    exit_code_of,
    finished_manifest,
    refuse_foreign_outputs,
    updatable_manifest,
)
from .job import JobModel, JobSettings
from .job_input import decide_instant, open_input
from .job_runs import PhaseClock, new_run, recorded_run
from .journal import Journal, renew
from .lock import JobLock
from .pipes import stdin_copied
from .update import keep_facts


def run_job(
    settings: JobSettings,
    model: JobModel,
    *,
    peers: Peers = ALONE,
    progress: Progress | None = None,
    disk: Disk | None = None,
    phases: PhaseClock | None = None,
    stop: StopSignals | None = None,
) -> int:
    """Run a job to its end, or resume a job that was stopped.

    Args:
        settings: The input, the outputs and the options.
        model: The model, not yet loaded.
        peers: The processes that run the job in step.
        progress: Shows progress and notes.
        disk: Disk operations.
        phases: The clock of the job, in phase `scan`.
        stop: The signals of a larger job of which this job is one stage; the caller installs and
            removes the handlers. None if this job handles signals itself.

    Returns:
        The exit code.

    Raises:
        UnusableFile: The input or an output cannot be used.
        OutputIsLocked: Another process writes the same output.
        JournalError: The journal belongs to a job of another configuration, or is damaged.
        JobError: The job cannot continue; finished rows are kept.
        StopNow: A signal ended the job immediately.
    """
    progress, disk, phases = progress or Progress(), disk or Disk(), phases or PhaseClock()
    progress.enter(phases.phase)
    phases.on_enter = progress.enter
    if not settings.reads_stdin:
        check_input(settings.input_path, settings.columns)
    with StopSignals() if stop is None else nullcontext(stop) as stop:
        job = _Job(settings, model, peers, disk, progress, phases, stop)
        return job.lead() if peers.is_leader else job.follow()


@dataclass(frozen=True)
class _Job:
    """A job in one of its processes, before its input is read."""

    settings: JobSettings
    model: JobModel
    peers: Peers
    disk: Disk
    progress: Progress
    phases: PhaseClock
    stop: StopSignals

    def follow(self) -> int:
        """Run the job in a process that has no files; return the exit code."""
        # process 0 sends an exit code if it has nothing to do
        if (code := self.peers.broadcast(None)) is not None:
            return code
        return self._execute(None, "")

    def lead(self) -> int:
        """Run the job in the process that has its files; return the exit code."""
        settings = self.settings
        settings.check_files()
        with (
            JobLock(settings.lock_path, self.progress.warn) as lock,
            stdin_copied(settings, self.disk),
        ):
            # the next run may be on another host, which cannot detect that this process has ended
            self.peers.on_abort(lock.release)
            if settings.reads_stdin:
                check_input(settings.input_path, settings.columns)
            if lock.took_over:
                renew(settings.journal_path, self.disk)
            if settings.restart:
                # first the manifest: without it the old output no longer counts as complete
                self.disk.remove(manifest_path(settings.output_path))
                self.disk.remove(settings.journal_path)
            elif (manifest := finished_manifest(settings)) is not None:
                return self.peers.broadcast(self._do_nothing(manifest))
            earlier = updatable_manifest(settings) if settings.identity.updates else None
            with closing(self._open_journal(earlier)) as journal:
                if earlier is not None:
                    keep_facts(earlier, journal)
                elif not journal.binds:
                    # a run that ended before its build left the journal, so no output is this job's
                    refuse_foreign_outputs(settings)
                now = decide_instant(settings, journal)
                self.peers.broadcast(None)
                return self._run_and_record(journal, now, earlier is not None, lock.check)

    def _do_nothing(self, manifest: Mapping[str, Any]) -> int:
        """Check that the finished outputs are those of this job; return their exit code."""
        check_finished_by(self.settings, manifest.get("weights"), self.model)
        self.disk.remove(self.settings.journal_path)
        self.progress.note(complete_already(self.settings, manifest))
        return exit_code_of(self.settings, manifest)

    def _open_journal(self, earlier: Mapping[str, Any] | None) -> Journal:
        """Open the journal; `earlier` is the manifest of finished outputs that are updated."""
        settings = self.settings
        if earlier is None and not settings.journal_path.exists():
            refuse_foreign_outputs(settings)
        return Journal.open(
            settings.journal_path,
            settings.identity.stored,
            may_differ=settings.identity.may_differ,
            keeps_plan=settings.identity.keeps_plan,
            disk=self.disk,
        )

    def _run_and_record(
        self, journal: Journal, now: str, keeps_answers: bool, check_lock: Callable[[], None]
    ) -> int:
        """Run the job, and record the run in the journal."""
        run = new_run(self.phases, self.peers.setup, self.settings.price_per_hour)
        number = len(journal.runs)
        journal.runs.append(run)
        try:
            with recorded_run(run, self.phases, lambda: journal.record_run(number), self.stop):
                return self._execute(
                    journal, now, keeps_answers=keeps_answers, check_lock=check_lock
                )
        except Exception as error:
            if not journal.binds and exit_code(error) != EXIT_RESUMABLE:
                # nothing has finished, so the next run may be another job
                with suppress(OSError):
                    self.disk.remove(journal.path)
            raise

    def _execute(
        self,
        journal: Journal | None,
        now: str,
        *,
        keeps_answers: bool = False,
        check_lock: Callable[[], None] = lambda: None,
    ) -> int:
        now = self.peers.broadcast(now)
        with open_input(self.settings, self.model, now, self.progress) as source:
            return Execution(
                self.settings,
                self.model,
                source,
                journal,
                peers=self.peers,
                disk=self.disk,
                progress=self.progress,
                phases=self.phases,
                stop=self.stop,
                check_lock=check_lock,
            ).run(keeps_answers=keeps_answers)
