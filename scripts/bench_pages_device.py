"""Time decode attention to a cache in pages on this device, and check the bits of its rows.

For each mix of rows, the kernel that a plan would choose and the portable form attend to one layer.
The record has the microseconds of a call, the live bytes a second (keys and values of the entries
that rows hold), and the largest difference between both. The bits of each row must stay the same in
other pages, in another place of the batch, and beside copies of itself.

    python scripts/bench_pages_device.py --output benchmarks/pages_device
    JAX_PLATFORMS=cpu python scripts/bench_pages_device.py --mixes 8x20 --kv-heads 1 --dtype float32
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noria.compile.attention_kernels import choose_kernels
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.modelzoo.attention.paged import PagedRows, PageReader, attend_in_groups
from noria.modelzoo.config import DecoderConfig
from noria.runtime.devices.machine import describe_machine

MIXES = "512x375,256x1500,64x1500"
SIGMA = 0.8
"""The width of the lognormal distribution of lengths."""
CALLS = 20
"""Calls in a row, of which each waits for the one before; the time of one is their mean."""
HEAD = (
    "| rows | mean length | kernel | µs | live TB/s | portable µs | largest difference "
    "| same bits |\n|--:|--:|:--|--:|--:|--:|--:|:--|"
)


class Mix(NamedTuple):
    """Rows with lognormal lengths of a mean."""

    rows: int
    mean: int

    def lengths(self) -> np.ndarray:
        """The lengths of the rows, the same in every run."""
        rng = np.random.default_rng(0)
        drawn_B = rng.lognormal(np.log(self.mean) - SIGMA**2 / 2, SIGMA, self.rows)
        return np.clip(drawn_B, 1, 4 * self.mean).astype(np.int64)


class Pool:
    """A layer's pages with random entries, and the queries of rows."""

    def __init__(self, mix: Mix, options: argparse.Namespace):
        self.length_B, S = mix.lengths(), options.page
        self.num_row_pages = -(-4 * mix.mean // S)
        held_B = -(-self.length_B // S)
        self.num_pages = int(held_B.sum()) + 1
        K, G, H = options.kv_heads, options.group, options.head_dim
        dtype = jnp.dtype(options.dtype)
        keys = jax.random.split(jax.random.key(0), 3)
        self.q_BTKGH = jax.random.normal(keys[0], (mix.rows, 1, K, G, H), dtype)
        shape = (self.num_pages, K, S, H)
        self.k_PKSH, self.v_PKSH = (jax.random.normal(key, shape, dtype) for key in keys[1:])
        self.page_BN = np.zeros((mix.rows, self.num_row_pages), np.int32)
        first_B = np.cumsum(held_B) - held_B
        for row, (first, held) in enumerate(zip(first_B, held_B, strict=True)):
            self.page_BN[row, :held] = np.arange(first, first + held)
        self.live_bytes = int(self.length_B.sum()) * K * H * 2 * dtype.itemsize

    def attend(self, attend: Any, rows: np.ndarray, order_P: np.ndarray) -> tuple[Any, Any]:
        """Attend with some rows, and with the pages in an order."""
        moved = jnp.asarray(order_P)
        arrays = (x.at[moved].set(x) for x in (self.k_PKSH, self.v_PKSH))
        paged = paged_rows(order_P[self.page_BN[rows]], self.length_B[rows])
        return attend(self.q_BTKGH[rows], *arrays, paged)

    def has_own_bits(self, attend: Any, rows: np.ndarray) -> bool:
        """Whether the bits of rows stay the same in other pages and in another order of rows."""
        in_order = np.arange(self.num_pages)
        shuffled = np.random.default_rng(1).permutation(self.num_pages)
        first = self.attend(attend, rows, in_order)
        for other, order in (
            (self.attend(attend, rows, shuffled), slice(None)),
            (self.attend(attend, rows[::-1], in_order), slice(None, None, -1)),
        ):
            same = (
                np.array_equal(np.asarray(x), np.asarray(y)[order])
                for x, y in zip(first, other, strict=True)
            )
            if not all(same):
                return False
        # beside nothing but copies of itself
        copies = self.attend(attend, np.full_like(rows, rows[0]), in_order)
        return all(
            np.array_equal(np.asarray(x)[:1], np.asarray(y)[:1])
            for x, y in zip(first, copies, strict=True)
        )


def paged_rows(page_BN: np.ndarray, length_B: np.ndarray) -> PagedRows:
    """Return rows with one query, which is their last token."""
    scalars = page_BN, length_B - 1, np.ones_like(length_B)
    return PagedRows(*(jnp.asarray(x, jnp.int32) for x in scalars))


def main() -> None:
    """Measure all mixes, and write JSON and a page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixes", default=MIXES, help="rows x mean length, separated by commas")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    mixes = [Mix(*map(int, mix.split("x"))) for mix in options.mixes.split(",")]
    rows = [measure(mix, options) for mix in mixes]
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "device": jax.devices()[0].device_kind,
        "rows": rows,
    }
    page = page_of(record)
    print(page)
    if options.output:
        text = json.dumps(record, indent=1) + "\n"
        options.output.with_suffix(".json").write_text(text, encoding="utf-8")
        options.output.with_suffix(".md").write_text(page, encoding="utf-8")


def measure(mix: Mix, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one mix."""
    pool = Pool(mix, options)
    name, kernel = chosen(mix, pool, options)
    portable = jax.jit(attend_in_groups)
    every, in_order = np.arange(mix.rows), np.arange(pool.num_pages)
    out, expected = (pool.attend(attend, every, in_order)[0] for attend in (kernel, portable))
    difference = jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32)).max()
    seconds, portable_seconds = (seconds_of(pool, attend) for attend in (kernel, portable))
    return {
        "rows": mix.rows,
        "mean_length": mix.mean,
        "kernel": name,
        "seconds": seconds,
        "live_bytes_per_second": pool.live_bytes / seconds,
        "portable_seconds": portable_seconds,
        "largest_difference": float(difference),
        "has_own_bits": pool.has_own_bits(kernel, every),
    }


