"""Buckets: the bucket of each length, and refusals by name."""

import itertools
from dataclasses import replace
from functools import partial

import pytest

from noria.compile.grids.bucket_grid import (
    CHUNKS_PER_DECODE,
    BucketGrid,
    NoBucketFits,
    NoDecodeSlots,
)
from noria.compile.grids.grid_values import window_pages
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid

GRID = BucketGrid(max_length=96, prefill=((16, 4), (64, 2)), decode_slots=8, page=16)
ONE = PrefixGrid(1, 8, 16, (PlannedPrefix(20, "0" * 16),))


@pytest.mark.parametrize(("length", "bucket"), [(1, (16, 4)), (16, (16, 4)), (17, (64, 2))])
def test_a_prompt_goes_to_the_shortest_bucket_that_holds_it(length, bucket):
    assert GRID.fit(length, 8) == PrefillBucket(*bucket)


def test_a_prompt_longer_than_every_bucket_is_refused_with_both_numbers():
    with pytest.raises(NoBucketFits, match=r"prefill length 65; .*lengths \[16, 64\]"):
        GRID.fit(65, 1)


def test_an_output_that_does_not_fit_beside_its_prompt_is_refused():
    assert GRID.fit(64, 32)
    with pytest.raises(NoBucketFits, match=r"need 97 positions; buckets.max_length is 96"):
        GRID.fit(64, 33)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": ()}, "buckets.prefill lengths: expected growing"),
        ({"page": 24}, "buckets.page: expected a power of two, got 24"),
        ({"pages": 5}, r"pages: expected at least 6, as a row of max_length \(96\) takes 6"),
        ({"pages": 10, "slot_groups": 2}, r"at least 12, .* 6 pages of 16 in each of 2 buckets"),
        ({"pages": 49, "slot_groups": 2}, r"pages: expected a multiple .*groups \(2\), .* got 49"),
        ({"slot_groups": 3}, r"decode_slots: expected a multiple .*groups \(3\), .* got 8"),
        ({"slot_groups": 0}, "slot_groups: expected a positive integer"),
        (
            {
                "slot_groups": 2,
                "prefixes": ONE,
                "prefill": ((96, 2),),
                "chunk": 16,
            },
            r"prefixes.groups: expected a multiple of buckets.slot_groups \(2\), .* got 1",
        ),
        ({"decode_slots": 0, "score": True}, "buckets.pages: with buckets.decode_slots = 0"),
        ({"decode_slots": 0, "score": True, "pages": None}, "buckets.pages?: .* got "),
        ({"prefill": ((64, 2), (16, 4))}, "buckets.prefill lengths: expected growing"),
        ({"prefill": ((16, 0),)}, "batch of length 16: expected a positive integer, got 0"),
        ({"prefill": ((128, 1),)}, r"lengths of at most max_length \(96\), got 128"),
        ({"decode_slots": False}, "buckets.decode_slots: expected a positive integer, got False"),
        ({"decode_slots": True}, "buckets.decode_slots: expected a positive integer, got True"),
        ({"prefill": 7}, "buckets.prefill: expected a list, got 7"),
        ({"prefill": (16, 4)}, "buckets.prefill: expected pairs of length and batch, got 16"),
        ({"prefill": ((16, 4, 1),)}, r"pairs of length and batch, got \(16, 4, 1\)"),
        ({"score": 1}, "buckets.score: expected true or false, got 1"),
        ({"steps_per_call": -1}, "buckets.steps_per_call: expected a positive integer, got -1"),
        ({"steps_per_call": 2**31}, "buckets.steps_per_call: expected at most 2147483647, got 214"),
        ({"decode_slots": 10**30}, "buckets.decode_slots: expected at most 2147483647, got 1000"),
        ({"prefill": ((16, 2**31),)}, "length 16: expected at most 2147483647, got 2147483648"),
        ({"max_length": 10**30}, "buckets.max_length: expected at most 2147483647, got 10000"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_by_key(change, message):
    with pytest.raises(ValueError, match=message):
        BucketGrid.from_table(GRID.to_table() | change)


def test_a_grid_has_pages_of_64_for_all_slots_by_default():
    grid = BucketGrid(max_length=96, prefill=((16, 4),), decode_slots=8)
    assert (grid.pages, grid.page) == (16, 64)
    assert GRID.pages == 8 * 6
    assert replace(grid, page=32, pages=9).pages == 9


SCORING = BucketGrid(96, GRID.prefill, decode_slots=0, score=True)


def test_a_grid_without_slots_scores_whole_prompts_alone():
    assert BucketGrid.from_table(SCORING.to_table()) == SCORING
    assert SCORING.fit(17, 0) == PrefillBucket(64, 2)
    assert SCORING.pages is None
    for max_tokens in (None, 1):
        with pytest.raises(NoDecodeSlots, match=r"the plan has no decode slots \(.* max_tokens 0"):
            SCORING.fit(17, max_tokens)
    with pytest.raises(NoBucketFits, match="prefill length 65"):
        SCORING.fit(65, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": 8, "page": 16}, "pages: .* expected none; got 8"),
        ({"score": False}, "score: .* expected true; got False. Change it, or plan decode slots"),
        ({"chunk": 16}, r"chunk: .* none, as prompts in chunks need a slot; got \(16,\)"),
    ],
)
def test_what_needs_slots_is_refused_without_any(change, message):
    with pytest.raises(ValueError, match=f"buckets.{message}"):
        BucketGrid.from_table(SCORING.to_table() | change)


