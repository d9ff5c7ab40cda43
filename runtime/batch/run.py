"""Runs the batch job: scan the input, build the graphs, run the rows, write the output.

Everything that uses a device comes through `JobModel`, so a job can be tested, and a finished job
recognised, without a device. Files of a job beside `out.jsonl`: `.journal` while it is unfinished,
`.lock` while it runs, `.manifest.json` when it is complete.

Guarantees: every row of the input, or of the job's part of it, is exactly one row of the output, in
input order; a part gives the same answers as the whole job; a job that is killed at any moment and
run again writes the same file as an uninterrupted job; a complete job that is run again does
nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Any

from ..errors import EXIT_RESUMABLE, exit_code
from ..files.disk import Disk
from ..pods.peers import ALONE, Peers
from ..process.stop_signals import StopSignals
from ..progress.progress import Progress
from ..rows.row_files import check_input
from .execution import BegunJob, Execution
from .finished import complete_already, exit_code_of, finished_manifest, refuse_foreign_outputs
from .job import Job, JobModel, JobSettings
from .job_input import decide_instant, open_input
from .job_runs import JobRun, PhaseClock, new_run, recorded_run
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
    files = settings.files
    if not files.reads_stdin:
        check_input(files.input, files.columns)
    signals = StopSignals(settings.grace_seconds) if stop is None else nullcontext(stop)
    with signals as stop, ExitStack() as opened:
        job = Job(settings, model, peers, disk, progress, phases, stop)
        begun = _lead(job, opened) if peers.is_leader else _follow(job)
        if isinstance(begun, int):
            return begun
        part, now = settings.identity.part, peers.broadcast(begun.now)
        source = opened.enter_context(open_input(files, part, settings.rules, model, now, progress))
        return Execution(**vars(job), source=source, begun=begun).run()


def _follow(job: Job) -> int | BegunJob:
    """Begin in a process that has no files; an exit code if there is nothing to do."""
    # process 0 sends an exit code if it has nothing to do
    code = job.peers.broadcast(None)
    return BegunJob(None, "") if code is None else code


def _lead(job: Job, opened: ExitStack) -> int | BegunJob:
    """Begin in the process that has the job's files; an exit code if there is nothing to do.

    `opened` closes the files, and records the end of the run.
    """
    files, identity = job.settings.files, job.settings.identity
    files.check(identity.added_columns)
    lock = opened.enter_context(JobLock(files.lock, job.progress.warn))
    opened.enter_context(stdin_copied(files, job.disk))
    # the next run may be on another host, which cannot detect that this process has ended
    job.peers.on_abort(lock.release)
    if files.reads_stdin:
        check_input(files.input, files.columns)
    if lock.took_over:
        renew(files.journal, job.disk)
    if files.restart:
        # first the manifest: without it the old output no longer counts as complete
        job.disk.remove(files.manifest)
        job.disk.remove(files.journal)
    elif (manifest := finished_manifest(files, identity)) is not None:
        message = complete_already(files, job.settings.facts, job.model, manifest)
        job.disk.remove(files.journal)
        job.progress.note(message)
        return job.peers.broadcast(exit_code_of(files.output, manifest))
    earlier = None
    if identity.updates:
        earlier = finished_manifest(files, identity, compares_input=False)
    journal = opened.enter_context(closing(_open_journal(job, earlier)))
    if earlier is not None:
        keep_facts(earlier, journal)
    elif not journal.binds:
        # a run that ended before its build left the journal, so no output is this job's
        refuse_foreign_outputs(files, identity)
    now = decide_instant(identity.now, journal)
    job.peers.broadcast(None)
    run = new_run(job.phases, job.peers.setup, job.settings.price_per_hour)
    opened.enter_context(_recorded(job, journal, run))
    return BegunJob(journal, now, earlier is not None, lock.check)


def _open_journal(job: Job, earlier: Mapping[str, Any] | None) -> Journal:
    """Open the journal; `earlier` is the manifest of finished outputs that are updated."""
    files, identity = job.settings.files, job.settings.identity
    if earlier is None and not files.journal.exists():
        refuse_foreign_outputs(files, identity)
    return Journal(
        files.journal,
        identity.stored,
        may_differ=identity.may_differ,
        keeps_plan=identity.keeps_plan,
        disk=job.disk,
    )


@contextmanager
def _recorded(job: Job, journal: Journal, run: JobRun) -> Iterator[None]:
    """Record a run of the job in the journal."""
    number = len(journal.runs)
    journal.runs.append(run)
    try:
        with recorded_run(run, job.phases, lambda: journal.record_run(number), job.stop):
            yield
    except Exception as error:
        if not journal.binds and exit_code(error) != EXIT_RESUMABLE:
            # nothing has finished, so the next run may be another job
            with suppress(OSError):
                job.disk.remove(journal.path)
        raise
