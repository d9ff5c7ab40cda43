"""The choice of planned prefixes, against all sets of beginnings of small jobs."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, pairwise

import numpy as np
import pytest
from related_prompts import hash_tokens, num_equal, related_prompts, table_of

from noria.compile.grids.prefix_choice import choose_prefixes, prefixes_of_rows
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from noria.runtime.rows.prefix_index import UNIT

MAX_BEGINNINGS = 9
"""Brute force tries all sets of at most this many beginnings."""

Tokens = tuple[int, ...]


def shared_beginnings(prompts: list[list[int]], unit: int = UNIT) -> set[Tokens]:
    """Return all that two prompts share at the start, in whole units."""
    pairs = [(a, num_equal(a, b) // unit * unit) for a, b in combinations(prompts, 2)]
    return {tuple(a[:length]) for a, length in pairs if length}


def rows_of(prompts: list[list[int]], listed: Iterable[Tokens]) -> Counter[Tokens]:
    """Count the prompts whose longest listed beginning is each one."""
    count: Counter[Tokens] = Counter()
    for prompt in prompts:
        found = [t for t in listed if len(t) < len(prompt) and t == tuple(prompt[: len(t)])]
        count.update([max(found, key=len)] if found else [])
    return count


def num_saved(count: Counter[Tokens]) -> int:
    return sum(len(tokens) * (rows - 1) for tokens, rows in count.items())


def best_of_all_sets(prompts: list[list[int]], min_rows: int, unit: int = UNIT) -> int:
    beginnings, best = shared_beginnings(prompts, unit), 0
    for size in range(len(beginnings) + 1):
        for listed in combinations(beginnings, size):
            count = rows_of(prompts, listed)
            if all(count[tokens] >= min_rows for tokens in listed):
                best = max(best, num_saved(count))
    return best


def lengths_of(prompts: list[list[int]]) -> np.ndarray:
    return np.array(list(map(len, prompts)), np.int64)


def chosen_rows(
    prompts: list[list[int]], min_rows: int, table: PrefixTable | None = None
) -> Counter[Tokens]:
    """Return the chosen beginnings, and the number of prompts that begin with each."""
    table, unit = (table_of(prompts)[0], UNIT) if table is None else (table, 1)
    tokens_of = {hash_tokens(tokens): tokens for tokens in shared_beginnings(prompts, unit)}
    chosen = choose_prefixes(table, lengths_of(prompts), min_rows)
    assert all(len(tokens_of[prefix.hash]) == prefix.length for prefix in chosen)
    count = rows_of(prompts, [tokens_of[prefix.hash] for prefix in chosen])
    assert len(count) == len(set(chosen)) == len(chosen)
    return count


SMALL = [
    seed for seed in range(120) if len(shared_beginnings(related_prompts(seed))) <= MAX_BEGINNINGS
]


@pytest.mark.parametrize("seed", SMALL)
def test_no_other_set_of_beginnings_saves_more(seed):
    prompts = related_prompts(seed)
    assert num_saved(chosen_rows(prompts, 2)) == best_of_all_sets(prompts, 2)


def in_single_tokens(prompts: list[list[int]]) -> PrefixTable:
    """Return a table whose units are tokens."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    in_order = [prompts[row] for row in order]
    shared = [0, *(num_equal(a, b) for a, b in pairwise(in_order))]
    digests = [
        hash_tokens(prompt[:n]) if n else "0" * 16
        for prompt, n in zip(in_order, shared, strict=True)
    ]
    hashes = np.frombuffer(bytes.fromhex("".join(digests)), np.uint64)
    return PrefixTable(np.array(order, np.int32), np.array(shared, np.int32), hashes)


