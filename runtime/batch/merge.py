"""Merges the finished parts of a job into one output in input order, with a manifest.

A part is the output of `noria batch --rows i/n`. Line k of part i is row i + k*n of the input, so
merging reads only the parts, line by line, and needs no input, model or device.

Does not know about requests. Guarantees: nothing is written unless each of the n parts is given
once, is complete, and belongs to the same job. The output equals that of the whole job, ids
included, except for `created`, the time at which a row ran. `noria batch` recognises its manifest.
A file with other content is never replaced. Merging again does nothing.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..console import plural
from ..errors import EXIT_OK, EXIT_RESUMABLE, EXIT_ROWS_FAILED, JobError, MergeError
from ..files.differences import differences, flat
from ..files.disk import Disk, digest_chunks, digest_file
from ..files.manifest import (
    COMMON_KEYS,
    SCHEMA,
    digest_table,
    manifest_path,
    output_differences,
    read_manifest,
    table_in,
    write_manifest,
)
from ..progress.progress import Progress
from ..rows.answer_tables import AddedColumns
from ..rows.part import WHOLE, Part
from ..rows.results import error_of_line
from ..rows.row_files import encoded, is_plain, output_lines
from .job_files import OutputFiles
from .lock import JobLock
from .output import add_figures, add_outcomes, write_outputs

_TABLES = ("configuration", "input", "outputs", "rows", "versions")
"""The tables of a manifest that a merge reads."""
_REMEDY = "Copy the part again with its manifest, or run it again with --restart."


@dataclass(frozen=True)
class FinishedPart:
    """The output of a part, held open so that the checked file is the one that is copied."""

    path: Path
    part: Part
    manifest: Mapping[str, Any]
    file: BinaryIO

    def lines(self) -> Iterator[bytes]:
        """The lines of the part from its start."""
        self.file.seek(0)
        return output_lines(self.path, self.file)


def merge(
    paths: Sequence[Path],
    output: Path,
    *,
    error_file: Path | None = None,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> int:
    """Merge the parts of a job.

    Args:
        paths: The outputs of all parts, in any order.
        output: The merged output.
        error_file: A second output for error rows; by default they stay in their places.
        progress: Shows the result.
        disk: Disk operations.

    Returns:
        The exit code.

    Raises:
        MergeError: The files are not all parts of one job, each once and complete.
        UnusableFile: An output cannot be written, or is also read.
        JobError: The disk refused an output.
    """
    progress, disk = progress or Progress(), disk or Disk()
    read = [("a part", path) for path in paths]
    read += [("the manifest of a part", manifest_path(path)) for path in paths]
    files = OutputFiles(output, error_file)
    files.check_written(read)
    with JobLock(files.lock, progress.warn), ExitStack() as opened:
        parts = [_open_part(path, opened) for path in paths]
        _refuse_other_jobs(parts)
        parts = _in_order(parts)
        added = AddedColumns.of(parts[0].manifest["configuration"])
        files.check_formats(added)
        for part in parts:
            _check_content(part)
        manifest = _merged_manifest(parts)
        errors = manifest["rows"]["errors"]
        known = read_manifest(output) or {}
        is_merged = {**manifest, "outputs": known.get("outputs")} == known
        if is_merged and not output_differences(known, files.outputs):
            progress.note(f"{output}: merged already, nothing to do")
        else:
            lines_of = partial(_output_lines, parts, error_file)
            _refuse_foreign_outputs(files, lines_of, added)
            _write(disk, files.outputs, lines_of, added, manifest)
            total = manifest["rows"]["total"]
            merged = f"{plural(total, 'row')} of {plural(len(parts), 'part')}"
            progress.note(f"{output}: {merged}, {plural(errors, 'error')}")
    return EXIT_ROWS_FAILED if errors else EXIT_OK


def _open_part(path: Path, files: ExitStack) -> FinishedPart:
    missing = next((p for p in (path, manifest_path(path)) if not p.is_file()), None)
    if missing is not None:
        raise MergeError(
            f"{path}: expected a finished part with its manifest beside it, got no {missing.name}. "
            "Copy both, or finish the part with the command that began it."
        )
    file = files.enter_context(path.open("rb"))
    manifest = read_manifest(path) or {}
    rows = table_in(manifest, "configuration").get("rows")
    if manifest.get("schema") != SCHEMA or rows is None:
        raise MergeError(
            f"{manifest_path(path)}: expected a manifest of schema {SCHEMA} that states its part "
            f"of the rows, got schema {manifest.get('schema')!r} and rows {rows!r}. Merge with the "
            "version that wrote it, or run the part again."
        )
    _check_tables(path, manifest)
    try:
        part = Part.from_manifest(str(rows))
    except ValueError as error:
        raise MergeError(f"{manifest_path(path)}: configuration.{error} {_REMEDY}") from None
    return FinishedPart(path, part, manifest, file)


def _check_tables(path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest that misses facts, or has something else in the place of a table."""
    wrong = [key for key in _TABLES if not isinstance(manifest.get(key), dict)]
    wrong += [key for key in ("model", "weights", "plan", "instant") if key not in manifest]
    if wrong:
        raise MergeError(
            f"{manifest_path(path)}: expected {wrong[0]}, as every finished job writes it, got "
            f"{str(manifest.get(wrong[0], 'none'))[:80]}. {_REMEDY}"
        )


