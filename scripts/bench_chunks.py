"""Padding of prompts of random lengths: chunks against ladders of whole-prompt buckets.

Runs the same job, prompts of 1 to 12288 tokens through a tiny random model, under one plan each,
and reads what was computed from the manifests of the runs.

Example: python scripts/bench_chunks.py --work-dir build/chunks --output benchmarks/chunks
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LONGEST = 12288
VOCAB, EMBED, MLP, HEADS, HEAD_DIM = 64, 16, 16, 2, 8
SPANS = [4096, 8192, LONGEST]
LADDERS = {
    "ladder": [2048, 4096, 10240, LONGEST],
    "powers of two": [*(2**k for k in range(7, 14)), LONGEST],
}
PLAN = """\
schema = 1
target = "cpu"

[model]
source = "tiny"
fingerprint = ""
dtype = "float32"

[buckets]
max_length = {max_length}
prefill = {prefill}
decode_slots = 4
decode_spans = {spans}
{chunk}
"""


def main() -> None:
    """Write model, job and plans, run every plan, write the table."""
    options = _parse()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    model = options.work_dir / "tiny"
    write_model(model)
    source = write_job(options.work_dir / "in.jsonl", options.prompts)
    rows = [run(options.work_dir, model, source, name, text) for name, text in plans().items()]
    report = {"prompts": options.prompts, "longest": LONGEST, "runs": rows}
    options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    options.output.with_suffix(".md").write_text(table(report), "utf-8")
    print(table(report))


def plans() -> dict[str, str]:
    """A plan's text by its name; every call has one row, so no row is a dummy."""
    found = {}
    for chunk in (128, 256, 512):
        found[f"chunks of {chunk}"] = _plan(SPANS, [*SPANS, LONGEST + 16], f"chunk = {chunk}")
    for name, lengths in LADDERS.items():
        found[name] = _plan(lengths, [lengths[-1] + 16], "")
    return found


def _plan(lengths: list[int], spans: list[int], chunk: str) -> str:
    prefill = [[length, 1] for length in lengths]
    return PLAN.format(max_length=spans[-1], prefill=prefill, spans=spans, chunk=chunk)


def run(work_dir: Path, model: Path, source: Path, name: str, plan: str) -> dict[str, Any]:
    """One row of the table, from the manifest of a run."""
    stem = name.replace(" ", "-")
    plan_path, output = work_dir / f"{stem}.toml", work_dir / f"{stem}.jsonl"
    plan_path.write_text(plan, "utf-8")
    command = "import sys; from noria.runtime.cli import main; sys.exit(main())"
    arguments = ["-i", source, "-o", output, "--model", model, "--plan", plan_path]
    arguments += ["--restart", "--quiet"]
    subprocess.run(
        [sys.executable, "-c", command, "batch", *map(str, arguments)], check=True, timeout=3600
    )
    manifest = json.loads(output.with_name(f"{output.name}.manifest.json").read_text("utf-8"))
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


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        "# Padding of prompts of random lengths",
        "",
        f"{report['prompts']} prompts of 1 to {report['longest']} tokens, lengths uniform, through "
        "a tiny random model: what prefill computed, from the manifests of the runs. Every call "
        "has one row. `python scripts/bench_chunks.py --work-dir build/chunks --output "
        "benchmarks/chunks` repeats it.",
        "",
        "| prompts in | graphs | calls | prompt tokens | computed tokens | padding |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in report["runs"]:
        numbers = [f"{row[key]:,}" for key in ("graphs", "calls", "real_tokens", "computed_tokens")]
        lines.append(f"| {row['plan']} | {' | '.join(numbers)} | {row['waste']:.1%} |")
    return "\n".join(lines) + "\n"


def write_job(path: Path, count: int) -> Path:
    """Prompts of token ids, the same for every machine."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, LONGEST))]
            file.write(json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}) + "\n")
    return path


def write_model(directory: Path) -> None:
    """A random Llama of one layer, as a hub would publish it; it has no tokenizer."""
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
    parser.add_argument("--work-dir", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--output", type=Path, required=True, help="table and figures, no suffix")
    parser.add_argument("--prompts", type=int, default=128, help="rows of the job (default: 128)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
