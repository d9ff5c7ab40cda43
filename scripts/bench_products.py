"""Rates of products with weights on this CPU: the kernels of noria beside XLA and torch.

Weights are larger than the caches of the processor, and packed as each side reads them fastest.
torch multiplies by oneDNN; its product of codes takes 17 rows and more, of which only those asked
for count. Sides run in turns, and the fastest of several turns counts. Rates are in 10^9 operations
a second; a product of M rows has 2 M K N operations.

    python scripts/bench_products.py --output benchmarks/products_cpu.md
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import product as pairs
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # before torch is imported: its threads do not spin

import jax
import jax.numpy as jnp
import numpy as np
import torch

from noria.modelzoo.cpu import PRODUCTS
from noria.modelzoo.cpu.objects import code_lanes, is_loaded, panel_columns
from noria.modelzoo.weights.packed_products import multiply_panels
from noria.modelzoo.weights.packed_weight import PackedWeight, pack
from noria.modelzoo.weights.product import einsum
from noria.runtime.bundles.cpu_kernels import load_kernels
from noria.runtime.devices import backends
from noria.runtime.devices.machine import describe_machine, usable_cores

SHAPES = (576, 3072), (1536, 576), (2048, 8192)
ROWS = 1, 8, 64, 256, 512
RESULTS = {"float32": "float32", "bfloat16": "float32", "int8": "int32"}
"""The dtypes of products, and those of their results."""
WEIGHT_BYTES = 2**26
TURNS = 5
BLDF = einsum("BD,DF->BF")
Side = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    options = parser.parse_args()
    backends.prepare_jax("cpu")
    load_kernels("cpu", lambda line: print(line, file=sys.stderr))
    if not is_loaded():
        sys.exit("expected the kernels for the CPU, got none: pip install 'noria[cpu]'")
    torch.set_num_threads(usable_cores() or 1)
    rows = list(_rows(options.shapes, options.rows))
    text = _page(rows)
    print(text)
    if options.output:
        options.output.write_text(text, "utf-8")


def _shape(text: str) -> tuple[int, int]:
    inputs, _, columns = text.partition("x")
    return int(inputs), int(columns)


def _rows(
    shapes: list[tuple[int, int]], counts: list[int]
) -> Iterator[tuple[str, int, int, int, dict[str, float]]]:
    """The dtype, inputs, columns and rows of each product, and the rate of each side."""
    for dtype, (K, N), M in pairs(RESULTS, shapes, counts):
        if dtype == "int8" and code_lanes() is None:
            continue
        sides = dict(_sides(dtype, M, K, N))
        copies = _copies(dtype, K, N)
        seconds = dict.fromkeys(sides, float("inf"))
        for _ in range(TURNS):
            for name, run in sides.items():
                started = time.perf_counter()
                run()
                seconds[name] = min(seconds[name], time.perf_counter() - started)
        operations = 2 * M * K * N * copies
        yield dtype, K, N, M, {name: operations / s / 1e9 for name, s in seconds.items()}


def _copies(dtype: str, K: int, N: int) -> int:
    """The number of weights that are larger than the caches together."""
    return max(2, WEIGHT_BYTES // (K * N * jnp.dtype(dtype).itemsize))


def _sides(dtype: str, M: int, K: int, N: int) -> Iterator[tuple[str, Side]]:
    """Functions that multiply the same rows with all weights, each run once before."""
    rng = np.random.default_rng(0)
    if dtype == "int8":
        x, w = (rng.integers(-127, 128, s, np.int8) for s in ((M, K), (K, N)))
    else:
        x, w = (rng.standard_normal(s).astype(jnp.dtype(dtype)) for s in ((M, K), (K, N)))
    copies, out, columns = _copies(dtype, K, N), jnp.dtype(RESULTS[dtype]), panel_columns()
    assert columns is not None, "the kernels are loaded"
    assert (dtype, out.name) in PRODUCTS, "there is a kernel"
    panels = pack(jnp.asarray(w), (-2,), columns)

    def kernels(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [multiply_panels(BLDF, x, PackedWeight(y, (-2,), columns), out) for y in weights]

    def library(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [jnp.dot(x, y, preferred_element_type=out) for y in weights]

    for name, function, weight in (("noria", kernels, panels), ("XLA", library, jnp.asarray(w))):
        given = jnp.asarray(x), [jnp.copy(weight) for _ in range(copies)]
        run = partial(_run, jax.jit(function), given)
        run()
        yield name, run
    yield "torch", _of_torch(x, w, copies)


def _run(function: Callable[..., list[jax.Array]], given: tuple[object, ...]) -> None:
    jax.block_until_ready(function(*given))


def _of_torch(x: np.ndarray, w: np.ndarray, copies: int) -> Side:
    """The same by torch, with weights that it packed before where it can."""
    if x.dtype == np.int8:
        # its product of integers takes more than 16 rows
        given = np.concatenate([x] * -(-17 // len(x))) if len(x) < 17 else x
        given, weights = (
            torch.from_numpy(given),
            [torch.from_numpy(w).clone() for _ in range(copies)],
        )
        run: Side = lambda: [torch._int_mm(given, y) for y in weights]  # noqa: E731
    else:
        dtype = torch.float32 if x.dtype == np.float32 else torch.bfloat16
        given = torch.from_numpy(x.astype(np.float32)).to(dtype)
        plain = torch.from_numpy(w.astype(np.float32)).to(dtype).T.contiguous()
        weights = [plain.clone() for _ in range(copies)]
        reorder = torch.ops.mkldnn._reorder_linear_weight
        packed = [reorder(y, len(x)) for y in weights]
        multiply = torch.ops.mkldnn._linear_pointwise
        run = lambda: [multiply(given, p, None, "none", [], "") for p in packed]  # noqa: E731
    with torch.inference_mode():
        run()

    def run_without_gradients() -> None:
        with torch.inference_mode():
            run()

    return run_without_gradients


def _page(rows: list[tuple[str, int, int, int, dict[str, float]]]) -> str:
    machine = describe_machine()
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "numba", "torch"))
    lines = [
        "# Products with weights on a CPU\n",
        f"{machine['processor']}, {machine['cores']} cores, {' '.join(machine['instructions'])}; "
        f"{versions}; load {machine['load_average']}.",
        f"Made by `{' '.join(['python', *sys.argv])}`, whose docstring says what is measured.\n",
        "| numbers | K x N | rows | noria | XLA | torch | noria / the faster |",
        "|:--|:--|--:|--:|--:|--:|--:|",
    ]
    for dtype, K, N, M, rates in rows:
        ratio = rates["noria"] / max(rates["XLA"], rates["torch"])
        cells = " | ".join(f"{rates[name]:.0f}" for name in ("noria", "XLA", "torch"))
        lines.append(f"| {dtype} | {K} x {N} | {M} | {cells} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
