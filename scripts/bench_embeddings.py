"""Measure embeddings of texts of mixed lengths: padding, and texts per second beside transformers.

    pip install torch transformers    # needed for the comparison only
    python scripts/bench_embeddings.py --output benchmarks/embeddings.json
    python scripts/bench_embeddings.py --texts 500 --shapes minilm    # a quick run

The models have random weights in the shapes of MiniLM-L6 and BERT-base. Lengths are log-normal, as
those of published corpora: many short texts and a long tail. Both sides get the same token ids,
pool the mean and normalise. transformers runs as in sentence-transformers' `encode`: texts sorted
by length, 32 in a batch, each batch padded to its longest text. Each side runs once; compile time
is reported apart, and the vectors are compared. Runs of other shapes and dtypes that the output
already has stay in it.
"""

import argparse
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from noria.compile.plan import Numbers, PlannedModel
from noria.compile.targets import find_target
from noria.runtime import session
from noria.runtime.checkpoint import open_model
from noria.runtime.devices.machine import describe_machine
from noria.runtime.embedding.plan import embedding_plan
from noria.runtime.embedding.texts import pack, whole_text
from noria.runtime.request import Request, SamplingParams

SHAPES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
NUM_HEADS, MAX_LENGTH, REFERENCE_BATCH = 12, 512, 32
MODULES = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")


def main() -> None:
    options = _parse()
    lengths = mixed_lengths(options.texts)
    runs = [
        measure(shape, SHAPES[shape], lengths, dtype)
        for shape in options.shapes
        for dtype in options.dtypes
    ]
    if options.output is not None and options.output.exists():
        new = {(run["shape"], run["dtype"]) for run in runs}
        old = json.loads(options.output.read_text(encoding="utf-8"))["runs"]
        runs = [run for run in old if (run["shape"], run["dtype"]) not in new] + runs
    report = {"machine": describe_machine(), "runs": runs}
    print(markdown(report))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


def mixed_lengths(count: int) -> list[int]:
    """Return the lengths of texts: half of them have less than 67 tokens."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(4.2, 0.8, count).astype(int), 4, MAX_LENGTH).tolist()


def measure(shape: str, sizes: dict[str, int], lengths: list[int], dtype: str) -> dict[str, Any]:
    """Run both sides on one model; return padding, seconds and the largest difference."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder, sizes)
        rng = np.random.default_rng(1)
        texts = [rng.integers(5, model.config.vocab_size, n).tolist() for n in lengths]
        ours, facts = run_noria(folder, texts, dtype)
        theirs, seconds = run_transformers(model, texts, dtype)
    facts |= {
        "command": " ".join(["python", *sys.argv]),
        "shape": shape,
        "dtype": dtype,
        "texts": len(texts),
        "tokens": sum(lengths),
        "reference_seconds": seconds,
        "speed_ratio": seconds / facts["seconds"],
        "max_difference": float(np.abs(ours - theirs).max()),
    }
    return facts


def write_model(folder: Path, sizes: dict[str, int]) -> Any:
    """Write a random encoder with its module files; return the model of transformers."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(**sizes, num_attention_heads=NUM_HEADS, max_position_embeddings=MAX_LENGTH)
    model = BertModel(config).eval()
    model.save_pretrained(folder)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": p} for kind, p in MODULES]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return model


def run_noria(
    folder: Path, texts: list[list[int]], dtype: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the vectors, and padding and seconds of a run of all texts, longest first."""
    started = time.perf_counter()
    session.prepare_jax("cpu")
    target = find_target("cpu")
    with open_model(folder) as files:
        planned = PlannedModel("random", files.fingerprint())
        config, lengths = files.spec.config, list(map(len, texts))
        plan = embedding_plan(lengths, target.name, planned, Numbers(dtype), config, None)
        model = session.load_model(files, target, dtype)
    embedder = session.start_embedding(model, plan)
    params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
    built = time.perf_counter()
    vectors: dict[str, np.ndarray] = {}
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    waiting = iter(order)
    index = next(waiting, None)
    while index is not None or embedder.unfinished:
        while index is not None and embedder.wants_more:
            embedder.submit(Request(str(index), pack([whole_text(texts[index])]), params))
            index = next(waiting, None)
        embedder.receive()
        embedder.dispatch()
        for output in embedder.collect():
            assert output.vectors is not None, output.error
            vectors[output.request_id] = output.vectors[0]
    seconds = time.perf_counter() - built
    padding = embedder.statistics()["padding"]
    facts = {
        "graphs": len(plan.buckets.prefill),
        "build_seconds": built - started,
        "seconds": seconds,
        "texts_per_second": len(texts) / seconds,
        "padding_ratio": padding["computed_tokens"] / padding["real_tokens"],
    }
    return np.stack([vectors[str(i)] for i in range(len(texts))]), facts


def run_transformers(model: Any, texts: list[list[int]], dtype: str) -> tuple[np.ndarray, float]:
    """Return the vectors and the seconds of sorted, padded batches."""
    import torch

    model = model.to(getattr(torch, dtype))
    vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
    started = time.perf_counter()
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    with torch.inference_mode():
        for first in range(0, len(order), REFERENCE_BATCH):
            batch = order[first : first + REFERENCE_BATCH]
            ids = torch.zeros(len(batch), len(texts[batch[0]]), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(batch):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            states = model(ids, attention_mask=mask).last_hidden_state.float()
            mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            vectors[batch] = torch.nn.functional.normalize(mean, dim=-1).numpy()
    return vectors, time.perf_counter() - started


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a page with a table."""
    machine, versions = report["machine"], report["machine"]["versions"]
    commands = "\n".join(run["command"] for run in report["runs"])
    head = (
        f"# Embeddings beside transformers on a CPU\n\n{machine['processor']}, "
        f"{machine['cores']} cores, {' '.join(machine['instructions'])};\n"
        f"jax {versions['jax']}, torch {version('torch')}, transformers {version('transformers')}."
        " Made by these commands; the script's\ndocstring says what is measured.\n\n"
        f"```\n{commands}\n```\n\n"
        "| shape | dtype | texts | tokens | graphs | build s | padding | noria texts/s "
        "| transformers texts/s | ratio | largest difference |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    rows = [
        f"| {run['shape']} | {run['dtype']} | {run['texts']} | {run['tokens']} | {run['graphs']} "
        f"| {run['build_seconds']:.0f} | {run['padding_ratio']:.3f} "
        f"| {run['texts_per_second']:.1f} | {run['texts'] / run['reference_seconds']:.1f} "
        f"| {run['speed_ratio']:.2f} | {run['max_difference']:.1e} |\n"
        for run in report["runs"]
    ]
    return head + "".join(rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
