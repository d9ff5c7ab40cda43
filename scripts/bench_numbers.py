"""Measure one job on this CPU in several formats of weights, activations and cache.

Every run is `noria batch` on the same 64 chat prompts with 64 greedy tokens each, in its own
process. Seconds are those of the job's manifest. The rates of single products of the model's MLP
tell where the differences come from. With a Python that has vLLM's CPU build, vLLM runs on the same
prompts in both dtypes, as in `bench_peers.py`. The record is written after each run, and a later
call continues it, so the script may be stopped at any time.

    python scripts/bench_numbers.py --work-dir build/bench --output benchmarks/numbers_cpu \\
        --python-vllm .venv-vllm/bin/python
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from engine_protocol import Job  # noqa: E402  (beside the engines, which stand alone)
from engine_runs import (  # noqa: E402
    Setting,
    export_weights,
    limit_threads,
    machine,
    python_with,
    read_rows,
    run_noria,
    run_peer,
)

PROMPTS = HERE.parent / "benchmarks" / "workloads" / "peers64.jsonl"
CASES = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16",),
    "float32, weights and activations in int8": ("float32", "weights=int8", "activations=int8"),
    "bfloat16, weights and activations in int8": ("bfloat16", "weights=int8", "activations=int8"),
    "float32, weights in int8": ("float32", "weights=int8"),
    "float32, cache in int8": ("float32", "cache=int8"),
    "bfloat16, cache in int8": ("bfloat16", "cache=int8"),
    "float32, again": ("float32",),
}
"""The dtype of each run, and its keys of `[numbers]`; the last run tells how much runs differ."""
PEERS = {"vLLM, float32": "float32", "vLLM, bfloat16": "bfloat16"}
"""The dtypes of vLLM's runs."""
PRODUCTS = {"float32": "float32", "bfloat16": "float32", "int8": "int32"}
"""The dtypes of the inputs of products, and of their results."""
SHAPES = {"prefill": (352, 576, 3072), "decode": (64, 576, 3072)}
"""Tokens, input features and output features of gate and up of SmolLM2-135M."""
REPEATS = 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", type=Path, required=True, help="for weights and job files")
    parser.add_argument("--output", type=Path, required=True, help="path without .json and .md")
    choices = (*CASES, *PEERS)
    parser.add_argument("--case", choices=choices, help="the only run to make; by default all")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="batch file of chat prompts")
    parser.add_argument("--python-vllm", help="a Python with vllm (default: this one)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    work, path = options.work_dir.resolve(), options.output.with_suffix(".json")
    report: dict[str, Any] = {"cases": {}}
    if path.exists():
        report = json.loads(path.read_text("utf-8"))
    environment = limit_threads(options.threads)
    export_weights(None, work)
    rows = read_rows(options.prompts, work / "hf")
    report["machine"] = machine() | {"threads": options.threads}
    report["prompts"] = [len(prompt) for prompt in rows.prompts]
    report.setdefault("products", product_rates())
    vllm = options.python_vllm or python_with("vllm")
    for name in (*CASES, *(PEERS if vllm else ())):
        if options.case not in (None, name) or name in report["cases"]:
            continue
        if name in CASES:
            dtype, *numbers = CASES[name]
            sets = [word for key in numbers for word in ("--set", f"numbers.{key}")]
            run = run_noria(rows, ["--dtype", dtype, *sets], work, environment)
        else:
            assert vllm is not None, "no peer runs without a Python"
            setting = Setting("vllm", vllm, work / "hf", PEERS[name], {"dtype": PEERS[name]})
            limits = rows.max_tokens, options.threads, setting.options
            run = run_peer(setting, Job(str(work / "hf"), rows.prompts, *limits), work, environment)
        report["cases"][name] = found = facts(run)
        report["versions"] = report.get("versions", {}) | run["versions"]
        print(name, found, flush=True)
        keep(report, options.output)
    keep(report, options.output)


def keep(report: dict[str, Any], path: Path) -> None:
    """Write the record as JSON and as a page."""
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


def product_rates() -> dict[str, dict[str, float]]:
    """Return the best rates of products in 10^9 operations a second, by dtype and phase."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    rates: dict[str, dict[str, float]] = {}
    for dtype, out in PRODUCTS.items():
        for phase, (M, D, F) in SHAPES.items():
            x_MD, weight_DF = jnp.ones((M, D), dtype), jnp.ones((D, F), dtype)
            multiply = jax.jit(jnp.dot, static_argnames="preferred_element_type")
            seconds = []
            for _ in range(REPEATS):
                started = time.perf_counter()
                multiply(x_MD, weight_DF, preferred_element_type=out).block_until_ready()
                seconds.append(time.perf_counter() - started)
            rates.setdefault(dtype, {})[phase] = round(2 * M * D * F / min(seconds) / 1e9)
    return rates


def facts(run: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run for the record; other engines report no seconds of phases."""
    phases = run["manifest"]["generator"]["phases"] if "manifest" in run else {}
    seconds = {
        "load_seconds": run["load_seconds"],
        "build_seconds": run["warm_up_seconds"],
        "run_seconds": run["generation_seconds"],
        **{key: phases[key] for key in ("prefill_seconds", "decode_seconds") if key in phases},
    }
    return {
        **{key: round(value, 2) for key, value in seconds.items()},
        "output_tokens_per_second": round(run["output_tokens_per_second"], 2),
        "cores_busy_elsewhere": run["cores_busy_elsewhere"],
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the record as a Markdown page."""
    here, versions, prompts = report["machine"], report["versions"], report["prompts"]
    lines = [
        "# A job on a CPU in several numbers",
        "",
        f"{here['processor']}, {here['threads']} threads, {' '.join(here['instructions'])}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "Made by `python scripts/bench_numbers.py --work-dir build/bench "
        "--output benchmarks/numbers_cpu`.",
        "",
        f"SmolLM2-135M, {len(prompts)} chat prompts of {min(prompts)}-{max(prompts)} tokens, 64 "
        "greedy tokens each. Seconds of a run "
        "begin when all",
        "graphs are built. The last column is the number of cores that other processes used.",
        "",
        "| numbers | output tokens/s | run s | prefill s | decode s | load s | build s | busy |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|",
        *(row(name, case) for name, case in report["cases"].items()),
        "",
        "The last noria run builds no executables, because the first run kept them."
        + " vLLM compiles while it loads, and its seconds of building are those of a warm-up."
        * any(name in PEERS for name in report["cases"]),
        "",
        "Rates of XLA's products alone, as of gate and up of this model, in 10^9 operations a "
        "second:",
        "",
        f"| inputs | {' | '.join(f'{M} tokens' for M, _, _ in SHAPES.values())} |",
        "|:--|" + "--:|" * len(SHAPES),
        *(
            f"| {dtype} | {' | '.join(f'{rate:.0f}' for rate in rates.values())} |"
            for dtype, rates in report["products"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def row(name: str, case: dict[str, Any]) -> str:
    """Return the line of a run."""
    phases = ("run", "prefill", "decode", "load", "build")
    seconds = [f"{phase}_seconds" for phase in phases]
    cells = [
        name,
        f"{case['output_tokens_per_second']:.0f}",
        *("" if case.get(key) is None else f"{case[key]:.1f}" for key in seconds),
        f"{case['cores_busy_elsewhere']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
