"""Compare the padding and predicted seconds of planned grids with grids picked by hand.

The planned grid of a workload has as many prefill lengths as there are powers of two from 16 to the
longest prompt. Grids picked by hand have these powers of two, the fastest choice of as many
multiples of 128, or the lists of other projects. Each is compared with a plan of at most as many
lengths. The script also plans each workload in chunks that compute at most 1.05 times the prompts'
tokens. Everything is simulated and predicted from published peaks: nothing runs.

Example: python scripts/bench_planner.py benchmarks/workloads/*.csv --output benchmarks/planner
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from noria.compile.abstract_model import AbstractModel
from noria.compile.graphs.graph_kinds import EMPTY_STATE, FORK, graph_keys
from noria.compile.grids.bucket_search import cheapest_cuts
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.hardware.hardware import hardware_of
from noria.compile.planning.candidates import TOKENS_PER_PREFILL, Budget, CandidateGrids
from noria.compile.planning.cost import CostModel
from noria.compile.planning.other_grids import (
    multiples_of_128,
    powers_of_two,
    with_fastest_lengths,
    with_lengths,
)
from noria.compile.planning.run_bounds import ExpectedRow
from noria.compile.planning.work import Work
from noria.modelzoo.config import DecoderConfig
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.planning.length_table import read_table
from noria.runtime.planning.planner import Planner
from noria.runtime.planning.search import (
    MAX_SIMULATED_GRIDS,
    Schedules,
    SimulatedGrid,
    simulate_grid,
)

CHUNK_GRAPHS = 8
TARGETS = {"tpu:v5e:1x1": "bfloat16", "cpu": "float32"}
"""Dtype of weights, by target. The first target is bound by memory below about 240 tokens a call,
so the padding of short calls is free; the second is almost always bound by operations."""
MOST_PADDING = 1.05
"""Upper bound for plans with chunks: the ratio of computed to real prompt tokens. Computed tokens
include dummy rows."""
SHIPPED = {
    "JetStream, MaxText: 16 to 32768, doubling": [2**power for power in range(4, 16)],
    "SGLang's JAX port: 64 to 8192, doubling": [2**power for power in range(6, 14)],
    "Saxml: 128, 1024, 4096": [128, 1024, 4096],
}
"""Lists in the projects' sources: DEFAULT_PREFILL_BUCKETS, PRECOMPILE_DEFAULT_TOKEN_PADDINGS, and
BUCKET_KEYS of the language models' parameters."""
LLAMA_1B = DecoderConfig.alike(
    vocab_size=128256,
    embed=2048,
    mlp=8192,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=64,
    windows=(None,) * 16,
    max_position=131072,
    tie_embeddings=True,
)
"""Shape of Llama 3.2 1B, as published in its config.json."""


