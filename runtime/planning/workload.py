"""Read the lengths of a job's rows from a batch file, a table of lengths, or a finished job.

A batch file has only the largest number of tokens that each row may emit; the output of a finished
job has the emitted numbers. They are taken for the rows of the same job, and learned for others
(`finished_lengths`).
"""

import tempfile
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from ...compile.grids.structured_grid import StructuredGrid
from ...compile.planning.run_bounds import ExpectedRow
from ..checkpoint import ModelFiles
from ..errors import JobError
from ..rows.columns import Columns
from ..rows.job_text import open_text, row_shape
from ..rows.lines import BatchRow, RequestRules
from ..rows.row_files import check_input, open_rows, unit_of
from ..rows.row_kinds import text_lengths
from ..rows.scan import RowRequirements, ScanSummary, scan
from ..structured.structures import Structures
from .finished_lengths import AnsweredRow, FinishedJob, LengthForecast, read_finished_job
from .length_table import read_table
from .shared_grids import fits_grid


@dataclass(frozen=True)
class Workload:
    """The rows that a plan is made for."""

    name: str
    rows: tuple[ExpectedRow, ...]
    num_refused: int = 0
    """Rows that no plan can serve: errors, those too long for the model, and those that have no
    room for an answer of their form."""
    first_error: str = ""
    """The error of the first row that cannot be served; empty if there is none."""
    prefixes: PrefixTable = NOTHING_SHARED
    """The common beginnings of `rows`; none are known for a table of lengths."""
    manifest: Mapping[str, Any] | None = None
    """The manifest of the finished job with these rows, whose lengths are used; None without one.
    """
    length_source: str = ""
    """The source of learned output lengths; empty if none were learned."""
    structured: StructuredGrid | None = None
    """The forms of answers that rows ask for."""
    text_lengths: tuple[int, ...] = ()
    """The lengths of all texts, if the rows ask for vectors of texts; `rows` is then empty."""

    @property
    def prompt_tokens(self) -> int:
        return sum(row.need.prompt_length for row in self.rows)

    @property
    def output_tokens(self) -> int:
        return sum(row.output * row.need.num_sequences for row in self.rows)

    def within_context(self, max_position: int) -> "Workload":
        """The workload without rows that cannot run in `max_position` positions."""
        within = [i for i, row in enumerate(self.rows) if row.need.fits(max_position)]
        rows = tuple(self.rows[i] for i in within)
        return replace(
            self,
            rows=tuple(_within(row, max_position) for row in rows),
            prefixes=self.prefixes.of_rows(within),
            num_refused=self.num_refused + len(self.rows) - len(rows),
        )

    def within_grid(self, grid: BucketGrid) -> "Workload":
        """The workload without rows that a grid cannot serve."""
        within = [i for i, row in enumerate(self.rows) if fits_grid(row.need, grid)]
        return replace(
            self,
            rows=tuple(_within(self.rows[i], grid.max_length) for i in within),
            prefixes=self.prefixes.of_rows(within),
            num_refused=self.num_refused + len(self.rows) - len(within),
        )


def read_workload(
    path: Path,
    files: ModelFiles,
    *,
    share_of_limit: float = 1.0,
    output: Path | None = None,
    models: Mapping[str, str | None] | None = None,
) -> Workload:
    """Read the rows of a batch file or a table of lengths.

    A finished job with this input contributes only the rows that it answered. Its output does not
    distinguish stop strings from end tokens: a row with stop strings that stopped is taken to have
    ended at a stop string. From a part of the job, or from another job, lengths are learned.

    Args:
      path: A batch file, or a `.csv` table of lengths.
      share_of_limit: Expected output tokens as a share of `max_tokens`, or of the default number
        for rows without `max_tokens`, if neither `output` nor a table has the lengths.
      output: The output of a finished job.
      models: The adapter for each `model` that rows name; None without adapters.

    Raises:
      JobError: `output` is not the output of a finished job with answers.
      ConfigError: A line of the table is wrong.
    """
    if path.suffix.lower() == ".csv":
        if output is not None:
            raise JobError(
                "--from-output: expected the batch file of the job as --workload, got a table of "
                "lengths, which has output lengths itself. Leave out one of the two.",
            )
        return Workload(path.name, tuple(read_table(path)))
    check_input(path)
    finished = None if output is None else read_finished_job(output)
    scanned = _scan(path, files, models)
    if lengths := text_lengths(scanned.summary.requirements):
        num_bad = sum(row.requirements is None for row in scanned.summary.rows)
        return Workload(path.name, (), num_bad, scanned.first_error, text_lengths=tuple(lengths))
    return _with_lengths(path.name, scanned, finished, share_of_limit)


