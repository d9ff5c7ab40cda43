"""The manifest beside a finished output: what ran, on what, how long, with what outcome.

It is also the proof that a job is complete: it names the input, the configuration and the output by
their hashes, and is written after the output is durable.

Knows nothing of how rows run. Guarantees: scan, load, build and run seconds add up to the wall
time, as the clock is in exactly one phase at any moment.
"""

import hashlib
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from .disk import Disk, FileDigest, digest_file, replace_file
from .journal import JournalRow

SCHEMA = 1
PERCENTILES = (50, 90, 95, 99)
Phase = Literal["scan", "load", "build", "run"]


class PhaseClock:
    """A stopwatch that is always in exactly one phase; it starts in `scan`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.start = self._since = clock()
        self.phase: Phase = "scan"
        self._seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin another."""
        now = self._clock()
        self._seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def seconds(self) -> dict[Phase, float]:
        """Seconds of every phase until now."""
        self.enter(self.phase)
        return dict(self._seconds)


def versions() -> dict[str, str]:
    """Versions of what decides the numbers, without importing any of it."""
    names = ("noria", "jax", "jaxlib", "flax", "numpy", "tokenizers", "sentencepiece")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(configuration: Mapping[str, str]) -> str:
    """One hash for everything that decides a row's answer besides the row itself."""
    canonical = json.dumps(dict(configuration), sort_keys=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def manifest_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.manifest.json")


def read_manifest(output: Path) -> dict[str, Any] | None:
    """The manifest of an output; None where there is none that can be read."""
    try:
        content = json.loads(manifest_path(output).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def is_complete(
    output: Path,
    *,
    input_path: Path,
    configuration: Mapping[str, str],
    may_differ: Collection[str] = (),
    error_file: Path | None,
) -> dict[str, Any] | None:
    """The manifest, if these outputs are whole and of exactly this input and configuration."""
    manifest = read_manifest(output)
    if manifest is None:
        return None
    stored, wanted = dict(manifest.get("configuration", {})), dict(configuration)
    for key in may_differ:
        stored[key] = wanted[key]
    if stored != wanted:
        return None
    if manifest.get("input", {}).get("sha256") != digest_file(input_path).sha256:
        return None
    paths = [path for path in (output, error_file) if path is not None]
    return manifest if matches_outputs(manifest, paths) else None


def matches_outputs(manifest: Mapping[str, Any], paths: Sequence[Path]) -> bool:
    """Whether these are the outputs that the manifest describes, all of them and whole."""
    expected = manifest.get("outputs")
    if not isinstance(expected, dict) or set(expected) != {path.name for path in paths}:
        return False
    return all(
        path.is_file() and expected[path.name] == describe(digest_file(path)) for path in paths
    )


def describe(digest: FileDigest) -> dict[str, Any]:
    return {"sha256": digest.sha256, "bytes": digest.num_bytes}


def write_manifest(disk: Disk, output: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(disk, manifest_path(output), [text.encode("utf-8", "backslashreplace")])


def make_manifest(
    *,
    model: str,
    configuration: Mapping[str, str],
    setups: Sequence[str],
    fingerprint: str,
    plan: str | None,
    sampling_defaults: Mapping[str, Any],
    input_facts: Mapping[str, Any],
    outputs: Mapping[str, Mapping[str, Any]],
    rows: Mapping[str, Any],
    phases: PhaseClock,
    generator: Mapping[str, Any],
    finished: Iterable[JournalRow],
    num_tokens_this_run: int,
) -> dict[str, Any]:
    """Put the facts of a finished job together."""
    finished = list(finished)
    seconds = phases.seconds()
    run_seconds = seconds["run"]
    return {
        "schema": SCHEMA,
        "model": model,
        "versions": versions(),
        "platform": {"python": platform.python_version(), "system": platform.platform()},
        "configuration": dict(configuration),
        "setups": list(setups),
        "fingerprint": fingerprint,
        "plan": plan,
        "plan_fingerprint": plan and "sha256:" + hashlib.sha256(plan.encode()).hexdigest(),
        "sampling_defaults": dict(sampling_defaults),
        "input": dict(input_facts),
        "outputs": dict(outputs),
        "rows": dict(rows),
        **{f"{phase}_seconds": value for phase, value in seconds.items()},
        "wall_seconds": sum(seconds.values()),
        "prompt_tokens": _total(finished, "prompt_tokens"),
        "output_tokens": _total(finished, "output_tokens"),
        "output_tokens_per_second": num_tokens_this_run / run_seconds if run_seconds else None,
        "time_to_first_token_seconds": _spread(finished, "time_to_first_token"),
        "inter_token_latency_seconds": _spread(finished, "inter_token_latency"),
        "compiles_during_run": generator.get("compiles_during_run", 0),
        "generator": dict(generator),
    }


def count_outcomes(
    codes: Iterable[str | None], *, num_kept: int, num_dropping: int
) -> dict[str, Any]:
    """Rows by outcome; `num_kept` of them were finished by earlier runs of the job.

    `num_dropping` were answered although choices of experts were dropped.
    """
    return _outcomes(Counter(codes), num_kept, num_dropping)


def add_outcomes(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The row counts of several parts together."""
    counts: Counter[str | None] = Counter()
    num_kept = num_dropping = 0
    for rows in parts:
        counts.update({None: rows["ok"], **rows["errors_by_code"]})
        num_kept += rows["kept_from_earlier_runs"]
        num_dropping += rows["ok_with_dropped_choices"]
    return _outcomes(counts, num_kept, num_dropping)


def _outcomes(counts: Counter[str | None], num_kept: int, num_dropping: int) -> dict[str, Any]:
    num_ok = counts.pop(None, 0)
    errors = {str(code): counts[code] for code in sorted(counts, key=str)}
    num_errors = sum(errors.values())
    return {
        "total": num_ok + num_errors,
        "ok": num_ok,
        "errors": num_errors,
        "errors_by_code": errors,
        "kept_from_earlier_runs": num_kept,
        "ok_with_dropped_choices": num_dropping,
    }


def _total(finished: list[JournalRow], name: str) -> int:
    return int(sum(row.metrics.get(name, 0) for row in finished))


def _spread(finished: list[JournalRow], name: str) -> dict[str, float] | None:
    """Mean and percentiles over the rows that have such a figure, whichever run finished them."""
    values = sorted(row.metrics[name] for row in finished if name in row.metrics)
    if not values:
        return None
    # nearest rank, so that every figure is one that a row really had
    ranks = {f"p{p}": values[-(-p * len(values) // 100) - 1] for p in PERCENTILES}
    return {"mean": statistics.fmean(values), **ranks}
