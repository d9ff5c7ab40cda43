"""Planned prefixes: the groups of slots that share them, and rows of real runs against whole ones."""

from collections import Counter

import numpy as np
import pytest
from related_prompts import related_prompts, table_of
from symbolic_run import SymbolicRun

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_choice import choose_prefixes
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid, hash_tokens


def planned(tokens: list[int]) -> PlannedPrefix:
    return PlannedPrefix(len(tokens), hash_tokens(tokens))


def random_grid(seed: int, prompts: list[list[int]]) -> BucketGrid:
    """Return a grid whose prefixes are those of a plan, or any beginnings of prompts."""
    rng = np.random.default_rng(seed)
    table, _ = table_of(prompts)
    shared = set(choose_prefixes(table, np.array(list(map(len, prompts))), 2))
    if not shared or rng.random() < 0.5:
        some = rng.choice(len(prompts), min(len(prompts), 4), replace=False).tolist()
        shared = {planned(prompts[i][: rng.integers(1, len(prompts[i]) + 1)]) for i in some}
    groups, size = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5]))
    chunk = int(rng.choice([16, 64, 256]))
    prefill = ((64, int(rng.choice([1, 2, 4]))), (200, int(rng.choice([1, 3]))))
    prefixes = PrefixGrid(groups, 256, chunk, tuple(shared))
    return BucketGrid(256, prefill, groups * size, (64, 128, 256), prefixes=prefixes)


def run(seed: int, **options) -> SymbolicRun:
    prompts = related_prompts(seed)
    grid = random_grid(seed, prompts)
    rng = np.random.default_rng(seed)
    # more sequences than a group or all groups have slots
    samples = rng.choice([1, 1, 1, 3, grid.decode_slots + 2], len(prompts)).tolist()
    return SymbolicRun(seed, grid=grid, prompts=prompts, num_samples=samples, **options)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("seed", range(100))
def test_every_row_runs_in_a_group_with_its_prefix(seed, in_order):
    run(seed, in_order=in_order).assert_all_rows_ended()


@pytest.mark.parametrize("seed", range(12))
def test_a_drain_at_any_step_keeps_rows_in_flight(seed):
    for step in range(run(seed).num_steps + 1):
        drained = run(seed, in_order=False, drain_at=step)
        drained.assert_all_rows_ended()
        num_ended = Counter(number for number, _ in drained.done)
        for number in drained.dropped:
            assert num_ended[number] < drained.num_samples[drained.row_of[number]]
