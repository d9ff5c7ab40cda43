"""The manifest beside a finished output: the job's model, versions, times and outcomes.

The manifest also proves that a job is complete: it has the hashes of the input, the configuration
and the output, and is written after the output is durable.

Does not know how rows run.
"""

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..files.disk import Disk, FileDigest, digest_file, replace_file
from .journal import JournalRow

SCHEMA = 2
_BY_CODE = "errors_by_code"
PERCENTILES = (50, 90, 95, 99)
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


def versions() -> dict[str, str]:
    """The versions of installed packages that affect results; imports none of them."""
    names = ("noria", "jax", "jaxlib", "flax", "numpy", "tokenizers", "sentencepiece")
    installed = {}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


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


def count_outcomes(
    codes: Iterable[str | None],
    *,
    num_kept: int,
    num_repeated: int,
    num_dropping: int,
    num_at_max_length: int,
    num_stopping: int,
) -> dict[str, Any]:
    """The numbers of rows by outcome.

    Args:
        codes: The error code of every row; None for a result.
        num_kept: Rows that earlier runs of the job finished.
        num_repeated: Rows that were answered with the output of an equal row.
        num_dropping: Rows with a result although expert choices were dropped.
        num_at_max_length: Rows without `max_tokens` that ended at the plan's `max_length`.
        num_stopping: Rows with samples that a rule stopped early.
    """
    counts = Counter(codes)
    num_ok = counts.pop(None, 0)
    return {
        "total": num_ok + counts.total(),
        "ok": num_ok,
        "errors": counts.total(),
        _BY_CODE: {str(code): counts[code] for code in sorted(counts, key=str)},
        "kept_from_earlier_runs": num_kept,
        "repeated": num_repeated,
        "ok_with_dropped_choices": num_dropping,
        "ok_at_max_length": num_at_max_length,
        "ok_with_stopped_samples": num_stopping,
    }


def add_outcomes(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of the row counts of several parts."""
    codes = sum((Counter(rows[_BY_CODE]) for rows in parts), Counter())
    by_code = dict(sorted(codes.items()))
    return {
        key: by_code if key == _BY_CODE else sum(rows[key] for rows in parts) for key in parts[0]
    }


def total(finished: Sequence[JournalRow], name: str) -> int:
    """The sum of a figure over rows; rows without it count as zero."""
    return int(sum(row.metrics.get(name, 0) for row in finished))


def spread(finished: Sequence[JournalRow], name: str) -> dict[str, float] | None:
    """Mean and percentiles of a figure over the rows that have it, from all runs of the job."""
    values = sorted(row.metrics[name] for row in finished if name in row.metrics)
    if not values:
        return None
    # nearest rank, so that every percentile is the figure of a row
    ranks = {f"p{p}": values[-(-p * len(values) // 100) - 1] for p in PERCENTILES}
    return {"mean": statistics.fmean(values), **ranks}
