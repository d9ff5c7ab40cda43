"""Measure how long a device waits for the host between two calls of a batch job.

The device is simulated: every call takes a fixed time, and reading its results blocks until that
time is over. Everything else is a real batch job: scheduler, engine, tokenizer, text, journal,
output. The job runs once with plain rows and once with stop strings. With stop strings the host
must read the text of a call before it can choose the next call. A wait includes putting arguments
on a device, and does not include the call of an executable.

    python scripts/bench_host.py --output benchmarks/host.json
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from noria.compile.compiled_graphs import CompiledGraphs
from noria.compile.graphs.graph_kinds import GraphKey, graph_keys
from noria.compile.graphs.prefill_steps import PrefillOutput
from noria.compile.graphs.steps import NO_TOKEN, DecodeOutput
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.runtime.batch.job import Build, JobIdentity, JobSettings, ModelFacts
from noria.runtime.batch.job_files import JobFiles
from noria.runtime.batch.run import run_job
from noria.runtime.checkpoint import open_model
from noria.runtime.devices.backends import prepare_jax
from noria.runtime.devices.host_arrays import HostArrays
from noria.runtime.devices.machine import describe_machine
from noria.runtime.engine.admission import Admission
from noria.runtime.engine.generation import GenerationSession
from noria.runtime.engine.model_runner import ModelRunner
from noria.runtime.engine.shared_prefixes import plan_submission
from noria.runtime.engine.slot_calls import SlotCalls
from noria.runtime.progress.progress import Progress
from noria.runtime.rows.job_text import JobText
from noria.runtime.rows.prompt_encoder import PromptEncoder
from noria.runtime.text.load_tokenizer import load_tokenizer
from noria.runtime.text.tokenizer import Tokenizer

LONGEST_WAIT_MS = 2.0
"""Upper bound for a device's mean wait between two decode calls, with plain rows."""
PROMPT, LONGEST = 64, 192
STOPS = {"plain rows": [], "rows with stop strings": ["a text that no row has"]}


def main() -> None:
    options = _parse()
    prepare_jax("cpu")
    with open_model("smollm2") as files:
        tokenizer = load_tokenizer(files.tokenizer_files)
    assert tokenizer is not None
    jobs = {name: measure(options, tokenizer, stop) for name, stop in STOPS.items()}
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "settings": {key: str(value) for key, value in vars(options).items()},
        "jobs": jobs,
    }
    table = markdown(report)
    print(table)
    if options.output:
        text = json.dumps(report, indent=1) + "\n"
        options.output.with_suffix(".json").write_text(text, encoding="utf-8")
        options.output.with_suffix(".md").write_text(table, encoding="utf-8")
    longest = jobs["plain rows"]["waits_ms"]["decode, decode"]["mean"]
    if longest > LONGEST_WAIT_MS:
        sys.exit(f"expected at most {LONGEST_WAIT_MS} ms between decode calls, got {longest:.2f}")


class Pending:
    """An array that the simulated device computes."""

    def __init__(self, value: np.ndarray, ready_at: float):
        self._value = value
        self._ready_at = ready_at

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        """Wait until the device has computed the array, and return it."""
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        return self._value


class StandInDevice:
    """Graphs of a grid that take a fixed time; rows end at their limits, with arbitrary ids.

    Attributes:
      calls: Name of every call except forks, and the device's wait before it in seconds.
      num_ended: Number of rows that reached their limit.
    """

    def __init__(self, grid: BucketGrid, vocab_size: int, seconds: float):
        self.calls: list[tuple[str, float]] = []
        self._seconds = seconds
        self._free_at = 0.0
        self.num_ended = 0
        self._vocab_size, self._steps = vocab_size, grid.steps_per_call
        # one more slot for the dummy rows of prefill
        self._left_B = np.zeros(grid.decode_slots + 1, np.int32)
        executables = {key: partial(self._executable_of(key), str(key)) for key in graph_keys(grid)}
        self.graphs = CompiledGraphs(grid, executables)

    def _executable_of(self, key: GraphKey):
        kinds = {"decode": self._decode, "prefill": self._prefill, "fork": self._fork}
        return kinds.get(key.kind, self._empty_state)

    def _empty_state(self, name: str) -> None:
        """The decode state, which these calls take and return, and which holds nothing."""

    def _fork(self, name: str, state: Any, source: Any, slot: Any, sampling: Any, *pages: Any):
        self._left_B[int(slot)] = self._left_B[int(source)]
        return state, None

    def _prefill(self, name: str, parameters: Any, state: Any, rows: Any, asked: Any, tokens: Any):
        pending = self._start(name)
        limit_B, length_B = np.asarray(asked.limit_B), np.asarray(asked.prompt_length_B)
        self._left_B[np.asarray(rows.slot_B)] = limit_B - length_B
        return state, PrefillOutput(pending(np.ones(len(tokens), bool)), None)

    def _decode(self, name: str, parameters: Any, state: Any, is_live_B: Any, *pages: Any):
        pending = self._start(name)
        left_B = np.where(np.asarray(is_live_B), self._left_B[:-1], 0)
        left_BQ = np.maximum(left_B[:, None] - np.arange(self._steps), 0)
        tokens_BQ = np.where(left_BQ > 0, _ids_before_the_end(left_BQ, self._vocab_size), NO_TOKEN)
        self._left_B[:-1] -= np.minimum(left_B, self._steps)
        self.num_ended += int(((left_B > 0) & (left_B <= self._steps)).sum())
        good_B = pending(np.ones(len(left_B), bool))
        is_active_B = pending(left_B > self._steps)
        return state, DecodeOutput(pending(tokens_BQ), is_active_B, good_B, good_B, None)

    def _start(self, name: str):
        """Begin a call; return a constructor of arrays that are ready at the call's end."""
        now = time.perf_counter()
        self.calls.append((name, max(0.0, now - self._free_at) if self.calls else 0.0))
        self._free_at = max(now, self._free_at) + self._seconds
        return partial(Pending, ready_at=self._free_at)


