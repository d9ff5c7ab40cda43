"""Writes the output and the manifest of a job with stages from its finished stages.

Each row of the job's part is one line: the answer of the last stage, or the error with which the
row ended. Does not know about models. Guarantees: the lines are those of the stages, byte for byte,
with the carried cells of their rows; the manifest can be merged with those of other parts.
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..batch.job import JobSettings
from ..batch.job_runs import runs_of, sums_of_runs
from ..batch.outcomes import count_outcomes
from ..batch.output import write_outputs
from ..errors import EXIT_RESUMABLE, JobError
from ..files.disk import Disk, digest_file
from ..files.manifest import COMMON_KEYS, digest_table, fingerprint, write_manifest
from ..rows.carried import CarriedCells, with_carried
from ..rows.results import CUT, STOPPED_SAMPLES, TEXTS_CUT, TOKENS_LEFT, error_of_line
from .stage_rows import FollowedRow, StageFiles

Follow = Callable[[], Iterator[FollowedRow]]
"""Follows every row of the job's part through all stages, from the beginning."""

_SAMPLES = (STOPPED_SAMPLES, TOKENS_LEFT)
_TOTALS = ("prompt_tokens", CUT, TEXTS_CUT, "output_tokens", *_SAMPLES, "compiles_during_run")
_OF_ROWS = {
    "num_kept": "kept_from_earlier_runs",
    "num_repeated": "repeated",
    "num_dropping": "ok_with_dropped_choices",
    "num_at_max_length": "ok_at_max_length",
    "num_stopping": "ok_with_stopped_samples",
}


def write_final(
    settings: JobSettings,
    stages: Sequence[StageFiles],
    manifests: Sequence[Mapping[str, Any]],
    follow: Follow,
    carried: CarriedCells,
    num_rows: int,
    disk: Disk,
) -> dict[str, Any]:
    """Write the outputs and the manifest.

    Args:
        settings: The job.
        stages: The files of its stages.
        manifests: The manifests of its stages.
        follow: Follows its rows.
        carried: The cells of the input that output lines have.
        num_rows: The number of rows of the whole input.
        disk: Disk operations.

    Returns:
        The manifest.

    Raises:
        JobError: The disk refused a file; every answer is kept in the files of the stages.
    """
    files = settings.files
    try:
        lines_of = partial(_output_lines, settings, follow, carried)
        outputs = write_outputs(disk, files.outputs, lines_of, settings.identity.added_columns)
        manifest = {
            **_job_facts(settings, manifests, num_rows),
            "outputs": outputs,
            **_outcomes(stages, manifests, follow),
            **_totals(manifests),
        }
        write_manifest(disk, files.output, manifest)
    except OSError as error:
        raise JobError(
            f"{files.output}: cannot be written ({error.strerror or error}). Every answer "
            f"is kept in {stages[0].folder}; run the same command again to finish.",
            EXIT_RESUMABLE,
        ) from error
    return manifest


def _output_lines(
    settings: JobSettings, follow: Follow, carried: CarriedCells, path: Path
) -> Iterator[bytes]:
    error_file = settings.files.error_file
    for row, cells in zip(follow(), carried.of(settings.identity.part), strict=False):
        if error_file is None or (row.stage is not None) == (path == error_file):
            yield with_carried(row.line, cells) + b"\n"


def _job_facts(
    settings: JobSettings, manifests: Sequence[Mapping[str, Any]], num_rows: int
) -> dict[str, Any]:
    """The facts of the job: those that its stages have in common, and its own input."""
    # a stage that ran no row has neither plan nor weights
    job = next((m for m in manifests if m["plan"] is not None), manifests[0])
    return {
        **{key: job[key] for key in COMMON_KEYS if key in job},
        "platform": {"python": platform.python_version(), "system": platform.platform()},
        "configuration": settings.identity.stored,
        "setups": job["setups"],
        "fingerprint": fingerprint(settings.identity.configuration),
        # a stage has a time if its prompts show it
        "instant": next((m["instant"] for m in manifests if m["instant"] is not None), None),
        "input": {
            "name": settings.files.input.name,
            **digest_table(digest_file(settings.files.input)),
            "rows": num_rows,
        },
    }


def _outcomes(
    stages: Sequence[StageFiles], manifests: Sequence[Mapping[str, Any]], follow: Follow
) -> dict[str, Any]:
    """The rows by outcome, and for each stage the facts of its job."""
    codes: Counter[str | None] = Counter()
    before: dict[str, Counter[str]] = {stage.name: Counter() for stage in stages}
    for row in follow():
        code = None
        if row.stage is not None:
            error = error_of_line(row.line)
            assert error is not None
            code = error.code
            if not row.was_asked:
                before[row.stage][code] += 1
        codes[code] += 1
    last = manifests[-1]["rows"]
    counts = {name: last[key] for name, key in _OF_ROWS.items()}
    return {
        "rows": count_outcomes(codes.elements(), **counts),
        "stages": [
            {
                "name": stage.name,
                "errors_before": dict(sorted(before[stage.name].items())),
                **{key: value for key, value in manifest.items() if key not in COMMON_KEYS},
            }
            for stage, manifest in zip(stages, manifests, strict=True)
        ],
    }


def _totals(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens, ignored keys, and the sums of all runs of the stages."""
    return {
        **{key: sum(m.get(key, 0) for m in manifests) for key in _TOTALS},
        **sums_of_runs([run for manifest in manifests for run in runs_of(manifest)]),
        "ignored_keys": dict(sum((Counter(m["ignored_keys"]) for m in manifests), Counter())),
    }