def main() -> None:
    """Measure every workload, and write JSON and a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tries", type=int, default=MAX_SIMULATED_GRIDS)
    options = parser.parse_args()
    found = []
    for target, path in product(TARGETS, options.workloads):
        found.append(measure(target, path, options.tries))
        lines = [*ladder_lines(found[-1:]), *chunk_lines(found[-1:])]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    report = {"command": " ".join(["python", *sys.argv]), "workloads": found}
    options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    options.output.with_suffix(".md").write_text(markdown(found), "utf-8")


def measure(target: str, path: Path, tries: int) -> dict[str, Any]:
    """Simulate every grid of one workload on one target; return figures by name."""
    rows = tuple(read_table(path))
    hardware = hardware_of(target, known_hardware())
    cost = CostModel(Work(AbstractModel(LLAMA_1B), TARGETS[target]), hardware)
    prompts = np.array([row.need.prompt_length for row in rows])
    longest = int(prompts.max())
    powers = powers_of_two(longest)
    budget = Budget(prefill_graphs=len(powers), memory_bytes=0.9 * hardware.memory_bytes)
    planner = Planner(
        rows, LLAMA_1B.max_position, cost, budget, GridDefaults(), max_simulated=tries
    )
    whole = replace(planner, may_chunk=False).plan().best
    limit = replace(budget, prefill_graphs=CHUNK_GRAPHS, padding=MOST_PADDING)
    chunked = replace(planner, must_chunk=True, budget=limit).plan().best
    tokens = max(bucket.length * bucket.batch for bucket in whole.grid.prefill)
    lists = {
        "powers of two": powers,
        "multiples of 128": multiples_of_128(longest),
        **{name: _reaching(lengths, longest) for name, lengths in SHIPPED.items()},
    }
    grids = {
        name: with_lengths(whole.grid, lengths, tokens, GridDefaults())
        for name, lengths in lists.items()
    }
    multiples = with_fastest_lengths(grids["multiples of 128"], prompts, len(powers), cost)
    grids["multiples of 128"] = multiples
    least = least_padding(prompts.tolist(), len(powers))
    by_hand = {}
    for name, grid in grids.items():
        by_hand[name] = {
            "grid": figures(simulate_grid(grid, Schedules(rows), cost, budget)),
            "planned": figures(_planned(whole, len(grid.prefill), rows, cost, budget)),
            "least": least[len(grid.prefill)],
        }
    return {
        "target": target,
        "workload": path.stem,
        "rows": len(rows),
        "prompt_tokens": sum(row.need.prompt_length for row in rows),
        "whole": figures(whole),
        "chunked": figures(chunked),
        "by_hand": by_hand,
    }


def least_padding(lengths: Sequence[int], most: int) -> dict[int, float]:
    """Return the least ratio of computed to real tokens, by the number of prefill lengths.

    Every prompt is alone in its call. Lengths minimise padding alone, and may be any number.
    """
    borders, counts = np.unique(lengths, return_counts=True)
    rows_below = np.concatenate([[0], np.cumsum(counts)])

    def computed(end: int) -> np.ndarray:
        return (rows_below[end + 1] - rows_below[: end + 1]) * borders[end]

    found = {}
    for count in range(1, most + 1):
        ends = cheapest_cuts(computed, len(borders), count)
        starts = [0, *(end + 1 for end in ends)]
        tokens = sum(computed(end)[start] for start, end in zip(starts, ends, strict=False))
        found[count] = float(tokens / sum(lengths))
    return found


def _planned(
    whole: SimulatedGrid, count: int, rows: Sequence[ExpectedRow], cost: CostModel, budget: Budget
) -> SimulatedGrid:
    """Return the best grid of at most `count` prefill lengths, with `whole`'s slots and pages."""
    grid = whole.grid

    def prefill_of(tokens: int, budget: Budget) -> tuple[PrefillBucket, ...]:
        grids = CandidateGrids(rows, LLAMA_1B.max_position, cost, budget, GridDefaults())
        return grids.prefill_buckets(tokens, grid.decode_slots)

    # the size of call whose lengths are those of the grid; batches near it may differ
    lengths = [bucket.length for bucket in grid.prefill]
    tokens = min(
        (n for n in TOKENS_PER_PREFILL if [b.length for b in prefill_of(n, budget)] == lengths),
        key=lambda n: abs(n - sum(b.length * b.batch for b in grid.prefill) / len(lengths)),
    )
    budget = replace(budget, prefill_graphs=count)
    return simulate_grid(
        replace(grid, prefill=prefill_of(tokens, budget)), Schedules(rows), cost, budget
    )


def _reaching(lengths: list[int], longest: int) -> list[int]:
    """Return a published list up to the longest prompt; double its last length if too short."""
    kept = [length for length in lengths if length < longest]
    top = next((length for length in lengths if length >= longest), None)
    while top is None or top < longest:
        top = 2 * (top or lengths[-1])
    return [*kept, top]


def figures(tried: SimulatedGrid) -> dict[str, Any]:
    """Return the figures of one grid that the tables show."""
    metrics = tried.simulation.metrics
    padding, prefill = metrics.padding, metrics.prefill.values()
    return {
        "prefill": tried.grid.to_table()["prefill"],
        "chunk": tried.grid.to_table()["chunk"],
        "graphs": sum(key not in (FORK, EMPTY_STATE) for key in graph_keys(tried.grid)),
        "slots": tried.grid.decode_slots,
        "real_tokens": sum(use.real_tokens for use in prefill),
        "computed_tokens": sum(use.computed_tokens for use in prefill),
        "decoded_tokens": metrics.decode.computed_tokens,
        "idle_slot_tokens": padding["idle_slot_tokens"],
        "overshoot_tokens": padding["overshoot_tokens"],
        "seconds": tried.simulation.seconds,
    }


