"""Runs a job of several stages: each stage is a job of its own, on one model that is built once.

The files of the stages are in a folder beside the output. For each stage, its requests are made
from the input and the answers of earlier stages, and then run as a batch job, with a journal, an
output and a manifest. At the end, the output of the whole job is made from those of the stages.

Guarantees: every row of the input, or of the job's part of it, is exactly one row of the output, in
input order. A job that is killed at any moment and run again writes the same file as an
uninterrupted job: the files of a stage are made again until its manifest says that it has finished,
and nothing is removed before the manifest of the whole job is written.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from ..batch.finished import (
    complete_already,
    exit_code_of,
    finished_manifest,
    refuse_foreign_outputs,
)
from ..batch.job import JobIdentity, JobSettings
from ..batch.job_files import JobFiles, OutputFiles, stages_folder
from ..batch.lock import JobLock
from ..batch.output import summarise
from ..batch.run import run_job
from ..errors import EXIT_OK, EXIT_ROWS_FAILED, JobError, OtherConfiguration, RowError, UnusableFile
from ..files.differences import differences
from ..files.disk import Disk, digest_file, replace_file
from ..files.manifest import (
    digest_table,
    digest_text,
    fingerprint,
    manifest_path,
    read_manifest,
    table_in,
)
from ..files.strict_json import dump_line
from ..process.stop_signals import EXIT_CODES, StopSignals
from ..progress.progress import Progress
from ..rows.columns import Columns
from ..rows.lines import BadRow
from ..rows.part import WHOLE
from ..rows.results import OutputLines, error_text
from ..rows.row_files import check_input, unit_of
from ..rows.scan import ScanSummary
from .final_output import write_final
from .pipeline_file import ROW, Pipeline
from .stage_bounds import measure_stages
from .stage_renderer import (
    CHUNK_ROWS,
    StageRenderer,
    check_columns,
    open_renderers,
    request_line,
)
from .stage_rows import FollowedRow, InputRow, StagedRows, StageFiles, error_record
from .staged_model import StagedModel

_INPUT = "input of the stages"
"""The key, in the configuration of a stage, for the digest of the whole job's input."""
_FILE_OF_STAGE = re.compile(r"[0-9]+-[a-z0-9_]+(\.in|\.errors)?\.jsonl($|\.)")


