"""The pool of pages alone, against a plain model of slots and counts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.engine.page_pool import PagePool

GRID = BucketGrid(
    max_length=64,
    prefill=((64, 1),),
    decode_slots=6,
    pages=20,
    page=8,
)
NONE = GRID.pages


def pages_of(pool: PagePool, slot: int) -> list[int]:
    return pool.table[slot, : pool.held_B[slot]].tolist()


def test_a_slot_takes_the_pages_that_it_lacks():
    pool = PagePool(GRID)
    pool.take(2, 9)
    assert pages_of(pool, 2) == [0, 1]
    pool.take(2, 16)
    assert pages_of(pool, 2) == [0, 1]
    pool.take(2, 17)
    assert pages_of(pool, 2) == [0, 1, 2]
    assert pool.num_free == 17
    assert pool.rows([2, None], 4).tolist() == [[0, 1, 2, NONE], [NONE] * 4]
    missing = pool.num_missing(np.array([1, 40]), np.array([0, 2]))
    assert missing.tolist() == [1, 2]


def test_full_pages_are_shared_and_the_last_one_is_copied():
    pool = PagePool(GRID)
    pool.take(0, 30)
    assert pool.share(0, 1, 20) == [(2, 4)]
    assert pages_of(pool, 1) == [0, 1, 4]
    assert pool.share(0, 2, 16) == []
    assert pages_of(pool, 2) == [0, 1]
    pool.release(0)
    assert pool.num_free == 20 - 3
    pool.release(1)
    pool.release(2)
    assert pool.num_free == 20


def test_unclean_pages_are_cleared_when_they_are_taken_again():
    pool = PagePool(GRID)
    pool.take(0, 16)
    pool.mark_unclean(pool.table[0])
    assert pool.pages_to_clear() == []
    pool.release(0)
    pool.take(1, 24)
    assert sorted(pool.pages_to_clear()) == [0, 1]
    assert pool.pages_to_clear() == []
    pool.release(1)
    pool.take(1, 24)
    assert pool.pages_to_clear() == []


def test_a_page_that_was_not_cleared_stays_unclean():
    pool = PagePool(GRID)
    pool.take(0, 8)
    pool.mark_unclean(pool.table[0])
    pool.release(0)
    pool.take(1, 8)
    pool.release(1)
    assert pool.pages_to_clear() == []
    pool.take(2, 8)
    assert pool.pages_to_clear() == pages_of(pool, 2)


def test_a_copy_needs_no_clearing():
    pool = PagePool(GRID)
    pool.take(0, 8)
    pool.take(1, 8)
    pool.mark_unclean(pool.table[1])
    pool.release(1)
    ((_, page),) = pool.share(0, 2, 4)
    assert pool.pages_to_clear() == []
    pool.release(2)
    pool.take(3, 8)
    assert pages_of(pool, 3) == [page]
    assert pool.pages_to_clear() == []


def test_a_slot_of_another_group_gets_copies_and_has_pages_of_its_own():
    pool = PagePool(replace(GRID, pages=24, slot_groups=3))
    pool.take(0, 12)
    assert pool.num_free_G.tolist() == [6, 8, 8]
    assert pool.share(0, 2, 12) == [(0, 8), (1, 9)]
    assert pool.share(0, 1, 12) == [(1, 2)]
    assert pool.num_free_G.tolist() == [5, 6, 8]
    pool.release(2)
    assert pool.num_free_G.tolist() == [5, 8, 8]


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_agree_with_a_plain_model(seed):
    rng, pool = np.random.default_rng(seed), PagePool(GRID)
    held: dict[int, list[int]] = {slot: [] for slot in range(6)}
    unclean: set[int] = set()
    for _ in range(400):
        slot, length = int(rng.integers(6)), int(rng.integers(1, 65))
        used = {page for pages in held.values() for page in pages}
        free, kind = set(range(20)) - used, rng.integers(4)
        if kind == 0 and GRID.num_pages(length) - len(held[slot]) <= len(free):
            pool.take(slot, length)
            new = pages_of(pool, slot)[len(held[slot]) :]
            assert set(new) <= free and len(set(new)) == len(new)
            held[slot] += new
            assert len(held[slot]) >= GRID.num_pages(length)
            cleared = pool.pages_to_clear()
            assert set(cleared) == unclean.intersection(new)
            unclean -= set(cleared)
        elif kind == 1 and not held[slot] and free:
            source = int(rng.integers(6))
            length = min(length, 8 * len(held[source]))
            copied = pool.share(source, slot, length)
            held[slot] = held[source][: length // 8]
            assert len(copied) == (length % 8 > 0)
            for source_page, page in copied:
                assert source_page == held[source][length // 8] and page in free
                held[slot] = [*held[slot], page]
                unclean.discard(page)
        elif kind == 2:
            pool.release(slot)
            held[slot] = []
        elif kind == 3 and rng.random() < 0.3:
            pool.mark_unclean(pool.table[slot])
            unclean |= set(held[slot])
        assert {slot: pages_of(pool, slot) for slot in held} == held
        assert (pool.table[pool.table != NONE]).size == sum(map(len, held.values()))
        assert pool.num_free == 20 - len(set().union(*held.values()))
        users = Counter(page for pages in held.values() for page in pages)
        assert pool._num_users.tolist() == [users[page] for page in range(20)]
