"""Write the workloads for measurements of plans: token counts of prompts and outputs, as CSV.

Seven workloads come from distributions. The prompts of one more are the functions in the top-level
modules of Python's standard library, counted by the embedded model's tokenizer, so that one
workload has the lengths of real text. The files are the same on every machine with the same Python.

Example: python scripts/make_workloads.py benchmarks/workloads
"""

import argparse
import ast
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from noria.runtime.checkpoint import open_model
from noria.runtime.text.load_tokenizer import load_tokenizer

ROWS = 10_000
LONGEST_PROMPT, LONGEST_OUTPUT = 8192, 1024
Draw = Callable[[np.random.Generator], np.ndarray]


def lognormal(median: float, sigma: float) -> Draw:
    """Return a generator of prompt lengths around a median; the tail grows with sigma."""
    return lambda rng: rng.lognormal(np.log(median), sigma, ROWS)


def bimodal(rng: np.random.Generator) -> np.ndarray:
    """Return prompt lengths: seven short questions for every three long documents."""
    is_short = rng.random(ROWS) < 0.7
    return np.where(is_short, rng.normal(300, 60, ROWS), rng.normal(5200, 300, ROWS))


DISTRIBUTIONS: dict[str, Draw] = {
    "lognormal-64": lognormal(64, 0.6),
    "lognormal-220": lognormal(220, 1.1),
    "lognormal-1000": lognormal(1000, 0.8),
    "lognormal-3000": lognormal(3000, 0.4),
    "uniform": lambda rng: rng.uniform(16, LONGEST_PROMPT, ROWS),
    "uniform-short": lambda rng: rng.uniform(1, 512, ROWS),
    "bimodal": bimodal,
}


def main() -> None:
    """Write one file for each workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for seed, (name, draw) in enumerate(DISTRIBUTIONS.items()):
        rng = np.random.default_rng(seed)
        write(folder / f"{name}.csv", draw(rng), rng)
    lengths = np.array(list(function_lengths()))
    rng = np.random.default_rng(len(DISTRIBUTIONS))
    write(folder / "functions.csv", rng.permutation(lengths)[:ROWS], rng)


def write(path: Path, prompts: np.ndarray, rng: np.random.Generator) -> None:
    """Write prompt lengths within limits, and output lengths with a median of 120 tokens."""
    prompts = np.clip(prompts, 1, LONGEST_PROMPT).astype(int)
    outputs = np.clip(rng.lognormal(np.log(120), 0.8, len(prompts)), 1, LONGEST_OUTPUT).astype(int)
    rows = (f"{prompt},{output}" for prompt, output in zip(prompts, outputs, strict=True))
    path.write_text("\n".join(["prompt_tokens,output_tokens", *rows]) + "\n", encoding="utf-8")


def function_lengths() -> Iterator[int]:
    """Yield the tokens of each function in the top-level modules of the standard library."""
    with open_model("smollm2", needs_weights=False) as files:
        tokenizer = load_tokenizer(files.tokenizer_files)
    assert tokenizer is not None
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node)
                yield len(tokenizer.encode(text, special_tokens=False))


if __name__ == "__main__":
    main()
