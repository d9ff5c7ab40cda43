"""Compare chunked prefill with whole-prompt buckets: their padding and their speed.

`padding` runs prompts of 1 to 12288 tokens through a tiny random model, once for each plan, and
reads the computed tokens from the manifests. `speed` runs the 64 prompts of the main benchmark
through the embedded model, with whole-prompt buckets and with chunks alternately, one process at a
time. The machine should be idle otherwise. A run of only one measurement keeps the results of the
other in the output.

Example: python scripts/bench_chunks.py padding speed --work-dir build/chunks \
             --output benchmarks/chunks
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from noria.runtime.devices.machine import describe_machine

LONGEST = 12288
VOCAB, EMBED, MLP, HEADS, HEAD_DIM = 64, 16, 16, 2, 8
LADDERS = {
    "ladder": [2048, 4096, 10240, LONGEST],
    "powers of two": [*(2**k for k in range(7, 14)), LONGEST],
}
PLAN = """\
schema = 3
target = "cpu"

[model]
source = "{model}"
fingerprint = ""

[numbers]
dtype = "float32"

[buckets]
max_length = {max_length}
prefill = {prefill}
decode_slots = {slots}
{chunk}
"""

PEER_PROMPTS = Path("benchmarks/workloads/peers64.jsonl")
CHUNKS_OF_64 = PLAN.format(
    model="smollm2",
    max_length=464,
    prefill=[[464, 4]],
    slots=64,
    chunk="chunk = 64\nchunks_per_decode = 256",
)


def main() -> None:
    """Run the requested measurements, and write them with the earlier ones."""
    options = _parse()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    path = options.output.with_suffix(".json")
    report = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if "padding" in options.measure:
        report["padding"] = measure_padding(options.work_dir, options.prompts)
    if "speed" in options.measure:
        report["speed"] = measure_speed(options.work_dir, options.turns)
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    options.output.with_suffix(".md").write_text(page(report), "utf-8")
    print(page(report))


def measure_padding(work_dir: Path, prompts: int) -> dict[str, Any]:
    """Make a model and a job, and run the job under each plan."""
    model = work_dir / "tiny"
    write_model(model)
    source = write_job(work_dir / "in.jsonl", prompts)
    rows = [padding_of(work_dir, model, source, name, text) for name, text in plans().items()]
    return {"prompts": prompts, "longest": LONGEST, "runs": rows}


def measure_speed(work_dir: Path, turns: int) -> dict[str, Any]:
    """Run whole-prompt buckets and chunks alternately, so that a drift in speed affects both."""
    kinds = {"ladder, as derived": None, "chunks of 64, 4 rows": CHUNKS_OF_64}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, plan in kinds.items():
            manifest = run(work_dir, "smollm2", PEER_PROMPTS, name, plan)
            phases = manifest["generator"]["phases"]
            runs[name].append(
                {key: manifest[key] for key in ("run_seconds", "output_tokens_per_second")}
                | {key: phases[key] for key in ("prefill_seconds", "decode_seconds")}
            )
    return {"machine": describe_machine(), "turns": turns, "runs": runs}


def plans() -> dict[str, str]:
    """Return the text of each plan by name. Every call has one row, so there is no dummy row."""
    longest, found = LONGEST + 16, {}
    for chunk in (128, 256, 512):
        found[f"chunks of {chunk}"] = _plan([longest], longest, f"chunk = {chunk}")
    for name, lengths in LADDERS.items():
        found[name] = _plan(lengths, longest, "")
    return found


def _plan(lengths: list[int], max_length: int, chunk: str) -> str:
    prefill = [[length, 1] for length in lengths]
    return PLAN.format(model="tiny", max_length=max_length, prefill=prefill, slots=4, chunk=chunk)


def run(
    work_dir: Path, model: Path | str, source: Path, name: str, plan: str | None
) -> dict[str, Any]:
    """Run a job under a plan, or under the derived plan for None; return its manifest."""
    stem = re.sub(r"\W+", "-", name)
    output = work_dir / f"{stem}.jsonl"
    arguments = ["-i", source, "-o", output, "--model", model, "--restart", "--quiet"]
    if plan is not None:
        plan_path = work_dir / f"{stem}.toml"
        plan_path.write_text(plan, "utf-8")
        arguments += ["--plan", plan_path]
    command = "import sys; from noria.runtime.cli import main; sys.exit(main())"
    subprocess.run(
        [sys.executable, "-c", command, "batch", *map(str, arguments)], check=True, timeout=3600
    )
    return json.loads(output.with_name(f"{output.name}.manifest.json").read_text("utf-8"))


def padding_of(work_dir: Path, model: Path, source: Path, name: str, plan: str) -> dict[str, Any]:
    """Run one plan, and return its row of the table."""
    manifest = run(work_dir, model, source, name, plan)
    used = manifest["generator"]["buckets"]["prefill"].values()
    real, computed = (sum(use[key] for use in used) for key in ("real_tokens", "computed_tokens"))
    return {
        "plan": name,
        "graphs": len(used),
        "calls": sum(use["calls"] for use in used),
        "real_tokens": real,
        "computed_tokens": computed,
        "waste": 1 - real / computed,
    }


def page(report: dict[str, Any]) -> str:
    """Return the Markdown page for the measurements in a report."""
    lines = ["# Chunks and whole prompts", "", "Made by `scripts/bench_chunks.py`.", ""]
    if "padding" in report:
        lines += padding_table(report["padding"])
    if "speed" in report:
        lines += speed_table(report["speed"])
    return "\n".join(lines).rstrip() + "\n"


def padding_table(found: dict[str, Any]) -> list[str]:
    """Return the table of padding, with a line for each plan."""
    lines = [
        "## Padding",
        "",
        f"{found['prompts']} prompts of 1 to {found['longest']} tokens, lengths uniform, through a "
        "tiny random model: what prefill computed, from the manifests of the runs. Every call has "
        "one row.",
        "",
        "| prompts in | graphs | calls | prompt tokens | computed tokens | padding |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["runs"]:
        numbers = [f"{row[key]:,}" for key in ("graphs", "calls", "real_tokens", "computed_tokens")]
        lines.append(f"| {row['plan']} | {' | '.join(numbers)} | {row['waste']:.1%} |")
    return [*lines, ""]


def speed_table(found: dict[str, Any]) -> list[str]:
    """Return the table of speed: medians, and the throughput of every run."""
    machine = found["machine"]
    lines = [
        "## Speed",
        "",
        "The 64 chat prompts of the main benchmark (14,564 tokens), 64 greedy tokens each, "
        f"SmolLM2-135M in float32, {machine['processor']}, {machine['cores']} cores, jax "
        f"{machine['versions']['jax']}: {found['turns']} runs of each by turns; medians.",
        "",
        "| prompts in | output tokens/s | run s | prefill s | decode s | tokens/s of every run |",
        "|---|--:|--:|--:|--:|:--|",
    ]
    keys = ("output_tokens_per_second", "run_seconds", "prefill_seconds", "decode_seconds")
    for name, runs in found["runs"].items():
        medians = [f"{statistics.median(run[key] for run in runs):.1f}" for key in keys]
        every = " ".join(f"{run['output_tokens_per_second']:.1f}" for run in runs)
        lines.append(f"| {name} | {' | '.join(medians)} | {every} |")
    return [*lines, ""]


def write_job(path: Path, count: int) -> Path:
    """Write prompts of token ids, the same on every machine."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, LONGEST))]
            file.write(json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}) + "\n")
    return path


def write_model(directory: Path) -> None:
    """Write a random Llama of one layer in Hugging Face's format, without a tokenizer."""
    directory.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 2**15,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens": (VOCAB, EMBED),
        **{f"model.layers.0.self_attn.{x}_proj": (HEADS * HEAD_DIM, EMBED) for x in "qkv"},
        "model.layers.0.self_attn.o_proj": (EMBED, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj": (MLP, EMBED),
        "model.layers.0.mlp.up_proj": (MLP, EMBED),
        "model.layers.0.mlp.down_proj": (EMBED, MLP),
    }
    tensors = {
        f"{name}.weight": rng.normal(scale=0.3, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{norm}.weight"] = np.ones(EMBED, np.float32)
    save_file(tensors, directory / "model.safetensors")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measure", nargs="+", choices=("padding", "speed"))
    parser.add_argument("--work-dir", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--output", type=Path, required=True, help="path without suffix")
    parser.add_argument("--prompts", type=int, default=128, help="rows for padding (default: 128)")
    parser.add_argument("--turns", type=int, default=5, help="runs for speed (default: 5)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
