"""Measure how many calibration tokens a weight needs until GPTQ loses less than `clip`.

Weights of some layers of a model are rounded to int4 by GPTQ with more and more calibration tokens,
and by the method `clip`, which needs none. The record has the squared error of each product on
other rows, divided by the error of `clip`.

    nice python scripts/calibration_tokens.py --output benchmarks/calibration_tokens.md
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from noria.compile.abstract_model import AbstractModel
from noria.modelzoo.weights.weight_formats import Quantisation, WeightFormat
from noria.runtime.checkpoint import ModelFiles, open_model
from noria.runtime.checkpoint.loader import read_parameter
from noria.runtime.checkpoint.quantiser import dequantise
from noria.runtime.quantisation.calibration import Calibration
from noria.runtime.quantisation.rounding import GPTQ, MIN_TOKENS, round_weight
from noria.runtime.rows.job_text import read_row_ids

ROWS = Path("benchmarks/workloads/peers64.jsonl")
LAYERS = (2, 12, 22)
PRODUCTS = ("mlp.gate_up", "mlp.down")
NUM_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
QUANTISATION = Quantisation(WeightFormat("int4", 64), (-2,))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="Markdown file")
    options = parser.parse_args()
    ratios: dict[tuple[int, str], list[float]] = {}
    sizes: dict[str, int] = {}
    with open_model("smollm2") as files:
        rows = read_row_ids(ROWS, files)
        config = files.spec.config
        table_VD = read(files, "")["embedding.table"]
        half = len(rows) // 2
        other = Calibration(config, rows[half:], table_VD)
        runs = [Calibration(config, first_tokens(rows[:half], n), table_VD) for n in NUM_TOKENS]
        for layer in range(max(LAYERS) + 1):
            weights = read(files, f"layers.{layer}.")
            for name in PRODUCTS if layer in LAYERS else ():
                hessians = [run.hessian(layer, weights, name) for run in (other, *runs)]
                ratios[layer, name] = compare(weights[name], *hessians)
                sizes[name] = len(hessians[0])
                print(layer, name, ratios[layer, name], flush=True)
            for run in (other, *runs):
                run.advance(layer, weights)
    command = f"python {sys.argv[0]} --output {options.output}"
    options.output.write_text(markdown(ratios, sizes, other.num_tokens, command), "utf-8")


def read(files: ModelFiles, prefix: str) -> dict[str, np.ndarray]:
    """Return the parameters of a layer by their paths in it; without a prefix, the table."""
    shapes = AbstractModel(files.spec.config).abstract_parameters(jnp.float32)
    return {
        source.parameter.removeprefix(prefix): read_parameter(
            source,
            files.tensors,
            (slice(None),) * shapes[source.parameter].ndim,
            shapes[source.parameter].shape,
            np.float32,
        )
        for source in files.spec.sources
        if source.parameter.startswith(prefix or "embedding.")
    }


def first_tokens(rows: Sequence[Sequence[int]], num_tokens: int) -> list[Sequence[int]]:
    """Return the first rows, cut so that they have this number of tokens together."""
    taken: list[Sequence[int]] = []
    for row in rows:
        if num_tokens > 0:
            taken.append(row[:num_tokens])
            num_tokens -= len(taken[-1])
    return taken


def compare(weight: np.ndarray, of_others_AA: np.ndarray, *hessians: np.ndarray) -> list[float]:
    """Return the errors on other rows by GPTQ with each Hessian, over that of `clip`."""
    errors = []
    for hessian_AA in (None, *hessians):
        codes, scales = round_weight(weight, QUANTISATION, np.dtype(np.float32), GPTQ, hessian_AA)
        error = dequantise(codes, scales, QUANTISATION) - weight
        errors.append(float(np.sum(error * np.einsum("AX,...XF->...AF", of_others_AA, error))))
    return [error / errors[0] for error in errors[1:]]


def markdown(
    ratios: Mapping[tuple[int, str], Sequence[float]],
    sizes: Mapping[str, int],
    num_others: int,
    command: str,
) -> str:
    """Return the record as a Markdown page; ratios above 1 are bold."""
    cells = {
        key: [f"**{x:.2f}**" if x > 1 else f"{x:.2f}" for x in of] for key, of in ratios.items()
    }
    lines = [
        "# Calibration tokens that GPTQ needs",
        "",
        f"SmolLM2-135M, {QUANTISATION.format}. Rows are those of `{ROWS}`:",
        f"calibration tokens are from the first half, and errors are on the {num_others} tokens of "
        f"the other half.",
        "The figures are the squared error of the product by `gptq`, over that by `clip`. Above 1, "
        "GPTQ loses more.",
        f"Made by `{command}`.",
        "",
        "| layer and weight | input features | " + " | ".join(map(str, NUM_TOKENS)) + " |",
        "|:--|--:|" + "--:|" * len(NUM_TOKENS),
        *(
            f"| {layer}, {name} | {sizes[name]} | {' | '.join(of)} |"
            for (layer, name), of in cells.items()
        ),
        "",
        f"`noria quantize` uses GPTQ from {MIN_TOKENS} tokens for each input feature: "
        + ", ".join(f"{size * MIN_TOKENS:.0f} for `{name}`" for name, size in sizes.items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