@pytest.mark.parametrize("seed", range(250))
def test_no_other_set_saves_more_where_units_are_single_tokens(seed):
    """Gains are then often equal, or differ by one token."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 2, (2, 30)).tolist()
    prompts: list[list[int]] = []
    while len(prompts) < 20:
        ends = rng.choice([3, 5, 7, 11, 17, 26])
        more = [base[rng.integers(2)][:ends] + rng.integers(2, 9, rng.integers(3)).tolist()]
        if len(shared_beginnings(prompts + more, 1)) > MAX_BEGINNINGS:
            break
        prompts += more
    count = chosen_rows(prompts, 2, in_single_tokens(prompts))
    assert num_saved(count) == best_of_all_sets(prompts, 2, 1)


def test_more_than_two_rows_for_each_prefix_cost_little():
    """The choice is then no longer the best one in rare cases."""
    saved = best = 0
    for seed in SMALL:
        prompts = related_prompts(seed)
        for min_rows in (3, 4, 6):
            count = chosen_rows(prompts, min_rows)
            assert min(count.values(), default=min_rows) >= min_rows
            most = best_of_all_sets(prompts, min_rows)
            assert most >= num_saved(count) >= 0.75 * most
            saved, best = saved + num_saved(count), best + most
    assert saved > 0.99 * best


def test_a_document_with_few_questions_is_left_to_the_beginning_before_it():
    system = [1] * 64
    documents = {name: system + [name] * 16 for name in (2, 3)}
    prompts = [documents[2] + [9, i] for i in range(20)] + [documents[3] + [9, i] for i in range(2)]
    prompts += [[*system, 4, i] for i in range(3)]
    assert chosen_rows(prompts, 2) == {tuple(documents[2]): 20, tuple(system): 5}


def test_a_prompt_that_is_a_beginning_itself_counts_for_the_shorter_one():
    """It has no token left after the longer beginning."""
    long, short = [1] * 32, [1] * 16
    prompts = [long, [*long, 2], [*long, 3], [*short, 4]]
    assert chosen_rows(prompts, 2) == {tuple(short): 4}
    assert chosen_rows(prompts[:1] + prompts[3:], 2) == {tuple(short): 2}


@pytest.mark.parametrize("max_hashes", [10**6, 60])
@pytest.mark.parametrize("seed", range(60))
def test_the_table_shows_the_chosen_prefix_of_each_row(seed, max_hashes):
    prompts = related_prompts(seed)
    table, _ = table_of(prompts, max_hashes)
    chosen = choose_prefixes(table, lengths_of(prompts), 2)
    if not chosen:
        return
    prefixes = PrefixGrid(1, 8, 64, tuple(chosen))
    found = prefixes_of_rows(table, lengths_of(prompts), prefixes)
    assert found == list(map(prefixes.prefix_of, prompts))
    assert set(found) - {None} == set(chosen)


def test_most_jobs_of_related_prompts_have_prefixes():
    """The tests above are not about empty choices."""
    assert sum(bool(chosen_rows(related_prompts(seed), 2)) for seed in range(60)) > 40


def test_a_part_of_the_rows_has_prefixes_of_its_own():
    prompts = [[1] * 32 + [i] for i in range(4)] + [[2] * 32 + [i] for i in range(4)]
    table, _ = table_of(prompts)
    part = table.of_rows([0, 1, 5, 6, 7])
    lengths = np.full(5, 33)
    assert choose_prefixes(part, lengths, 3) == [PlannedPrefix(32, hash_tokens([2] * 32))]


def test_nothing_shared_gives_no_prefixes():
    assert choose_prefixes(NOTHING_SHARED, np.zeros(0, np.int64), 2) == []
    alone, _ = table_of([[1] * 40])
    assert choose_prefixes(alone, np.array([40]), 2) == []


def table_with(shared: np.ndarray) -> PrefixTable:
    """Return a table of rows that are in order already."""
    hashes = np.arange(len(shared), dtype=np.uint64) + 1
    return PrefixTable(np.arange(len(shared), dtype=np.int32), shared.astype(np.int32), hashes)


@pytest.mark.parametrize("step", [16, 160])
def test_a_long_conversation_is_a_deep_chain(step):
    """Each row continues the one before; a prefix of n rows gives each of them its length."""
    count = 5_000
    shared = step * np.arange(count)
    table, lengths = table_with(shared), shared + step + 3
    chosen = choose_prefixes(table, lengths, 2)
    prefixes = PrefixGrid(1, 8, 64, tuple(chosen))
    num_rows = Counter(prefixes_of_rows(table, lengths, prefixes))
    assert min(num_rows[prefix] for prefix in chosen) >= 2
    saved = sum(prefix.length * (num_rows[prefix] - 1) for prefix in chosen)
    # one prefix for all rows from the middle on is the best single one
    assert saved > 1.2 * step * count**2 / 4


def test_a_large_job_takes_seconds():
    rng = np.random.default_rng(0)
    shared = UNIT * rng.integers(0, 40, 100_000)
    shared[0] = 0
    lengths = np.maximum(shared, np.r_[shared[1:], 0]) + rng.integers(0, 50, len(shared))
    table = table_with(shared)
    chosen = choose_prefixes(table, lengths, 8)
    prefixes = PrefixGrid(1, 1024, 64, tuple(chosen))
    num_rows = Counter(prefixes_of_rows(table, lengths, prefixes))
    assert len(chosen) > 100
    assert min(num_rows[prefix] for prefix in chosen) >= 8
