"""Measure the seconds from a start to the first token, with compilation and from a bundle.

Every start is a new process, timed from before its creation until the first token of a prompt is on
the host. A cold start finds an empty compile cache. Model files, sources and bundles were read
before, so they come from the system's page cache. The cold starts alternate with the first starts
from the bundle. The median of each kind counts.

    noria plan --model smollm2 --workload benchmarks/workloads/peers64.jsonl -o peers64.toml
    python scripts/bench_start.py peers64.toml --work-dir build --prepare
    python scripts/bench_start.py peers64.toml --work-dir build --output benchmarks/bundle_start

A plan replaces its earlier result in the output; the results of other plans stay.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from noria.runtime.devices.machine import describe_machine

FIRST_TOKEN = """
import sys, time
model, plan = sys.argv[1:]
from noria.runtime import LLM, SamplingParams
llm = LLM(model=model, plan=plan)
ready = time.time()
llm.generate([1, 2, 3], SamplingParams(max_tokens=1))
print(ready, time.time())
"""
COLD, BUNDLE = "cold", "bundle"
TITLES = ("plan", "graphs", COLD, BUNDLE, "share")


def main() -> None:
    options = _parse()
    work = options.work_dir / options.plan.stem
    sources = {COLD: options.plan, BUNDLE: work / "bundle"}
    if options.prepare:
        _compile(options.model, options.plan, sources[BUNDLE])
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for number in range(options.repeat):
        for name, source in sources.items():
            if name != COLD or number < options.repeat_cold:
                runs[name].append(_start(options.model, source))
                print(name, runs[name][-1], file=sys.stderr, flush=True)
    _record(options, runs, sources[BUNDLE])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time starts to the first token.")
    add = parser.add_argument
    add("plan", type=Path)
    add("--model", default="smollm2")
    add("--work-dir", type=Path, required=True, help="folder for bundles")
    add("--prepare", action="store_true", help="make the bundle, measure nothing")
    add("--output", type=Path, help="path without suffix of .json and .md")
    add("--repeat", type=int, default=3, help="starts from the bundle")
    add("--repeat-cold", type=int, default=1, help="cold starts, at most as many as --repeat")
    options = parser.parse_args()
    if not options.prepare and options.output is None:
        parser.error("--output: expected where to write, or --prepare.")
    return options


def _compile(model: str, plan: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = "import sys; from noria.runtime.cli import main; sys.exit(main())"
    arguments = ["compile", "--model", model, "--plan", plan, "-o", folder]
    subprocess.run([sys.executable, "-c", command, *map(str, arguments)], check=True)


def _start(model: str, plan: Path) -> dict[str, float]:
    """Start a process; return the seconds until it is ready, and until it has a token."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", FIRST_TOKEN, model, str(plan)]
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        started = time.time()
        said = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    ready, first_token = map(float, said.split())
    return {"ready": round(ready - started, 2), "first_token": round(first_token - started, 2)}


def _record(
    options: argparse.Namespace, runs: dict[str, list[dict[str, float]]], bundle: Path
) -> None:
    path = options.output.with_suffix(".json")
    found = json.loads(path.read_text()) if path.exists() else {"plans": {}}
    graphs = json.loads((bundle / "bundle.json").read_text())["graphs"]
    found["machine"] = describe_machine()
    found["plans"][options.plan.stem] = {
        "model": options.model,
        "buckets": tomllib.loads(options.plan.read_text())["buckets"],
        "graphs": len(graphs),
        "compile_seconds_of_graphs": round(sum(g["compile_seconds"] for g in graphs.values()), 1),
        "median_seconds": {name: _median(starts) for name, starts in runs.items()},
        "runs": runs,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(_table(found))


def _median(runs: list[dict[str, float]]) -> float:
    return statistics.median(run["first_token"] for run in runs)


def _table(found: dict[str, Any]) -> str:
    machine = found["machine"]
    lines = [
        "# Start to first token",
        "",
        f"Seconds from starting a process to the first token of a prompt; {machine['processor']}, "
        f"{machine['cores']} cores, jax {machine['versions']['jax']}. Medians; shares are of the "
        "cold start, which finds an empty compile cache. Model files and bundles come from the "
        "page cache. Made by `scripts/bench_start.py`.",
        "",
        f"| {' | '.join(TITLES)} |",
        f"|---|{'--:|' * (len(TITLES) - 1)}",
    ]
    for name, plan in found["plans"].items():
        cold, bundle = plan["median_seconds"].values()
        cells = [
            name,
            plan["graphs"],
            f"{cold:.1f}",
            f"{bundle:.1f}",
            f"{bundle / cold:.2f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Buckets:", ""]
    for name, plan in found["plans"].items():
        lines.append(f"- {name}: `{json.dumps(plan['buckets'])}`")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
