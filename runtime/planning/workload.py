"""Read the lengths of a job's rows from a batch file, a table of lengths, or a finished job.

A batch file has only the largest number of tokens that each row may emit; the output of a finished
job has the emitted numbers.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from ...compile.planning.candidates import ExpectedRow
from ..batch.batch_model import open_text, row_shape
from ..batch.manifest import read_manifest
from ..batch.part import WHOLE
from ..batch.row_files import check_input, open_rows, output_lines
from ..batch.scan import ScannedRow, scan
from ..batch.tables import Columns
from ..checkpoint import ModelFiles
from ..errors import EXIT_USAGE, JobError
from ..files.disk import digest_file
from .length_table import read_table

OK = 200


@dataclass(frozen=True)
class Workload:
    """The rows that a plan is made for."""

    name: str
    rows: tuple[ExpectedRow, ...]
    num_refused: int = 0
    """Rows that no plan can serve: errors, and those too long for the model."""
    first_error: str = ""
    """The error of the first row that cannot be served; empty if there is none."""
    prefixes: PrefixTable = NOTHING_SHARED
    """The common beginnings of `rows`; none are known for a table of lengths."""
    manifest: Mapping[str, Any] | None = None
    """The manifest of the finished job whose output lengths are used; None without one."""

    @property
    def prompt_tokens(self) -> int:
        return sum(row.need.prompt_length for row in self.rows)

    @property
    def output_tokens(self) -> int:
        return sum(row.output * row.need.num_sequences for row in self.rows)

    def within_context(self, max_position: int) -> "Workload":
        """The workload without rows that are longer than `max_position` tokens."""
        within = [i for i, row in enumerate(self.rows) if row.need.min_length <= max_position]
        rows = tuple(self.rows[i] for i in within)
        return replace(
            self,
            rows=tuple(_within(row, max_position) for row in rows),
            prefixes=self.prefixes.of_rows(within),
            num_refused=self.num_refused + len(self.rows) - len(rows),
        )


def read_workload(
    path: Path, files: ModelFiles, *, share_of_limit: float = 1.0, output: Path | None = None
) -> Workload:
    """Read the rows of a batch file or a table of lengths.

    A finished job contributes only the rows that it answered. Its output does not distinguish stop
    strings from end tokens: a row with stop strings that stopped is taken to have ended at a stop
    string.

    Args:
      path: A batch file, or a `.csv` table of lengths.
      share_of_limit: Expected output tokens as a share of `max_tokens`, or of the default number
        for rows without `max_tokens`, if neither `output` nor a table has the lengths.
      output: The output of a finished job with the same input.

    Raises:
      JobError: `output` does not belong to a finished, whole job of the same input.
      ConfigError: A line of the table is wrong.
    """
    if path.suffix.lower() == ".csv":
        if output is not None:
            raise JobError(
                "--from-output: expected the batch file of the job as --workload, got a table of "
                "lengths, which has output lengths itself. Leave out one of the two.",
                EXIT_USAGE,
            )
        return Workload(path.name, tuple(read_table(path)))
    check_input(path)
    folder = Path(tempfile.gettempdir())
    rows = open_rows(path, Columns(), folder, note=lambda message: None)
    with rows as (file, digest), open_text(files) as text:
        summary = scan(file, text.encode, defaults=files.generation_defaults.sampling)
    emitted, manifest = {}, None
    if output is not None:
        manifest = _manifest_of(output, digest.sha256 if digest else summary.input_sha256)
        emitted = _emitted(output)
    scanned = [
        row
        for row in summary.rows
        # rows that a finished job has not answered cost it nothing
        if row.requirements is not None and (output is None or row.custom_id in emitted)
    ]
    rows = [_expected(row, emitted, share_of_limit) for row in scanned]
    prefixes = summary.prefixes.of_rows([row.row for row in scanned])
    errors = (f"line {row.line_number}: {row.bad.error}" for row in summary.rows if row.bad)
    num_refused = len(summary.rows) - len(rows)
    first_error = next(errors, "")
    return Workload(path.name, tuple(rows), num_refused, first_error, prefixes, manifest)


def _expected(
    row: ScannedRow, emitted: Mapping[str, tuple[int, bool]], share_of_limit: float
) -> ExpectedRow:
    assert row.requirements is not None
    need = row_shape(row.requirements)
    if (known := emitted.get(row.custom_id or "")) is not None:
        output, stopped = known
        # a job with several answers for a row records only the sum of their tokens
        return ExpectedRow(
            need, output // need.num_sequences, stopped and row.requirements.has_stops
        )
    limit = need.max_tokens
    if limit is None:
        limit = GridDefaults().unspecified_output
    return ExpectedRow(need, min(limit, max(1, round(limit * share_of_limit))))


def _within(row: ExpectedRow, max_position: int) -> ExpectedRow:
    return replace(row, output=min(row.output, max_position - row.need.prompt_length))


def _manifest_of(output: Path, input_sha256: str) -> Mapping[str, Any]:
    manifest = read_manifest(output)
    if manifest is None:
        raise JobError(
            f"{output}: expected the output of a finished job with its manifest beside it, got no "
            f"manifest. Finish the job first.",
            EXIT_USAGE,
        )
    if manifest["input"]["sha256"] != input_sha256:
        raise JobError(
            f"{output}: expected the output of a job with this --workload, got that of a job with "
            f"{manifest['input']['name']}, whose content differs. Give the input of the job.",
            EXIT_USAGE,
        )
    if (part := manifest["configuration"]["rows"]) != str(WHOLE) or not manifest["plan"]:
        raise JobError(
            f"{output}: expected the output of a whole job with at least one row that ran, got "
            f"that of {part}. Run the whole job, and give its output.",
            EXIT_USAGE,
        )
    recorded = manifest["outputs"].get(output.name, {}).get("sha256")
    if recorded != digest_file(output).sha256:
        raise JobError(
            f"{output}: expected the content that its manifest records, got another content. Run "
            f"the job again.",
            EXIT_USAGE,
        )
    return manifest


def _emitted(output: Path) -> dict[str, tuple[int, bool]]:
    """Output tokens of each answered row, and whether a stop ended one of its answers, by id."""
    emitted = {}
    with output.open("rb") as file:
        for line in output_lines(output, file):
            row = json.loads(line)
            if row["response"] is None or row["response"]["status_code"] != OK:
                continue
            body = row["response"]["body"]
            stopped = any(choice["finish_reason"] == "stop" for choice in body["choices"])
            emitted[row["custom_id"]] = (body["usage"]["completion_tokens"], stopped)
    return emitted
