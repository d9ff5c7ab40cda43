"""Compare rows that ask for JSON with the same rows without forms, and with vLLM's CPU build.

200 chat rows ask for the JSON schemas of `structured_rows.py` in turn, half of them greedy and half
at temperature 1, in three runs: noria, noria without the schemas, and vLLM with the same schemas.
Answers with a schema are checked by the package `jsonschema`. An answer that `max_tokens` cuts is
not valid. noria's measures are milliseconds of a decode step, and output tokens a second.

    python scripts/bench_structured.py --work-dir build/structured \\
        --output benchmarks/structured --python-vllm .venv-vllm/bin/python
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

from engine_runs import (  # noqa: E402  (beside the engines, which stand alone)
    export_weights,
    limit_threads,
    machine,
    read_rows,
    run_alone,
)
from structured_rows import FORMS, is_valid  # noqa: E402

SCHEMAS = {name: form for name, form in FORMS.items() if "json" in form}


def main() -> None:
    options = _parse()
    work = options.work_dir.resolve()
    environment = limit_threads(options.threads)
    export_weights(None, work)
    names = [*islice(cycle(SCHEMAS), options.rows)]
    runs = []
    for label, has_forms in (("noria", True), ("noria, without schemas", False)):
        path = work / f"{'with' if has_forms else 'without'}_forms.jsonl"
        path.write_text("".join(_lines(names, options.max_tokens, has_forms)), encoding="utf-8")
        runs.append({"run": label} | _noria(path, names, options, environment))
        print(_summary(runs[-1]), flush=True)
    if options.python_vllm:
        runs.append({"run": "vLLM"} | _vllm(work, names, options, environment))
        print(_summary(runs[-1]), flush=True)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": options.threads,
        "dtype": options.dtype,
        "rows": options.rows,
        "schemas": len(SCHEMAS),
        "max_tokens": options.max_tokens,
        "runs": runs,
    }
    print(f"\n{page(report)}")
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(page(report))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="for weights and job files")
    add("--output", type=Path, help="results: this path with .json and .md")
    add("--rows", type=int, default=200)
    add("--max-tokens", type=int, default=160)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--threads", type=int, default=2)
    add("--python-vllm", help="a Python with vllm; without it, only noria runs")
    add("--vllm-slots", type=int, default=64, help="rows at once in vLLM")
    return parser.parse_args()


def _lines(names: list[str], max_tokens: int, has_forms: bool) -> list[str]:
    """The rows of a batch file; odd rows have temperature 1."""
    lines = []
    for row, name in enumerate(names):
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": f"Example {row} as JSON: {name}"}],
            "max_tokens": max_tokens,
            "temperature": row % 2,
            "seed": row,
        }
        if has_forms:
            body["structured_outputs"] = SCHEMAS[name]
        url = "/v1/chat/completions"
        line = {"custom_id": f"row-{row}", "method": "POST", "url": url, "body": body}
        lines.append(json.dumps(line) + "\n")
    return lines


def _noria(
    path: Path, names: list[str], options: argparse.Namespace, environment: dict[str, str]
) -> dict[str, Any]:
    output = path.with_suffix(".out.jsonl")
    for stale in path.parent.glob(f"{output.name}*"):
        stale.unlink()
    noria = Path(sys.executable).with_name("noria")
    command = [noria, "batch", "-i", path, "-o", output, "--model", path.parent / "hf"]
    _, busy = run_alone([*command, "--dtype", options.dtype], environment)
    manifest = json.loads(Path(f"{output}.manifest.json").read_text(encoding="utf-8"))
    lines = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    choices = [line["response"]["body"]["choices"][0] for line in lines]
    decode = manifest["generator"]["buckets"]["decode"].values()
    steps, seconds = (sum(use[key] for use in decode) for key in ("steps", "seconds"))
    num_tokens = sum(use["emitted_tokens"] for use in decode)
    return {
        "ms_per_decode_step": round(1000 * seconds / steps, 2),
        "steps_per_call": steps // sum(use["calls"] for use in decode),
        "output_tokens": num_tokens,
        "output_tokens_per_second": round(num_tokens / manifest["run_seconds"], 1),
        "run_seconds": manifest["run_seconds"],
        "scan_and_build_seconds": round(manifest["scan_seconds"] + manifest["build_seconds"], 1),
        "valid": _num_valid(
            names, [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]
        ),
        "cores_busy_elsewhere": busy,
    }


def _vllm(
    work: Path, names: list[str], options: argparse.Namespace, environment: dict[str, str]
) -> dict[str, Any]:
    job, result = work / "forms_job.json", work / "forms_result.json"
    content = {
        "model": str(work / "hf"),
        "prompts": read_rows(work / "with_forms.jsonl", work / "hf").prompts,
        "forms": [SCHEMAS[name] for name in names],
        "temperatures": [row % 2 for row in range(len(names))],
        "max_tokens": options.max_tokens,
        "num_threads": options.threads,
        "options": {
            "dtype": options.dtype,
            "max_model_len": 1024,
            "max_num_seqs": options.vllm_slots,
        },
    }
    job.write_text(json.dumps(content), encoding="utf-8")
    engine = HERE / "peers" / "vllm_forms_engine.py"
    _, busy = run_alone([options.python_vllm, engine, job, result], environment)
    found = json.loads(result.read_text(encoding="utf-8"))
    answers = [*zip(found["texts"], found["finish_reasons"], strict=True)]
    return {
        "output_tokens": found["output_tokens"],
        "output_tokens_per_second": round(found["output_tokens"] / found["generation_seconds"], 1),
        "run_seconds": found["generation_seconds"],
        "load_seconds": found["load_seconds"],
        "valid": _num_valid(names, answers),
        "cut": found["finish_reasons"].count("length"),
        "versions": found["versions"],
        "cores_busy_elsewhere": busy,
    }


def _num_valid(names: list[str], answers: list[tuple[str, str]]) -> int:
    """Count the answers that ended by themselves and that the validator accepts."""
    valid = 0
    for name, (text, finish_reason) in zip(names, answers, strict=True):
        try:
            valid += finish_reason == "stop" and is_valid(FORMS[name], text)
        except ValueError:
            continue
    return valid


def _summary(run: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in run.items())


def page(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    with_forms, without, *others = report["runs"]
    ratio = with_forms["ms_per_decode_step"] / without["ms_per_decode_step"]
    lines = [
        "# Rows that ask for JSON",
        "",
        f"Made by `scripts/bench_structured.py`: {report['rows']} rows with "
        f"{report['schemas']} schemas, at most {report['max_tokens']} tokens each, "
        f"{report['dtype']}, {report['machine']['processor']}, {report['threads']} threads, "
        f"{report['date']}.",
        "",
        "| run | valid answers | ms a decode step | output tokens | output tokens/s "
        "| generation s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for run in report["runs"]:
        has_schemas = run is not without
        lines.append(
            f"| {run['run']} | {run['valid'] if has_schemas else '-'} "
            f"| {run.get('ms_per_decode_step', '-')} | {run['output_tokens']:,} "
            f"| {run['output_tokens_per_second']} | {run['run_seconds']:.1f} |"
        )
    lines += ["", f"A decode step with schemas takes {ratio:.2f} of the time without."]
    for run in others:
        speed = with_forms["output_tokens_per_second"] / run["output_tokens_per_second"]
        lines.append(
            f"noria makes {speed:.2f} times the tokens a second of {run['run']} "
            f"{run['versions']['vllm']}, which cut {run['cut']} answers at `max_tokens`."
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
