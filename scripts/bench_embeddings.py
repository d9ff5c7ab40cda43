"""Measure embeddings of texts of mixed lengths: padding, and texts per second beside transformers.

    pip install torch transformers    # this script needs both; noria does not
    python scripts/bench_embeddings.py --output benchmarks/embeddings.json
    python scripts/bench_embeddings.py --texts 500 --shapes minilm    # a quick run

The models have random weights in the shapes of MiniLM-L6 and BERT-base. Lengths are log-normal, as
those of published corpora: many short texts and a long tail. Both sides get the same token ids,
pool the mean and normalise. transformers runs as in sentence-transformers' `encode`: texts sorted
by length, 32 in a batch, each batch padded to its longest text. The speed of a machine changes
within minutes, so both sides run in turns: an eighth of the texts each, the longest first. Compile
time is reported apart, first calls count, and the vectors are compared. A part whose texts were in
an earlier call takes almost no time, so a job of few texts has parts with very high ratios. If the
output already has runs of other shapes or dtypes, they stay.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from transformers import BertConfig, BertModel

from noria.compile.plan import Numbers, PlannedModel
from noria.compile.targets import find_target
from noria.runtime import session
from noria.runtime.bundles.cpu_kernels import load_kernels
from noria.runtime.checkpoint import open_model
from noria.runtime.devices import backends
from noria.runtime.devices.machine import describe_machine
from noria.runtime.embedding.texts import pack, whole_text
from noria.runtime.engine.embedding import EmbeddingSession
from noria.runtime.planning.embedding_plan import embedding_plan
from noria.runtime.request import Request, SamplingParams

SHAPES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
NUM_HEADS, MAX_LENGTH, REFERENCE_BATCH, PARTS = 12, 512, 32, 8
MODULES = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")


def main() -> None:
    options = _parse()
    lengths = mixed_lengths(options.texts)
    runs = [
        measure(shape, SHAPES[shape], lengths, dtype)
        for shape in options.shapes
        for dtype in options.dtypes
    ]
    path = options.output and options.output.with_suffix(".json")
    if path is not None and path.exists():
        new = {(run["shape"], run["dtype"]) for run in runs}
        old = json.loads(path.read_text(encoding="utf-8"))["runs"]
        runs = [run for run in old if (run["shape"], run["dtype"]) not in new] + runs
    report = {"machine": describe_machine(), "runs": runs}
    print(markdown(report))
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


def mixed_lengths(count: int) -> list[int]:
    """Return the lengths of texts: half of them have less than 67 tokens."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(4.2, 0.8, count).astype(int), 4, MAX_LENGTH).tolist()


