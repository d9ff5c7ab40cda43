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
from .journal import JournalRow, differences

SCHEMA = 2
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


def differences_from(
    manifest: Mapping[str, Any],
    *,
    input_path: Path,
    configuration: Mapping[str, str],
    may_differ: Collection[str] = (),
    instant: str | None = None,
    outputs: Sequence[Path],
) -> list[str]:
    """The differences of an input, a configuration and outputs from a manifest, a line for each.

    There are none if the outputs are complete and come from exactly this input and configuration.
    Instants are compared if one is given and the prompts of the outputs show theirs.
    """
    wanted = dict(configuration)
    stored = {**_table(manifest, "configuration"), **{key: wanted[key] for key in may_differ}}
    found = differences(stored, wanted, ("there", "now"))
    shown = manifest.get("instant")
    if instant is not None and shown not in (None, instant):
        found.append(f"  the instant: there {shown}, now {instant}")
    digest = describe(digest_file(input_path))
    known = {key: _table(manifest, "input").get(key) for key in digest}
    if known != digest:
        found.append(f"  the input: there {_said(known)}, now {_said(digest)}")
    return found + output_differences(manifest, outputs)


def output_differences(manifest: Mapping[str, Any], paths: Sequence[Path]) -> list[str]:
    """The files that are not the outputs in a manifest, or are not complete, a line for each."""
    known = _table(manifest, "outputs")
    found = []
    if set(known) != {path.name for path in paths}:
        now = ", ".join(sorted(path.name for path in paths))
        found.append(f"  outputs: there {', '.join(sorted(known)) or 'none'}, now {now}")
    for path in paths:
        digest = describe(digest_file(path)) if path.is_file() else {}
        if path.name in known and known[path.name] != digest:
            finished = known[path.name] if isinstance(known[path.name], dict) else {}
            found.append(
                f"  {path.name}, changed since: finished with {_said(finished)}, now "
                f"{_said(digest) if digest else 'not there'}"
            )
    return found


def _table(manifest: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = manifest.get(key)
    return table if isinstance(table, dict) else {}


def _said(digest: Mapping[str, Any]) -> str:
    return f"{digest.get('bytes')} bytes, sha256 {str(digest.get('sha256'))[:12]}"


def describe(digest: FileDigest) -> dict[str, Any]:
    return {"sha256": digest.sha256, "bytes": digest.num_bytes}


def write_manifest(disk: Disk, output: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(disk, manifest_path(output), [text.encode("utf-8", "backslashreplace")])


def make_manifest(
    *,
    model: str,
    weights: str | None,
    configuration: Mapping[str, str],
    setups: Sequence[str],
    fingerprint: str,
    plan: str | None,
    instant: str | None,
    sampling_defaults: Mapping[str, Any],
    config_keys_ignored: Sequence[str],
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
        "weights": weights,
        "versions": versions(),
        "platform": {"python": platform.python_version(), "system": platform.platform()},
        "configuration": dict(configuration),
        "setups": list(setups),
        "fingerprint": fingerprint,
        "plan": plan,
        "plan_fingerprint": plan and "sha256:" + hashlib.sha256(plan.encode()).hexdigest(),
        "instant": instant,
        "sampling_defaults": dict(sampling_defaults),
        "config_keys_ignored": list(config_keys_ignored),
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
    codes: Iterable[str | None], *, num_kept: int, num_dropping: int, num_at_max_length: int
) -> dict[str, Any]:
    """Rows by outcome; `num_kept` of them were finished by earlier runs of the job.

    `num_dropping` of them were answered although choices of experts were dropped;
    `num_at_max_length` have no `max_tokens` and ended at the plan's `max_length`.
    """
    return _outcomes(Counter(codes), num_kept, num_dropping, num_at_max_length)


def add_outcomes(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The row counts of several parts together."""
    counts: Counter[str | None] = Counter()
    num_kept = num_dropping = num_at_max_length = 0
    for rows in parts:
        counts.update({None: rows["ok"], **rows["errors_by_code"]})
        num_kept += rows["kept_from_earlier_runs"]
        num_dropping += rows["ok_with_dropped_choices"]
        num_at_max_length += rows["ok_at_max_length"]
    return _outcomes(counts, num_kept, num_dropping, num_at_max_length)


def _outcomes(
    counts: Counter[str | None], num_kept: int, num_dropping: int, num_at_max_length: int
) -> dict[str, Any]:
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
        "ok_at_max_length": num_at_max_length,
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