def run_stages(
    settings: JobSettings,
    model: StagedModel,
    pipeline: Pipeline,
    *,
    keeps_stages: bool,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> int:
    """Run a job with stages to its end, or resume one that was stopped.

    Args:
        settings: The input, the outputs and the options of the whole job.
        model: The model of all stages, not yet loaded.
        pipeline: The stages.
        keeps_stages: Whether the files of the stages stay when the job is complete.
        progress: Shows progress and notes.
        disk: Disk operations.

    Returns:
        The exit code.

    Raises:
        ConfigError: A template is wrong.
        UnusableFile: The input or an output cannot be used.
        JobError: The job cannot continue; finished rows are kept.
    """
    progress, disk = progress or Progress(), disk or Disk()
    files, identity = settings.files, settings.identity
    check_input(files.input, files.columns)
    folder = stages_folder(files.output)
    stages = [StageFiles(folder, i, stage.name) for i, stage in enumerate(pipeline.stages, start=1)]
    _check_files(files, identity, folder)
    lock = JobLock(files.lock, progress.warn)
    with StopSignals(settings.grace_seconds) as stop, lock, ExitStack() as opened:
        if files.restart:
            disk.remove(files.manifest)
            _remove(folder, disk)
        if (manifest := finished_manifest(files, identity)) is not None:
            end = complete_already(files, settings.facts, model, manifest)
        else:
            # without a manifest of the first stage, outputs are not those of an interrupted run
            if not manifest_path(stages[0].output).exists() or files.manifest.exists():
                refuse_foreign_outputs(files, identity)
            keeps_model = settings.rules.models is not None
            renderers = open_renderers(pipeline, opened, keeps_model=keeps_model)
            # templates read every column of a table
            table = replace(files, columns=replace(files.columns, are_variables=True))
            source = opened.enter_context(table.open_rows(progress))
            rows = StagedRows(source, files.input, identity.part, stages)
            run = _StagesRun(settings, rows, model, pipeline, renderers, progress, disk, stop)
            if (code := run.begin()) is not None:
                return code
            lock.check()
            manifest = run.finish()
            end = summarise(files.output, manifest)
        if not keeps_stages:
            _remove(folder, disk)
        progress.note(end)
        return exit_code_of(files.output, manifest)


@dataclass
class _StagesRun:
    """One run of a job with stages, whose output is locked."""

    settings: JobSettings
    rows: StagedRows
    model: StagedModel
    pipeline: Pipeline
    renderers: Sequence[StageRenderer]
    progress: Progress
    disk: Disk
    stop: StopSignals

    def __post_init__(self):
        self._input = digest_text(digest_table(digest_file(self.rows.path)))
        self.model.measure = self._measure

    def begin(self) -> int | None:
        """Check the columns, and run the stages; an error before the first row leaves no files."""
        self.rows.stages[0].folder.mkdir(exist_ok=True)
        try:
            self.check_columns()
            return self.run()
        except Exception:
            if not self.has_begun:
                # no row has run, so the next run may be another job
                _remove(self.rows.stages[0].folder, self.disk)
            raise

    def run(self) -> int | None:
        """Run the stages that have not finished; return an exit code if the job was stopped."""
        first = read_manifest(self.rows.stages[0].output)
        if first is not None:
            self._check_begun(table_in(first, "configuration"))
        for index, renderer in enumerate(self.renderers):
            name = renderer.stage.name
            self.progress.note(f"stage {name} ({index + 1} of {len(self.rows.stages)})")
            self.model.stage = name
            files = self.rows.stages[index]
            settings = self._settings_of(files)
            if not manifest_path(files.output).exists():
                lines = OutputLines(
                    model_name=settings.facts.name,
                    fingerprint=fingerprint(settings.identity.configuration),
                )
                rows = self.rows.follow(index)
                _write_input(files, rows, renderer, lines, self.disk, self._show_bad_row)
            services = {"progress": self.progress, "disk": self.disk, "stop": self.stop}
            try:
                code = run_job(settings, self.model, **services)
            except OtherConfiguration as error:
                self._check_begun(error.stored)
                raise
            if code not in (EXIT_OK, EXIT_ROWS_FAILED):
                return code
            if (signal := self.stop.requested) and renderer is not self.renderers[-1]:
                # all rows of the stage were in flight, so its job came to its end
                self.progress.warn(
                    f"stopped by {signal.name}: finished stages are kept in {files.folder}; run "
                    f"the same command again to continue"
                )
                return EXIT_CODES[signal]
            manifest = self._manifest_of(files)
            self.model.plan = self.model.plan or manifest["plan"]
            if (shown := manifest["instant"]) is not None:
                # prompts of all stages show the same time
                identity = replace(self.settings.identity, now=datetime.fromisoformat(shown))
                self.settings = replace(self.settings, identity=identity)
        return None

    def _measure(self) -> ScanSummary:
        """Measure the rows of all stages."""
        show, longest = self.progress.show_scan, self.model.max_position()
        summary = measure_stages(
            self.settings, self.model, self.renderers, self.rows.all(), longest, show
        )
        self.progress.finish()
        return summary

    def check_columns(self) -> None:
        """Refuse a table without columns that a template writes for every row; ConfigError."""
        if unit_of(self.rows.path) == "row":
            # all rows of a table have all of its columns
            table = next((row.data for row in self.rows.all() if isinstance(row, InputRow)), None)
            if table is not None:
                check_columns(self.pipeline, self.renderers, table)

    @property
    def has_begun(self) -> bool:
        """Whether a stage has finished, or has a journal."""
        stages = [OutputFiles(files.output) for files in self.rows.stages]
        return any(stage.manifest.exists() or stage.journal.exists() for stage in stages)

    def _check_begun(self, stored: Mapping[str, Any]) -> None:
        """Refuse another pipeline, input or part than those with which the stages were begun.

        `stored` is the configuration of a stage.
        """
        now = {"pipeline": self.pipeline.text, _INPUT: self._input, "rows": str(self.rows.part)}
        lines = differences({key: stored.get(key) for key in now}, now, ("there", "now"))
        if lines:
            raise UnusableFile(
                f"{self.rows.path}: expected the pipeline, the input and the part of the rows with "
                f"which the stages in {self.rows.stages[0].folder} were begun, got others:\n"
                + "\n".join(lines)
                + "\nRestore them, choose another output, or discard the stages with --restart."
            )

    def finish(self) -> dict[str, Any]:
        """Write the output of the job; return its manifest."""
        manifests = [self._manifest_of(files) for files in self.rows.stages]
        files, identity = self.settings.files, self.settings.identity
        return write_final(files, identity, self.rows, manifests, self.disk)

    def _settings_of(self, files: StageFiles) -> JobSettings:
        """The settings of a stage's own job, whose input has the rows of the part alone."""
        identity = self.settings.identity
        # rows and lines of finished stages are matched by order, so the input must not change
        of_stage = {"stage": files.name, _INPUT: self._input}
        return replace(
            self.settings,
            files=replace(
                self.settings.files,
                input=files.input,
                output=files.output,
                error_file=None,
                columns=Columns(),
                restart=False,
            ),
            identity=replace(
                identity,
                configuration={**identity.configuration, **of_stage},
                part=WHOLE,
                part_of_stages=identity.part,
            ),
        )

    def _manifest_of(self, files: StageFiles) -> dict[str, Any]:
        manifest = read_manifest(files.output)
        assert manifest is not None
        return manifest

    def _show_bad_row(self, bad: BadRow) -> None:
        if self.settings.rules.on_error == "raise":
            raise JobError(error_text(bad, bad.error), EXIT_ROWS_FAILED)
        self.progress.show_error(error_text(bad, bad.error))


def _check_files(files: JobFiles, identity: JobIdentity, folder: Path) -> None:
    """Check that the outputs can be written, and that no input is among the files of stages."""
    files.check_formats(identity.added_columns)
    files.check_written(files.read)
    if folder.exists() and not folder.is_dir():
        raise UnusableFile(f"{folder}: expected a folder for the files of stages, got a file.")
    for description, path in files.read:
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise UnusableFile(
                f"{path}: is {description}, and in the folder for the files of stages. Choose "
                f"another output."
            )


def _remove(folder: Path, disk: Disk) -> None:
    """Remove the files of stages, and their folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _FILE_OF_STAGE.match(path.name):
            disk.remove(path)
    with suppress(OSError):
        folder.rmdir()


def _write_input(
    files: StageFiles,
    rows: Iterator[FollowedRow],
    renderer: StageRenderer,
    lines: OutputLines,
    disk: Disk,
    on_error: Callable[[BadRow], None],
) -> None:
    """Write the requests of a stage, and the errors of rows that have none.

    Args:
        files: The files of the stage.
        rows: The rows of the job after the earlier stages.
        renderer: Renders the requests.
        lines: Makes the lines of errors.
        disk: Disk operations.
        on_error: Called with each row that ends here.
    """
    errors: list[bytes] = []

    def fail(bad: BadRow) -> None:
        on_error(bad)
        errors.append(error_record(bad.row, dump_line(lines.error(bad, bad.error))))

    replace_file(disk, files.input, _requests(rows, renderer, fail))
    replace_file(disk, files.errors, errors)


def _requests(
    rows: Iterator[FollowedRow], renderer: StageRenderer, fail: Callable[[BadRow], None]
) -> Iterator[bytes]:
    alive = (followed for followed in rows if followed.stage is None)
    while chunk := list(islice(alive, CHUNK_ROWS)):
        contexts = [
            {ROW: followed.row.data, **followed.answers}
            for followed in chunk
            if isinstance(followed.row, InputRow)
        ]
        rendered = iter(renderer.render(contexts))
        for followed in chunk:
            row = followed.row
            if isinstance(row, BadRow):
                fail(row)
                continue
            request = next(rendered)
            if isinstance(request, RowError):
                fail(row.failed(request))
                continue
            yield request_line(row.custom_id, *request)