def _refuse_other_jobs(parts: Sequence[FinishedPart]) -> None:
    """Refuse parts that differ from each other in facts of the job or of the plan."""
    first = parts[0]
    # a part in which all rows are errors has built nothing, so it has no plan
    planned = [part for part in parts if part.manifest["plan"] is not None]
    lines = []
    for part in parts[1:]:
        names = (str(first.path), str(part.path))
        lines += differences(_job_facts(first), _job_facts(part), names)
    for part in planned[1:]:
        names = (str(planned[0].path), str(part.path))
        lines += differences(_plan_facts(planned[0]), _plan_facts(part), names)
    if lines:
        raise MergeError(
            "parts: expected parts of one job, got parts of different jobs:\n"
            + "\n".join(lines)
            + "\nRun the parts that differ again, with the settings, input and versions of the "
            "others (if the instant differs, with --now)."
        )


def _job_facts(part: FinishedPart) -> dict[str, object]:
    manifest = part.manifest
    configuration = {**manifest["configuration"], "rows": f"{part.part.num_parts} parts"}
    content = {key: value for key, value in manifest["input"].items() if key != "name"}
    return {
        "model": manifest["model"],
        **flat("versions", manifest["versions"]),
        **flat("configuration", configuration),
        **flat("input", content),
        "instant": manifest["instant"],
    }


def _plan_facts(part: FinishedPart) -> dict[str, object]:
    plan = tomllib.loads(part.manifest["plan"])
    return {"weights": part.manifest["weights"], **flat("plan", plan)}


def _in_order(parts: Sequence[FinishedPart]) -> list[FinishedPart]:
    """The parts of a job in order of their index; refuses missing and repeated parts."""
    by_index: dict[int, FinishedPart] = {}
    for part in parts:
        known = by_index.setdefault(part.part.index, part)
        if known is not part:
            raise MergeError(
                f"{part.part}: expected once, got {known.path} and {part.path}. Give each part "
                "once."
            )
    num_parts = parts[0].part.num_parts
    missing = [f"{index}/{num_parts}" for index in range(num_parts) if index not in by_index]
    if missing:
        raise MergeError(
            f"parts: expected all {num_parts} parts of the job, got {len(parts)}. Missing: "
            f"{', '.join(missing)}. Finish them with noria batch --rows, and give them too."
        )
    return [by_index[index] for index in range(num_parts)]


def _check_content(part: FinishedPart) -> None:
    """Check that a part has the lines, bytes and hash that its manifest states."""
    described = part.manifest["outputs"]
    if len(described) != 1:
        raise MergeError(
            f"{part.path}: expected error rows in their places, got them in a separate file "
            f"({', '.join(described)}). Run the part without --error-file, and give --error-file "
            f"to noria merge."
        )
    (expected,) = described.values()
    num_rows = part.part.count(part.manifest["input"]["rows"])
    part.file.seek(0)
    digest = digest_table(digest_chunks(iter(lambda: part.file.read(2**20), b"")))
    # a compressed part or a table with another hash may not be readable, so no lines are counted
    is_right = digest == expected or is_plain(part.path)
    num_lines = sum(1 for _ in part.lines()) if is_right else 0
    if digest != expected or num_lines != num_rows:
        raise MergeError(
            f"{part.path}: expected the {plural(num_rows, 'line')}, {expected['bytes']} "
            f"bytes and sha256 {expected['sha256'][:12]} that its manifest states, got "
            f"{num_lines}, {digest['bytes']} and {digest['sha256'][:12]}. Copy it again with its "
            "manifest, or run the part again with --restart."
        )


def _merged_manifest(parts: Sequence[FinishedPart]) -> dict[str, Any]:
    """The manifest of the whole job without `outputs`; facts of single parts are in `parts`."""
    manifests = [part.manifest for part in parts]
    job = next((m for m in manifests if m["plan"] is not None), manifests[0])
    return {
        **{key: job[key] for key in COMMON_KEYS if key in job},
        "configuration": {**job["configuration"], "rows": str(WHOLE)},
        "rows": add_outcomes([manifest["rows"] for manifest in manifests]),
        **add_figures(manifests),
        "parts": [
            {"name": part.path.name, "part": str(part.part)}
            | {key: value for key, value in part.manifest.items() if key not in COMMON_KEYS}
            for part in parts
        ],
    }


def _output_lines(
    parts: Sequence[FinishedPart], error_file: Path | None, path: Path
) -> Iterator[bytes]:
    """The lines of one output file in input order."""
    lines = [part.lines() for part in parts]
    for row in range(parts[0].manifest["input"]["rows"]):
        line = next(lines[row % len(parts)])
        is_error = error_of_line(line) is not None
        if error_file is None or is_error == (path == error_file):
            yield line


def _refuse_foreign_outputs(
    files: OutputFiles, lines_of: Callable[[Path], Iterator[bytes]], added: AddedColumns
) -> None:
    """Refuse to replace files with other content than this merge would write.

    An interrupted merge leaves complete files, so an equal file may be its result.
    """
    if files.journal.exists():
        raise MergeError(
            f"{files.output}: expected an output without an unfinished job, got "
            f"{files.journal.name} beside it. Finish that job, or choose another output."
        )
    for path in files.outputs:
        if not path.exists():
            continue
        if digest_file(path) != digest_chunks(encoded(path, partial(lines_of, path), added)):
            raise MergeError(
                f"{path}: exists and differs from the merge of these parts. Choose another output, "
                "or move it away."
            )


def _write(
    disk: Disk,
    outputs: Sequence[Path],
    lines_of: Callable[[Path], Iterator[bytes]],
    added: AddedColumns,
    manifest: Mapping[str, Any],
) -> None:
    try:
        described = write_outputs(disk, outputs, lines_of, added)
        write_manifest(disk, outputs[0], {**manifest, "outputs": described})
    except OSError as error:
        raise JobError(
            f"{outputs[0]}: cannot be written ({error.strerror or error}). The parts are "
            "unchanged; free disk space and run the same command again.",
            EXIT_RESUMABLE,
        ) from error
