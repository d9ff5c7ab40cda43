"""Recognises existing outputs of a job: its own finished outputs, or foreign files.

Does not know how rows run. Guarantees: no function here changes a file.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..console import plural
from ..errors import (
    EXIT_BUILD,
    EXIT_MODEL,
    EXIT_OK,
    EXIT_ROWS_FAILED,
    EXIT_USAGE,
    JobError,
    UnusableFile,
)
from ..files.differences import differences
from ..files.disk import digest_file, temporary_name
from ..files.manifest import (
    digest_table,
    digest_text,
    manifest_path,
    output_differences,
    read_manifest,
    table_in,
)
from .job import JobIdentity, JobModel, ModelFacts
from .job_files import JobFiles


def finished_manifest(
    files: JobFiles, identity: JobIdentity, *, compares_input: bool = True
) -> dict[str, Any] | None:
    """The manifest of a job, if its outputs are finished; else None.

    With `compares_input` false, they may be those of another input.
    """
    manifest = read_manifest(files.output)
    if manifest is None:
        return None
    lines = _differences_from(files, identity, manifest, compares_input=compares_input)
    return None if lines else manifest


def _differences_from(
    files: JobFiles,
    identity: JobIdentity,
    manifest: Mapping[str, Any],
    *,
    compares_input: bool = True,
) -> list[str]:
    """The differences of a job and its files from a manifest, one line for each.

    The time is compared only if the job gives a time and the manifest has one. The manifest has one
    if prompts show the time.
    """
    wanted = identity.stored
    may_differ = {key: wanted[key] for key in identity.may_differ}
    stored = {**table_in(manifest, "configuration"), **may_differ}
    lines = differences(stored, wanted, ("there", "now"))
    instant, shown = identity.now and identity.now.isoformat(), manifest.get("instant")
    if instant is not None and shown not in (None, instant):
        lines.append(f"  the time: there {shown}, now {instant}")
    if compares_input:
        digest = digest_table(digest_file(files.input))
        known = {key: table_in(manifest, "input").get(key) for key in digest}
        if known != digest:
            lines.append(f"  the input: there {digest_text(known)}, now {digest_text(digest)}")
    return lines + output_differences(manifest, files.outputs)


def refuse_foreign_outputs(files: JobFiles, identity: JobIdentity) -> None:
    """Refuse to replace existing files, unless the job restarts.

    Call it only if neither a manifest nor a journal says that the files are this job's.

    Raises:
        UnusableFile: An output or its temporary file exists and is not this job's.
    """
    if files.restart:
        return
    for path in files.outputs:
        temporary = path.with_name(temporary_name(path.name))
        if temporary.exists():
            raise UnusableFile(
                f"{temporary}: expected nothing, as {path.name} is written under this name first, "
                "got a file. Choose another output, move it away, or discard it with --restart."
            )
        if path.exists():
            manifest = read_manifest(files.output)
            lines, remedy = ["  no manifest is beside it"], ""
            if manifest is not None:
                lines = _differences_from(files, identity, manifest)
                # jobs with stages have no --update
                is_single = "pipeline" not in identity.configuration
                if is_single and finished_manifest(files, identity, compares_input=False):
                    remedy = ", keep the answers of equal rows with --update"
            raise UnusableFile(
                f"{path}: exists and is not the finished output of this input, model and "
                "settings:\n" + "\n".join(lines) + f"\nChoose another output{remedy}, or "
                "replace it with --restart."
            )


def complete_already(
    files: JobFiles, facts: ModelFacts, model: JobModel, manifest: Mapping[str, Any]
) -> str:
    """The message that a job has nothing to do, as rows were answered with the model's weights.

    Raises:
        JobError: The weights differ.
    """
    if (stored := manifest.get("weights")) is not None:
        check_weights(model.weights(), facts, stored, files)
    errors = plural(manifest["rows"]["errors"], "error")
    return f"{files.output}: complete already, {errors}, nothing to do"


def exit_code_of(output: Path, manifest: Mapping[str, Any]) -> int:
    """The exit code of a complete job.

    Raises:
        JobError: A graph compiled after the build, although all rows are complete.
    """
    if num_compiles := manifest["compiles_during_run"]:
        programs = manifest.get("generator", {}).get("unexpected_compiles", ())
        named = f" ({'; '.join(programs[:3])})" if programs else ""
        raise JobError(
            f"{output}: expected no compile after the build, got {num_compiles}"
            f"{named}. The output is complete and correct, but rows waited for the compiler. "
            f"Please report this with {manifest_path(output)}.",
            EXIT_BUILD,
        )
    return EXIT_ROWS_FAILED if manifest["rows"]["errors"] else EXIT_OK


def check_weights(digest: str, facts: ModelFacts, stored: str | None, files: JobFiles) -> None:
    """Refuse weights that differ from those the user expects or those the job began with.

    Raises:
        JobError: The digest is not the expected or the stored one.
    """
    if facts.expected_weights not in (None, digest):
        raise JobError(
            f"--expect-weights: expected weights with the digest {facts.expected_weights}, got "
            f"{digest}. Give the model with the expected digest, or this model's digest.",
            EXIT_MODEL,
        )
    if stored not in (None, digest):
        raise JobError(
            f"{files.output}: expected the weights that its rows were answered with, got "
            f"others, although the model's other files are the same:\n  weights: there {stored}, "
            f"now {digest}\nRun with the original weights, choose another output, or begin again "
            f"with --restart.",
            EXIT_MODEL,
        )


def check_same_answers(output: Path, before: str, plan: str, *, has_open_rows: bool) -> None:
    """Refuse a plan for other devices that changes more than the order of sums.

    Args:
        output: The output of the job.
        before: The plan of the finished rows, as TOML.
        plan: The plan for the devices of this run.
        has_open_rows: Whether rows without `max_tokens` end at the plan's `max_length`.

    Raises:
        JobError: The numbers or the experts of the plans differ, or the length of such rows.
    """

    def kept_facts(text: str) -> dict[str, str]:
        table = tomllib.loads(text)
        kept = {key: json.dumps(table.get(key, {})) for key in ("numbers", "experts")}
        if has_open_rows:
            kept["buckets.max_length"] = str(table.get("buckets", {}).get("max_length"))
        return kept

    names = ("finished rows have", "now")
    if lines := differences(kept_facts(before), kept_facts(plan), names):
        raise JobError(
            f"{output}: expected a plan for these devices that answers as the plan "
            "of the finished rows, got another one:\n" + "\n".join(lines) + "\nGive the plan the "
            "values of the finished rows, with --set or in the file of --plan.",
            EXIT_USAGE,
        )