def test_a_graph_has_no_more_positions_than_the_limit():
    grid = partial(BucketGrid, 2**20, GRID.prefill, steps_per_call=1, pages=2**14)
    grid(decode_slots=2**20)
    with pytest.raises(ValueError, match="decode_slots: expected at most 1048576, got 1048577"):
        grid(decode_slots=2**20 + 1)


PACKED = BucketGrid(100, ((100, 9, 4), (100, 2, 16)), decode_slots=8, pages=14, page=8)
ONE_CHUNK = BucketGrid(100, ((100, 4, 16),), decode_slots=8, page=16)


@pytest.mark.parametrize("lengths", [(48,), (48, 100), (96,)])
def test_chunks_have_one_length(lengths):
    message = r"buckets.prefill: with buckets.chunk, .* \[\[100, ...\]\], got "
    with pytest.raises(ValueError, match=message):
        replace(PACKED, prefill=tuple((length, 2, 4) for length in lengths))


def test_chunks_in_pages_are_no_longer_than_a_row():
    with pytest.raises(
        ValueError, match=r"buckets.chunk: expected at most max_length \(100\), got"
    ):
        replace(PACKED, prefill=((100, 2, 128),))


def test_the_pieces_of_a_size_that_follow_each_other_fit_the_same_calls():
    assert BucketGrid.from_table(PACKED.to_table()) == PACKED
    assert [PACKED.num_alike(55, start, 55) for start in (0, 16, 48, 52)] == [3, 2, 2, 1]
    # a shared prefix ends before its prompt
    assert PACKED.num_alike(55, 0, 32) == 2
    assert GRID.num_alike(55, 0, 55) == 1