@dataclass(frozen=True)
class _Scanned:
    """A scanned batch file."""

    summary: ScanSummary
    structures: Structures
    chat_rows: Set[int]
    input_sha256: str

    @property
    def first_error(self) -> str:
        """The first error; empty if there is none."""
        return next((str(row.bad) for row in self.summary.rows if row.bad), "")


def _scan(path: Path, files: ModelFiles, models: Mapping[str, str | None] | None) -> _Scanned:
    """Scan a batch file as a job does."""
    structures, chat_rows = Structures(), set[int]()

    def note_kind(row: BatchRow, ids: Sequence[int]) -> None:
        if row.kind == "chat":
            chat_rows.add(row.row)

    folder = Path(tempfile.gettempdir())
    rows_of_file = open_rows(path, Columns(), folder, note=lambda message: None)
    adapters = [name for name in (models or {}).values() if name is not None]
    opened = open_text(files, structures=structures, adapters=adapters)
    with rows_of_file as source_rows, opened as text:
        summary = scan(
            source_rows.file,
            text.encode,
            RequestRules(files.generation_defaults.sampling, models=models),
            unit=unit_of(path),
            on_encoded=note_kind,
        )
    input_sha256 = source_rows.digest.sha256 if source_rows.digest else summary.input_sha256
    return _Scanned(summary, structures, chat_rows, input_sha256)


def _with_lengths(
    name: str, scanned: _Scanned, finished: FinishedJob | None, share_of_limit: float
) -> Workload:
    """The workload of rows that generate, with the lengths of a finished job if there is one."""
    summary, structures = scanned.summary, scanned.structures
    generating = [(row, row.requirements) for row in summary.rows if row.requirements is not None]
    forms = {row.structure for row in summary.requirements if row.structure is not None}
    manifest, source = None, ""
    seen: list[AnsweredRow | None] = [None] * len(generating)
    if finished is not None and finished.answered(scanned.input_sha256):
        manifest = finished.manifest
        # rows that a finished job has not answered cost it nothing
        generating = [pair for pair in generating if pair[0].custom_id in finished.rows]
        seen = [finished.rows[row.custom_id or ""] for row, _ in generating]
    elif finished is not None:
        forecast = LengthForecast.learn(list(finished.rows.values()))
        seen = [
            forecast.next_row(
                is_chat=row.row in scanned.chat_rows, prompt_length=needs.prompt_length
            )
            for row, needs in generating
        ]
        source = f"{finished.path}: output lengths are learned from {forecast}"
    rows = [
        _expected(needs, structures, of_row, share_of_limit)
        for (_, needs), of_row in zip(generating, seen, strict=True)
    ]
    prefixes = summary.prefixes.of_rows([row.row for row, _ in generating])
    num_refused = len(summary.rows) - len(rows)
    structured = structures.grid(forms)
    return Workload(
        name, tuple(rows), num_refused, scanned.first_error, prefixes, manifest, source, structured
    )


def _expected(
    needs: RowRequirements, structures: Structures, seen: AnsweredRow | None, share_of_limit: float
) -> ExpectedRow:
    """A row with its expected output: that of an answered row, or a share of its limit."""
    need = row_shape(needs, structures)
    limit = need.max_tokens
    if seen is not None and limit != 0:
        output = seen.output if limit is None else min(seen.output, limit)
        return ExpectedRow(need, output, seen.stopped and needs.has_stops)
    if limit is None:
        limit = GridDefaults().unspecified_output
    return ExpectedRow(need, min(limit, max(1, round(limit * share_of_limit))))


def _within(row: ExpectedRow, max_position: int) -> ExpectedRow:
    return replace(row, output=min(row.output, max_position - row.need.prompt_length))