def overhead(found: dict[str, Any]) -> float:
    """Return the ratio of computed to real prefill tokens."""
    return found["computed_tokens"] / found["real_tokens"]


def ladder_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each workload and hand-picked grid."""
    lines = []
    for one in found:
        for name, pair in one["by_hand"].items():
            hand, plan, least = overhead(pair["grid"]), overhead(pair["planned"]), pair["least"]
            seconds = pair["grid"]["seconds"] / pair["planned"]["seconds"]
            lines.append(
                f"| {one['workload']} | {name} | {len(pair['grid']['prefill'])} | {hand:.3f} | "
                f"{plan:.3f} | {least:.3f} | {_times(hand, plan)} | {_times(hand, least)} | "
                f"{seconds:.2f} |"
            )
    return lines


def _times(more: float, less: float) -> str:
    """Return how many times less the second pads, if padding is what a ratio exceeds 1 by."""
    return f"{(more - 1) / max(less - 1, 1e-9):.1f}"


def chunk_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each workload: its plan in chunks and its plan of whole prompts."""
    lines = []
    for one in found:
        whole, chunked = one["whole"], one["chunked"]
        shapes = [
            f"{size}x{rows}"
            for size, rows in zip(chunked["chunk"], chunked["prefill"][0][1:], strict=True)
        ]
        lines.append(
            f"| {one['workload']} | {' and '.join(shapes)} | {chunked['slots']} | "
            f"{chunked['graphs']} | {whole['graphs']} | {overhead(chunked):.3f} | "
            f"{overhead(whole):.3f} | {_decode_share(chunked)} | {_decode_share(whole)} | "
            f"{chunked['seconds']:.1f} | {whole['seconds'] / chunked['seconds']:.2f} |"
        )
    return lines


def _decode_share(of: dict[str, Any]) -> str:
    """Return idle slots and overshoot as shares of the tokens that decode computes."""
    shares = (of[kind] / of["decoded_tokens"] for kind in ("idle_slot_tokens", "overshoot_tokens"))
    return ", ".join(f"{share:.1%}" for share in shares)


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    return "\n".join(
        [
            "# Planned buckets against those picked by hand",
            "",
            "Llama 3.2 1B's shape; simulated schedules, predicted from published peaks. Made by "
            "`python scripts/bench_planner.py benchmarks/workloads/*.csv --output "
            "benchmarks/planner`.",
            "",
            "Padding is the ratio of computed to real prompt tokens, dummy rows included, without "
            "decode.",
            "",
            "Whole prompts: a grid picked by hand, and the plan of least predicted seconds with "
            "the same number of prefill lengths, in multiples of 16 tokens. Of the multiples of "
            "128, the fastest choice of as many lengths as there are powers of two is taken. "
            "`least` is the minimum "
            "for that number of lengths: any length is allowed, and there is no dummy row. If it "
            "is not much less than the padding by hand, no set of lengths can be much better. "
            "`times less` is how many times less the plan pads than the grid by hand, and `at "
            "most` how many times less the least pads; here padding is what a ratio exceeds 1 by. "
            "`seconds over` is the ratio of the total seconds by hand to the plan's.",
            "",
            f"Chunks: the plan that computes at most {MOST_PADDING} times the prompts' tokens, "
            f"with at most {CHUNK_GRAPHS} prefill graphs. The columns are tokens and rows of its "
            "calls; slots; graphs; padding; idle slots and overshoot as shares of the tokens that "
            "decode computes; total seconds, and the ratio of the seconds with whole prompts to "
            "them. A column `whole` has the figure of the plan with whole prompts.",
            "",
            *(line for target in TARGETS for line in _section(target, found)),
        ]
    )


def _section(target: str, found: Sequence[dict[str, Any]]) -> list[str]:
    found = [one for one in found if one["target"] == target]
    return [
        f"## {target}, {TARGETS[target]}",
        "",
        "| workload | against | lengths | by hand | plan | least | times less | at most | "
        "seconds over |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|--:|",
        *ladder_lines(found),
        "",
        "| workload | chunks | slots | graphs | whole | padding | whole | idle, overshoot | whole "
        "| seconds | whole takes |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *chunk_lines(found),
        "",
    ]


if __name__ == "__main__":
    main()
