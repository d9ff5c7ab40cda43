"""The manifest beside a finished output: the job's model, versions, times and outcomes.

The manifest also proves that a job is complete: it has the hashes of the input, the configuration
and the output, and is written after the output is durable.

Does not know how rows run or how they are counted.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .disk import Disk, FileDigest, digest_file, replace_file

SCHEMA = 2
COMMON_KEYS = (
    "schema",
    "model",
    "weights",
    "versions",
    "configuration",
    "fingerprint",
    "plan",
    "plan_fingerprint",
    "instant",
    "sampling_defaults",
    "config_keys_ignored",
    "tensors_not_read",
    "input",
)
"""The keys of a manifest that all parts of a job have in common; the others describe one part."""


def fingerprint(configuration: Mapping[str, str]) -> str:
    """The hash of a configuration: everything besides a row that decides its answer."""
    canonical = json.dumps(dict(configuration), sort_keys=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def manifest_path(output: Path) -> Path:
    """The path of an output's manifest."""
    return output.with_name(f"{output.name}.manifest.json")


def read_manifest(output: Path) -> dict[str, Any] | None:
    """The manifest of an output; None if there is none or it cannot be read."""
    try:
        content = json.loads(manifest_path(output).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def output_differences(manifest: Mapping[str, Any], paths: Sequence[Path]) -> list[str]:
    """The differences of output files from those in a manifest, one line for each."""
    known = table_in(manifest, "outputs")
    lines = []
    if set(known) != {path.name for path in paths}:
        now = ", ".join(sorted(path.name for path in paths))
        lines.append(f"  outputs: there {', '.join(sorted(known)) or 'none'}, now {now}")
    for path in paths:
        digest = digest_table(digest_file(path)) if path.is_file() else {}
        if path.name in known and known[path.name] != digest:
            finished = known[path.name] if isinstance(known[path.name], dict) else {}
            lines.append(
                f"  {path.name}, changed since: finished with {digest_text(finished)}, now "
                f"{digest_text(digest) if digest else 'not there'}"
            )
    return lines


def table_in(manifest: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A table of a manifest; empty if there is none."""
    table = manifest.get(key)
    return table if isinstance(table, dict) else {}


def digest_text(digest: Mapping[str, Any]) -> str:
    """A digest as text for messages."""
    return f"{digest.get('bytes')} bytes, sha256 {str(digest.get('sha256'))[:12]}"


def digest_table(digest: FileDigest) -> dict[str, Any]:
    """A digest as a table of a manifest."""
    return {"sha256": digest.sha256, "bytes": digest.num_bytes}


def write_manifest(disk: Disk, output: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of an output; it is complete or absent."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(disk, manifest_path(output), [text.encode("utf-8", "backslashreplace")])