def measure(shape: str, sizes: dict[str, int], lengths: list[int], dtype: str) -> dict[str, Any]:
    """Run both sides on one model in turns; return padding, seconds and the largest difference."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder, sizes)
        rng = np.random.default_rng(1)
        texts = [rng.integers(5, model.config.vocab_size, n).tolist() for n in lengths]
        ours = Noria.built(folder, lengths, dtype)
        reference = model.to(getattr(torch, dtype))
        texts.sort(key=len, reverse=True)
        parts = np.array_split(np.arange(len(texts)), PARTS)
        run = ours.run(texts, [int(part[-1]) + 1 for part in parts])
        seconds, expected = np.zeros((PARTS, 2)), []
        for number, part in enumerate(parts):
            started = time.perf_counter()
            vectors = next(run)
            between = time.perf_counter()
            expected.append(run_transformers(reference, texts[part[0] : part[-1] + 1]))
            seconds[number] = between - started, time.perf_counter() - between
        own = np.stack([vectors[i] for i in range(len(texts))])
        difference = np.abs(own - np.concatenate(expected)).max()
    padding = ours.embedder.statistics()["padding"]
    own_seconds, reference_seconds = seconds.sum(0).tolist()
    return {
        "command": " ".join(["python", *sys.argv]),
        "shape": shape,
        "dtype": dtype,
        "texts": len(texts),
        "tokens": sum(lengths),
        "graphs": len(ours.embedder.runner.grid.prefill),
        "build_seconds": ours.build_seconds,
        "seconds": own_seconds,
        "texts_per_second": len(texts) / own_seconds,
        "padding_ratio": padding["computed_tokens"] / padding["real_tokens"],
        "reference_seconds": reference_seconds,
        "speed_ratio": reference_seconds / own_seconds,
        "speed_ratio_of_parts": np.round(seconds[:, 1] / seconds[:, 0], 3).tolist(),
        "max_difference": float(difference),
    }


def write_model(folder: Path, sizes: dict[str, int]) -> BertModel:
    """Write a random encoder with its module files; return the model of transformers."""
    torch.manual_seed(0)
    config = BertConfig(**sizes, num_attention_heads=NUM_HEADS, max_position_embeddings=MAX_LENGTH)
    model = BertModel(config).eval()
    model.save_pretrained(folder)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": p} for kind, p in MODULES]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return model


class Noria(NamedTuple):
    """The graphs of a job, ready to run, and the seconds of its plan, load and build."""

    embedder: EmbeddingSession
    build_seconds: float

    @classmethod
    def built(cls, folder: Path, lengths: list[int], dtype: str) -> Self:
        """Build the graphs for all texts."""
        started = time.perf_counter()
        backends.prepare_jax("cpu")
        load_kernels("cpu", partial(print, file=sys.stderr))
        target = find_target("cpu")
        with open_model(folder) as files:
            planned = PlannedModel("random", files.fingerprint())
            config = files.spec.config
            plan = embedding_plan(lengths, target.name, planned, Numbers(dtype), config, None)
            model = session.load_model(files, target, session.LoadOptions(dtype))
        embedder = session.start(model, plan)
        return cls(embedder, time.perf_counter() - started)

    def run(self, texts: list[list[int]], pauses: list[int]) -> Iterator[dict[int, np.ndarray]]:
        """Run texts in their order, and pause between two calls.

        Args:
          texts: The token ids of each text.
          pauses: Numbers of texts; the run pauses when at least so many have ended.

        Yields:
          The vectors so far, by the place of their text.
        """
        embedder, waiting = self.embedder, iter(pauses)
        params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
        requests = (
            Request(str(i), pack([whole_text(text)]), params) for i, text in enumerate(texts)
        )
        request, pause = next(requests, None), next(waiting)
        vectors: dict[int, np.ndarray] = {}
        while request is not None or embedder.unfinished:
            while request is not None and embedder.wants_more:
                embedder.submit(request)
                request = next(requests, None)
            embedder.receive()
            if len(vectors) >= pause:
                yield vectors
                pause = next(waiting)
            embedder.dispatch()
            for output in embedder.collect():
                assert output.vectors is not None, output.error
                vectors[int(output.request_id)] = output.vectors[0]
        while True:  # a small run can end before its last pauses
            yield vectors


def run_transformers(model: BertModel, texts: list[list[int]]) -> np.ndarray:
    """Return the vectors of texts, in padded batches of texts that follow each other."""
    batches = []
    with torch.inference_mode():
        for first in range(0, len(texts), REFERENCE_BATCH):
            batch = texts[first : first + REFERENCE_BATCH]
            ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, text in enumerate(batch):
                ids[row, : len(text)] = torch.tensor(text)
                mask[row, : len(text)] = 1
            states = model(ids, attention_mask=mask).last_hidden_state.float()
            mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            batches.append(torch.nn.functional.normalize(mean, dim=-1).numpy())
    return np.concatenate(batches)


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
        "| transformers texts/s | ratio | ratios of parts | largest difference |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    rows = [
        f"| {run['shape']} | {run['dtype']} | {run['texts']} | {run['tokens']} | {run['graphs']} "
        f"| {run['build_seconds']:.0f} | {run['padding_ratio']:.3f} "
        f"| {run['texts_per_second']:.1f} | {run['texts'] / run['reference_seconds']:.1f} "
        f"| {run['speed_ratio']:.2f} | {_range(run['speed_ratio_of_parts'])} "
        f"| {run['max_difference']:.1e} |\n"
        for run in report["runs"]
    ]
    return head + "".join(rows)


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