@pytest.mark.parametrize("page", [1, 2, 8])
def test_the_pages_of_a_slot_hold_a_window_and_new_tokens_wherever_they_begin(page):
    for window, row_tokens in itertools.product(range(1, 20, 3), (1, 4, 7)):
        count = window - 1 + row_tokens
        touched = [(first + count - 1) // page - first // page + 1 for first in range(page)]
        assert window_pages(window, row_tokens, page, 1000) == max(touched)
    assert window_pages(9, 8, 8, 32) == 3 and window_pages(9, 8, 8, 24) is None


def test_a_call_has_no_more_tokens_of_a_row_than_the_plan_says():
    few = replace(PACKED, row_tokens=32)
    assert BucketGrid.from_table(few.to_table()) == few
    assert [few.num_alike(99, 0, 99), PACKED.num_alike(99, 0, 99)] == [2, 6]
    assert few.window_pages(9) == 6 and PACKED.window_pages(9) is None
    assert few.window_pages(70) is None, "rows have no more pages"


@pytest.mark.parametrize(
    ("grid", "row_tokens", "message"),
    [
        (PACKED, 24, r"multiple of the largest buckets.chunk \(16\), .* got 24. Change it"),
        (PACKED, 0, "expected"),
        (SCORING, 16, "with buckets.decode_slots = 0, .* expected none; got 16"),
    ],
)
def test_tokens_of_a_row_are_whole_chunks_beside_pages(grid, row_tokens, message):
    with pytest.raises(ValueError, match=f"buckets.row_tokens: .*{message}"):
        replace(grid, row_tokens=row_tokens)


def test_padding_takes_no_positions_in_pages():
    assert PACKED.fit(99, 1).length == 100
    whole = replace(PACKED, prefill=((100, 2, 16),))
    assert whole.fit(98, 2) == (100, 2, 16) and whole.computed_length(98) == 112
    with pytest.raises(NoBucketFits, match="prefill length 101"):
        whole.fit(101, 0)


def test_a_call_reads_the_entries_of_its_pieces():
    small, large = PACKED.prefill
    call = PACKED.prefill_call(small, entries=300)
    assert (call.phase, call.entries, call.page, call.num_tokens) == ("chunk", 300, 8, 36)
    assert PACKED.prefill_call(large).entries == 2 * 104


@pytest.mark.parametrize(
    ("start", "bucket"),
    [(0, (100, 2, 16)), (48, (100, 2, 16)), (64, (100, 9, 4)), (72, (100, 9, 4))],
)
def test_a_prompt_begins_in_whole_large_chunks_and_ends_in_small_ones(start, bucket):
    assert PACKED.bucket_of(74, start) == PrefillBucket(*bucket)
    assert PACKED.bucket_of(16) == PrefillBucket(100, 2, 16)


def test_only_the_smallest_chunk_is_padded():
    assert PACKED.computed_length(74) == 76
    assert PACKED.fit(95, 5) == PrefillBucket(100, 2, 16)


def test_decode_goes_on_between_chunks_by_default():
    assert PACKED.chunks_per_decode == CHUNKS_PER_DECODE
    assert GRID.chunks_per_decode is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, r"buckets.chunk: expected growing positive integers, got \[0\]"),
        ({"chunk": True}, r"buckets.chunk: expected growing positive integers, got \[True\]"),
        ({"chunk": []}, r"buckets.chunk: expected growing positive integers, got \[\]"),
        ({"chunk": [16, 8]}, r"buckets.chunk: expected growing positive integers, got \[16, 8\]"),
        ({"chunk": [16, 24]}, r"multiple of the one before, .* \[16, 24\], where \[24\] are"),
        ({"chunk": [8, 16]}, r"a batch for each of buckets.chunk \[8, 16\], got \[100, 4\]"),
        ({"chunks_per_decode": 0}, "chunks_per_decode: expected a positive integer, got 0"),
        ({"chunk": None}, "chunks_per_decode: expected none without buckets.chunk, got 32"),
        ({"prefill": [[100, 4, 2]]}, r"for each of buckets.chunk \[16\], got \[100, 4, 2\]"),
    ],
)
def test_chunks_that_make_no_sense_are_refused_by_key(change, message):
    with pytest.raises(ValueError, match=message):
        BucketGrid.from_table(ONE_CHUNK.to_table() | change)


@pytest.mark.parametrize("grid", [GRID, PACKED, ONE_CHUNK])
def test_a_grid_is_read_back_from_its_table(grid):
    assert BucketGrid.from_table(grid.to_table()) == grid


def test_one_chunk_may_be_given_as_a_number():
    assert BucketGrid.from_table(ONE_CHUNK.to_table() | {"chunk": 16}) == ONE_CHUNK
    assert PACKED.to_table()["prefill"] == [[100, 9, 2]]
