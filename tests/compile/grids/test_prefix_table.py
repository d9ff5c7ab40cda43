"""The search for shared beginnings, and the tree of pieces, against comparisons of prompts."""

from itertools import pairwise

import numpy as np
import pytest
from related_prompts import num_equal, related_prompts, table_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_table import PrefixTable
from noria.compile.grids.prefix_tree import prefix_tree
from noria.runtime.rows.prefix_index import UNIT

CHUNKS = [(16,), (32,), (16, 64), (16, 32, 64)]


def grid_of(chunks: tuple[int, ...]) -> BucketGrid:
    return BucketGrid.from_table(
        {
            "max_length": 256,
            "prefill": [[256] + [2] * len(chunks)],
            "decode_slots": 16,
            "chunk": list(chunks),
        }
    )


def pieces_of(grid: BucketGrid, prompt: list[int]) -> list[tuple]:
    """Return all pieces except the last: their buckets and the tokens up to their ends."""
    pieces, end = [], 0
    for bucket in grid.buckets_of(len(prompt))[:-1]:
        end += bucket.tokens
        pieces.append((bucket, tuple(prompt[:end])))
    return pieces


def assert_true(table: PrefixTable, prompts: dict[int, list[int]], unit: int) -> None:
    rows, shared = table.rows.tolist(), table.shared.tolist()
    assert sorted(rows) == sorted(prompts)
    for i, a in enumerate(rows):
        for j in range(i + 1, len(rows)):
            expected = num_equal(prompts[a], prompts[rows[j]]) // unit * unit
            assert min(shared[i + 1 : j + 1]) == expected


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("max_hashes", [10**6, 40])
def test_the_table_has_what_any_two_prompts_share(seed, max_hashes):
    prompts = related_prompts(seed)
    table, unit = table_of(prompts, max_hashes)
    assert_true(table, dict(enumerate(prompts)), unit)
    some = np.random.default_rng(seed).permutation(len(prompts))[: len(prompts) // 2 + 1].tolist()
    assert_true(table.of_rows(some), {i: prompts[row] for i, row in enumerate(some)}, unit)


def test_a_limit_of_memory_makes_the_unit_longer():
    prompts = [list(range(500))] * 4
    table, unit = table_of(prompts, max_hashes=20)
    assert unit == 8 * UNIT
    assert table.shared.tolist() == [0, 384, 384, 384]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("seed", range(20))
def test_a_row_shares_no_more_pieces_than_the_table_allows(seed, chunks):
    prompts, grid = related_prompts(seed), grid_of(chunks)
    table, _ = table_of(prompts)
    shared = table.shared_pieces(np.array(list(map(len, prompts))), chunks)
    rows = table.rows.tolist()
    for a, b in pairwise(rows):
        pairs = zip(pieces_of(grid, prompts[a]), pieces_of(grid, prompts[b]), strict=False)
        num_tokens = 0
        for (bucket, tokens), other in pairs:
            if (bucket, tokens) != other:
                break
            num_tokens += bucket.tokens
        assert shared[b] >= num_tokens
        if len(chunks) == 1 and shared[b] < len(prompts[a]):
            assert shared[b] == num_tokens


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("seed", range(20))
def test_the_tree_computes_each_distinct_piece_once(seed, chunks):
    prompts, grid = related_prompts(seed), grid_of(chunks)
    table, _ = table_of(prompts)
    root, nodes = prefix_tree(grid, list(map(len, prompts)), table)
    tokens = sum(node.length - node.parent.length for node in nodes)
    for node in [root, *nodes]:
        tokens += sum(len(prompts[row]) - node.length for row in node.rows)
    distinct = {}
    for prompt in prompts:
        pieces = pieces_of(grid, prompt)
        for i, (bucket, end) in enumerate(pieces):
            distinct[tuple(b for b, _ in pieces[: i + 1]), end] = bucket.tokens
    last = sum(len(p) - sum(bucket.tokens for bucket, _ in pieces_of(grid, p)) for p in prompts)
    assert tokens == sum(distinct.values()) + last


def test_prompts_that_do_not_fit_share_nothing_and_change_nothing():
    shared, grid = list(range(128)), grid_of((16,))
    long = [*shared, *range(300, 460)]
    prompts = [[*shared, 200], [*shared, 201], long, [*long, 202], [*shared[:64], 500]]
    found = []
    for rows in ([0, 1, 2, 3, 4], [0, 1, 4]):
        table, _ = table_of([prompts[row] for row in rows])
        root, nodes = prefix_tree(grid, [len(prompts[row]) for row in rows], table)
        assert not root.rows
        found.append([(node.length, sorted(rows[row] for row in node.rows)) for node in nodes])
    assert found[0] == found[1] == [(64, [4]), (128, [0, 1])]