def chosen(mix: Mix, pool: Pool, options: argparse.Namespace) -> tuple[str, Any]:
    """Return the name and the compiled form of the kernel that a plan for these rows has."""
    max_length = pool.num_row_pages * options.page
    grid = BucketGrid(
        max_length,
        ((max_length, 1),),
        mix.rows,
        pages=max(pool.num_pages, pool.num_row_pages),
        page=options.page,
    )
    config = DecoderConfig.alike(
        vocab_size=256,
        embed=256,
        mlp=256,
        num_query_heads=options.kv_heads * options.group,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        windows=(None,),
        max_position=max_length,
    )
    target = find_target(jax.default_backend())
    placement, dtype = target.placement(), jnp.dtype(options.dtype)
    choice = choose_kernels(config, grid, placement, dtype).decode
    assert choice is not None and isinstance(choice.attend, PageReader)
    return choice.kernel, jax.jit(choice.attend.attend)


def seconds_of(pool: Pool, attend: Callable[..., Any]) -> float:
    """Return the median seconds of a call in a run of calls, each after the one before."""
    paged = paged_rows(pool.page_BN, pool.length_B)

    @jax.jit
    def run(q_BTKGH, k_PKSH, v_PKSH, paged):
        def call(_, q_BTKGH):
            return attend(q_BTKGH, k_PKSH, v_PKSH, paged)[0].astype(q_BTKGH.dtype)

        return jax.lax.fori_loop(0, CALLS, call, q_BTKGH)

    arguments = pool.q_BTKGH, pool.k_PKSH, pool.v_PKSH, paged
    jax.block_until_ready(run(*arguments))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append((time.perf_counter() - start) / CALLS)
    return statistics.median(seconds)


def page_of(record: dict[str, Any]) -> str:
    """Return the record as a page."""
    lines = [
        "# Decode attention to pages on a device",
        "",
        f"One layer on {record['device']}, made by `{record['command']}`.",
        "",
        HEAD,
    ]
    for row in record["rows"]:
        rate, micro = row["live_bytes_per_second"] / 1e12, 1e6
        lines.append(
            f"| {row['rows']} | {row['mean_length']} | {row['kernel']} "
            f"| {micro * row['seconds']:.0f} | {rate:.3f} | {micro * row['portable_seconds']:.0f} "
            f"| {row['largest_difference']:.1e} | {'yes' if row['has_own_bits'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
