"""Compare noria with transformers, vLLM's CPU build and llama.cpp: same weights, same prompts.

Every engine gets the float32 weights of one GGUF file, the token ids of the same chat prompts and
the same number of threads. It makes exactly `max_tokens` greedy ids a prompt, in its own process;
the engines run one after the other. noria, transformers and vLLM run in float32 and in bfloat16.
transformers and llama.cpp run in several settings, and the best of each counts. llama.cpp
also reads the quantised file itself, as its users would.

The measure is output tokens a second of generation. Loading, warming up and compiling are reported
separately: noria's `run_seconds` begin when every graph is built, as the peers' clocks begin after
their own warm-up. The number of cores that other processes kept busy during a run is reported, too:
if it is more than a few hundredths, a ratio of two runs means little.

    python scripts/bench_peers.py --work-dir build/bench --output benchmarks/peers.json \\
        --python-vllm .venv-vllm/bin/python --python-llamacpp .venv-llamacpp/bin/python
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from itertools import chain, cycle, islice
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from engine_protocol import Job  # noqa: E402  (beside the engines, which stand alone)
from engine_runs import (  # noqa: E402
    Rows,
    Setting,
    check_run,
    export_weights,
    limit_threads,
    machine,
    python_with,
    read_rows,
    run_noria,
    run_peer,
    summary,
)

PROMPTS = HERE.parent / "benchmarks" / "workloads" / "peers64.jsonl"
SHORTEST_PROMPT, LONGEST_PROMPT = 50, 400
LONG_ROWS, LONG_PROMPT = 32, 2000
DTYPES = "float32", "bfloat16"


def main() -> None:
    arguments = _parse_arguments()
    work = arguments.work_dir.resolve()
    environment = limit_threads(arguments.threads)
    source = export_weights(arguments.gguf, work)
    rows = read_rows(PROMPTS, work / "hf")
    _check_lengths(rows.prompts)
    if arguments.long:
        rows = _long_rows(rows, work)

    ceiling = _matmul_ceiling(arguments.threads, environment)
    print(f"{machine()['processor']}, {arguments.threads} threads; products: {ceiling} GFLOP/s")
    runs = []
    if "noria" in arguments.engines:
        for dtype in arguments.dtypes:
            options = ["--dtype", dtype, *arguments.noria_option]
            runs.append(run_noria(rows, options, work, environment))
            print(summary(runs[-1]), flush=True)
    longest = max(map(len, rows.prompts)) + max(rows.max_tokens)
    for setting in _settings(arguments, work, Path(source), longest):
        threads, options = arguments.threads, setting.options
        job = Job(str(setting.model), rows.prompts, rows.max_tokens, threads, options)
        runs.append(run_peer(setting, job, work, environment))
        print(summary(runs[-1]), flush=True)

    report = _report(runs, ceiling, work / "hf", rows.prompts)
    print(f"\n{_table(report)}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engines = ["noria", "transformers", "vllm", "llamacpp"]
    parser.add_argument("--work-dir", type=Path, required=True, help="for weights and job files")
    parser.add_argument("--output", type=Path, help="raw results as JSON")
    parser.add_argument("--gguf", help="a SmolLM2 GGUF file; default: the embedded model's")
    parser.add_argument("--python-vllm", help="a Python with vllm")
    parser.add_argument("--python-llamacpp", help="a Python with llama_cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--long", action="store_true", help=f"{LONG_ROWS} prompts of {LONG_PROMPT} tokens instead"
    )
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument(
        "--noria-option", action="append", default=[], help="an option for `noria batch`"
    )
    return parser.parse_args()


def _check_lengths(prompts: list[list[int]]) -> None:
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) < SHORTEST_PROMPT or max(lengths) > LONGEST_PROMPT:
        sys.exit(f"{PROMPTS.name}: expected 50 to 400 tokens, got {min(lengths)}-{max(lengths)}.")


def _long_rows(rows: Rows, work: Path) -> Rows:
    """Long prompts, made of the tokens of all prompts from another one on each."""
    tokens = list(chain.from_iterable(rows.prompts))
    prompts = []
    for number in range(LONG_ROWS):
        first = number * len(tokens) // LONG_ROWS
        prompts.append(list(islice(cycle(tokens), first, first + LONG_PROMPT)))
    max_tokens, path = rows.max_tokens[:LONG_ROWS], work / "long.jsonl"
    bodies = [
        {"prompt": prompt, "max_tokens": number, "temperature": 0, "ignore_eos": True}
        for prompt, number in zip(prompts, max_tokens, strict=True)
    ]
    with path.open("w", encoding="utf-8") as file:
        for number, body in enumerate(bodies):
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(row | {"body": body}) + "\n")
    return Rows(path, prompts, max_tokens)


def _settings(
    arguments: argparse.Namespace, work: Path, source: Path, longest: int
) -> list[Setting]:
    """Return the settings to measure, for each installed peer and rows of a longest length."""
    pythons = {
        "transformers": sys.executable,
        "vllm": arguments.python_vllm or python_with("vllm"),
        "llamacpp": arguments.python_llamacpp or python_with("llama_cpp"),
    }
    tries = [
        *(
            ("transformers", work / "hf", dtype, {"batch_size": n, "dtype": dtype})
            for dtype in arguments.dtypes
            for n in (8, 16, 32, 64)
        ),
        *(
            ("vllm", work / "hf", dtype, {"dtype": dtype, "max_model_len": max(1024, longest)})
            for dtype in arguments.dtypes
        ),
        *(
            ("llamacpp", path, weights, {"slots": slots})
            for path, weights in ((work / "model-f32.gguf", "float32"), (source, source.stem))
            for slots in (16, 32, 64)
        ),
    ]
    settings = []
    for engine, model, weights, options in tries:
        python = pythons[engine]
        if engine in arguments.engines and python:
            settings.append(Setting(engine, python, model, weights, options))
    for engine in pythons:
        if engine in arguments.engines and not pythons[engine]:
            print(f"{engine}: not installed here; give --python-{engine}")
    return settings


def _matmul_ceiling(num_threads: int, environment: dict[str, str]) -> dict[str, float]:
    script = str(HERE / "peers" / "matmul_ceiling.py")
    output = check_run([sys.executable, script, str(num_threads)], environment)
    return json.loads(output)


def _report(runs: list[dict], ceiling: dict, directory: Path, prompts: list[list[int]]) -> dict:
    """Return all measurements and the machine; ids are compared as texts, and left out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    for run in runs:
        if "token_ids" in run:
            run["texts"] = tokenizer.batch_decode(run.pop("token_ids"), skip_special_tokens=True)
    reference = next((run["texts"] for run in runs if run["engine"] == "transformers"), None)
    rows = len(prompts)
    for run in runs:
        texts = run.pop("texts")
        if reference:
            same = sum(a == b for a, b in zip(texts, reference, strict=True))
            run["rows_equal_to_transformers"] = f"{same}/{rows}"
        flops = _useful_flops(directory, prompts, run["output_tokens"])
        reached = flops / run["generation_seconds"] / 1e9
        run["useful_gflops_per_second"] = round(reached, 1)
        run["fraction_of_ceiling"] = round(reached / max(ceiling.values()), 3)
        run["output_tokens_per_second"] = round(run["output_tokens_per_second"], 1)
    return {
        "command": " ".join(["python", *map(str, sys.argv)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "matmul_gflops_per_second": ceiling,
        "prompts": {"rows": rows, "tokens": sum(map(len, prompts))},
        "runs": runs,
    }


def _useful_flops(directory: Path, prompts: list[list[int]], output_tokens: int) -> float:
    """Return the least flops of products with weights: no padding, attention or repetition."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    embed, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    attention = 2 * embed * head_dim * (heads + kv_heads)
    layer = attention + 3 * embed * config["intermediate_size"]
    # the last id of a row is an output that is not an input of any step
    fed_tokens = sum(map(len, prompts)) + output_tokens - len(prompts)
    logits = embed * config["vocab_size"] * output_tokens
    return 2.0 * (layer * config["num_hidden_layers"] * fed_tokens + logits)


def _table(report: dict) -> str:
    """Return a Markdown table of every run, with the ratio of noria's best run in its dtype."""
    runs = report["runs"]
    ours = {
        dtype: max(
            run["output_tokens_per_second"]
            for run in runs
            if run["engine"] == "noria" and dtype in run["setting"]
        )
        for dtype in DTYPES
        if any(run["engine"] == "noria" and dtype in run["setting"] for run in runs)
    }
    lines = [
        "| run | output tokens/s | noria / it | of ceiling | generation s | load s "
        "| warm-up or compile s | rows as transformers | cores busy elsewhere |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in sorted(runs, key=lambda run: -run["output_tokens_per_second"]):
        speed = run["output_tokens_per_second"]
        dtype = "bfloat16" if "bfloat16" in run["setting"] else "float32"
        ratio = f"{ours[dtype] / speed:.2f}" if dtype in ours else "-"
        lines.append(
            f"| {run['setting']} | {speed:.1f} | {ratio} | {run['fraction_of_ceiling']:.0%} "
            f"| {run['generation_seconds']:.1f} | {run['load_seconds']:.1f} "
            f"| {run['warm_up_seconds']:.1f} | {run.get('rows_equal_to_transformers', '-')} "
            f"| {run['cores_busy_elsewhere']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