def _ids_before_the_end(left: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return an id for each number of tokens left: deterministic, far apart for neighbours."""
    return left * 7919 % vocab_size


def answer_ids(count: int, vocab_size: int) -> list[int]:
    """Return the ids of an answer of `count` tokens."""
    return _ids_before_the_end(np.arange(count, 0, -1), vocab_size).tolist()


class StandInModel:
    """A model whose graphs run on the simulated device, for `run_job`."""

    def __init__(self, grid: BucketGrid, tokenizer: Tokenizer, seconds: float):
        self.grid, self.tokenizer = grid, tokenizer
        self.device = StandInDevice(grid, tokenizer.vocab_size, seconds)

    def weights(self) -> str:
        return "none"

    @contextmanager
    def open_text(self, now: object) -> Iterator[JobText]:
        """Give the tokenizer, without a chat template."""
        yield JobText(PromptEncoder(self.tokenizer), self.tokenizer)

    def build(self, summary: Any, stored_plan: Any, *, phases: Any, progress: Any) -> Build:
        """Return a generator over the simulated device; compile nothing."""
        graphs, vocab_size = self.device.graphs, self.tokenizer.vocab_size
        host = HostArrays(find_target("cpu").placement().replicated)
        runner = ModelRunner(graphs, {}, host, graphs.empty_state())
        admission = Admission(self.grid, vocab_size, self.grid.max_length, (), self.tokenizer)
        slots = SlotCalls(self.grid, vocab_size)
        generator = GenerationSession(runner=runner, slots=slots, admission=admission)
        submission = partial(plan_submission, grid=self.grid)
        return Build(generator, f"slots = {self.grid.decode_slots}\n", "none", submission)


def measure(options: argparse.Namespace, tokenizer: Tokenizer, stop: list[str]) -> dict[str, Any]:
    """Run a job; return waits by the kinds of calls around them, and a digest of all calls."""
    grid = BucketGrid(LONGEST, ((PROMPT, 32),), options.slots, steps_per_call=options.steps)
    model = StandInModel(grid, tokenizer, options.call_ms / 1e3)
    with tempfile.TemporaryDirectory() as folder:
        rows, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        write_rows(rows, options.rows, stop)
        identity = JobIdentity({"model": "stand-in"})
        started = time.perf_counter()
        code = run_job(
            JobSettings(JobFiles(output, input=rows), identity, ModelFacts("stand-in")),
            model,  # pyright: ignore[reportArgumentType]
            progress=Progress(is_quiet=True),
        )
        seconds = time.perf_counter() - started
    assert code == 0, code
    return {"seconds": seconds, **figures(model.device.calls)}


def write_rows(path: Path, count: int, stop: list[str]) -> None:
    """Write rows of an OpenAI batch whose answers have 16 to 127 tokens."""
    rng = np.random.default_rng(1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row = {"prompt": f"Row {number} of a batch.", "max_tokens": int(rng.integers(16, 128))}
            file.write(json.dumps(row | ({"stop": stop} if stop else {})) + "\n")


def figures(calls: list[tuple[str, float]]) -> dict[str, Any]:
    """Return waits in milliseconds by pairs of kinds, and a digest that identifies the schedule."""
    waits: dict[str, list[float]] = defaultdict(list)
    kinds = [name.split()[0] for name, _ in calls]
    for before, after, (_, seconds) in zip(kinds, kinds[1:], calls[1:], strict=False):
        waits[f"{before}, {after}"].append(seconds * 1e3)
    names = "\n".join(name for name, _ in calls)
    return {
        "calls": len(calls),
        "schedule": hashlib.sha256(names.encode()).hexdigest()[:16],
        "waits_ms": {
            pair: {
                "times": len(of_pair),
                "mean": statistics.mean(of_pair),
                "median": statistics.median(of_pair),
                "max": max(of_pair),
            }
            for pair, of_pair in sorted(waits.items())
        },
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the report as one table."""
    settings, machine = report["settings"], report["machine"]
    lines = [
        "# How long a device waits for the host",
        "",
        f"A simulated device whose calls take {settings['call_ms']} ms; {settings['slots']} slots, "
        f"{settings['steps']} steps a call, {settings['rows']} rows; {machine['processor']}, "
        f"{machine['cores']} cores. Made by `{report['command']}`.",
        "",
        "| job | calls before, after the wait | times | mean ms | median ms | longest ms |",
        "|---|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {name} | {pair} | {found['times']} | {found['mean']:.2f} | {found['median']:.2f} "
        f"| {found['max']:.2f} |"
        for name, job in report["jobs"].items()
        for pair, found in job["waits_ms"].items()
    ]
    return "\n".join(lines) + "\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=512, help="slots of the decode batch (512)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a decode call (8)")
    parser.add_argument("--rows", type=int, default=3000, help="rows of the job (3000)")
    parser.add_argument("--call-ms", type=float, default=50.0, help="milliseconds of a call (50)")
    parser.add_argument("--output", type=Path, help="JSON file; a table (.md) is written, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
