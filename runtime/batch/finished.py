"""Outputs that exist when a job begins: finished by the same job, or made by another one.

Knows nothing of how rows run. Guarantees: nothing here changes a file.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import EXIT_BUILD, EXIT_OK, EXIT_ROWS_FAILED, JobError, UnusableFile
from ..files.disk import digest_file, temporary_name
from .job import JobSettings
from .journal import differences
from .manifest import (
    digest_table,
    digest_text,
    manifest_path,
    output_differences,
    read_manifest,
    table_in,
)


def finished_manifest(settings: JobSettings) -> dict[str, Any] | None:
    """The manifest of a job whose outputs are finished; None if they are not."""
    manifest = read_manifest(settings.output_path)
    if manifest is None or _differences_from(settings, manifest):
        return None
    return manifest


def _differences_from(settings: JobSettings, manifest: Mapping[str, Any]) -> list[str]:
    """The differences of a job and its files from a manifest, a line for each.

    Instants are compared if one is asked for and the prompts of the outputs show theirs.
    """
    wanted = settings.stored_configuration
    may_differ = {key: wanted[key] for key in settings.may_differ}
    stored = {**table_in(manifest, "configuration"), **may_differ}
    found = differences(stored, wanted, ("there", "now"))
    instant, shown = settings.now and settings.now.isoformat(), manifest.get("instant")
    if instant is not None and shown not in (None, instant):
        found.append(f"  the instant: there {shown}, now {instant}")
    digest = digest_table(digest_file(settings.input_path))
    known = {key: table_in(manifest, "input").get(key) for key in digest}
    if known != digest:
        found.append(f"  the input: there {digest_text(known)}, now {digest_text(digest)}")
    return found + output_differences(manifest, settings.outputs)


def refuse_foreign_outputs(settings: JobSettings) -> None:
    """Refuse to replace a file that this job did not begin; an unfinished job has a journal."""
    if settings.restart or settings.journal_path.exists():
        return
    for path in settings.outputs:
        temporary = path.with_name(temporary_name(path.name))
        if temporary.exists():
            raise UnusableFile(
                f"{temporary}: expected nothing, as {path.name} is written under this name first, "
                "got a file. Choose another output, move it away, or discard it with --restart."
            )
        if path.exists():
            manifest = read_manifest(settings.output_path)
            found = ["  no manifest is beside it"]
            if manifest is not None:
                found = _differences_from(settings, manifest)
            raise UnusableFile(
                f"{path}: exists and is not the finished output of this input, model and "
                "settings:\n" + "\n".join(found) + "\nChoose another output, or replace it with "
                "--restart."
            )


def exit_code_of(settings: JobSettings, manifest: Mapping[str, Any]) -> int:
    """The exit code of a complete job; a compile after the build is an error, though no row is
    lost."""
    if num_compiles := manifest["compiles_during_run"]:
        raise JobError(
            f"{settings.output_path}: expected no compile after the build, got {num_compiles}. The "
            "output is complete and its rows are right, but they waited for the compiler. Please "
            f"report it with {manifest_path(settings.output_path)}.",
            EXIT_BUILD,
        )
    return EXIT_ROWS_FAILED if manifest["rows"]["errors"] else EXIT_OK
