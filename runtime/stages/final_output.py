"""Writes the output and the manifest of a job with stages from its finished stages.

Each row of the job's part is one line: the answer of the last stage, or the error with which the
row ended. Does not know about models. Guarantees: the lines are those of the stages, byte for byte,
with the carried cells of their rows; the manifest can be merged with those of other parts.
"""

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..batch.job import JobIdentity
from ..batch.job_files import JobFiles
from ..batch.output import add_figures, count_outcomes, write_outputs
from ..errors import EXIT_RESUMABLE, JobError
from ..files.disk import Disk, digest_file
from ..files.manifest import COMMON_KEYS, digest_table, fingerprint, write_manifest
from ..rows.results import error_of_line
from ..rows.tables import with_carried
from .stage_rows import StagedRows


def write_final(
    files: JobFiles,
    identity: JobIdentity,
    rows: StagedRows,
    manifests: Sequence[Mapping[str, Any]],
    disk: Disk,
) -> dict[str, Any]:
    """Write the outputs and the manifest.

    Args:
        files: The files of the job.
        identity: Its identity.
        rows: Its rows, which have gone through all stages.
        manifests: The manifests of its stages.
        disk: Disk operations.

    Returns:
        The manifest.

    Raises:
        JobError: The disk refused a file; every answer is kept in the files of the stages.
    """
    num_rows = sum(1 for _ in rows.all())
    try:
        lines_of = partial(_output_lines, rows, files.error_file)
        outputs = write_outputs(disk, files.outputs, lines_of, identity.added_columns)
        manifest = {
            **_job_facts(files, identity, manifests, num_rows),
            "outputs": outputs,
            **_outcomes(rows, manifests),
            **add_figures(manifests),
        }
        write_manifest(disk, files.output, manifest)
    except OSError as error:
        raise JobError(
            f"{files.output}: cannot be written ({error.strerror or error}). Every answer "
            f"is kept in {rows.stages[0].folder}; run the same command again to finish.",
            EXIT_RESUMABLE,
        ) from error
    return manifest


def _output_lines(rows: StagedRows, error_file: Path | None, path: Path) -> Iterator[bytes]:
    followed, carried = rows.follow(len(rows.stages)), rows.source.carried
    for row, cells in zip(followed, carried.of(rows.part), strict=False):
        if error_file is None or (row.stage is not None) == (path == error_file):
            yield with_carried(row.line, cells) + b"\n"


def _job_facts(
    files: JobFiles, identity: JobIdentity, manifests: Sequence[Mapping[str, Any]], num_rows: int
) -> dict[str, Any]:
    """The facts of the job: those that its stages have in common, and its own input."""
    # a stage that ran no row has neither plan nor weights
    job = next((m for m in manifests if m["plan"] is not None), manifests[0])
    return {
        **{key: job[key] for key in COMMON_KEYS if key in job},
        "platform": {"python": platform.python_version(), "system": platform.platform()},
        "configuration": identity.stored,
        "setups": job["setups"],
        "fingerprint": fingerprint(identity.configuration),
        # a stage has a time if its prompts show it
        "instant": next((m["instant"] for m in manifests if m["instant"] is not None), None),
        "input": {
            "name": files.input.name,
            **digest_table(digest_file(files.input)),
            "rows": num_rows,
        },
    }


def _outcomes(rows: StagedRows, manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows by outcome, and for each stage the facts of its job."""
    codes: Counter[str | None] = Counter()
    before: dict[str, Counter[str]] = {stage.name: Counter() for stage in rows.stages}
    for row in rows.follow(len(rows.stages)):
        code = None
        if row.stage is not None:
            error = error_of_line(row.line)
            assert error is not None
            code = error.code
            if not row.was_asked:
                before[row.stage][code] += 1
        codes[code] += 1
    return {
        # the last stage knows of results what error codes do not say
        "rows": {**manifests[-1]["rows"], **count_outcomes(codes.elements())},
        "stages": [
            {
                "name": stage.name,
                "errors_before": dict(sorted(before[stage.name].items())),
                **{key: value for key, value in manifest.items() if key not in COMMON_KEYS},
            }
            for stage, manifest in zip(rows.stages, manifests, strict=True)
        ],
    }
