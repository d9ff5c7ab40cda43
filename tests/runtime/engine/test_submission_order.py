"""The order of submission: longest rows first, with rows for every slot length at any time."""

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.engine.shared_prefixes import submission_order

GRID = BucketGrid(100, ((60, 1),), 4, (50, 100), span_slots=(4, 1))


def test_the_longest_need_comes_first_and_equal_ones_stay_in_order():
    needs = [(10, 5), (20, 30), (10, None), (5, 10), (3, 47)]
    assert submission_order(needs) == [2, 1, 4, 0, 3]


def test_rows_of_every_length_of_slots_come_evenly_spread():
    """Three of nine rows need a long slot: one in each third, the longest row of each first."""
    needs = [(10, n) for n in range(30, 36)] + [(40, n) for n in (20, 21, 22)]
    assert submission_order(needs, GRID) == [5, 8, 4, 3, 7, 2, 1, 6, 0]


def test_a_row_that_fits_no_slot_is_fed_too():
    assert sorted(submission_order([(10, 500), (10, 5)], GRID)) == [0, 1]
