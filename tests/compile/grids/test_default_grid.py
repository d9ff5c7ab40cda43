"""The derived grid: it fits every row that the model can run, with the least prefill padding."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest

from noria.compile.grids.default_grid import derive_grid, ladder_grid, with_overrides
from noria.compile.grids.grid_defaults import LENGTH_STEP, GridDefaults
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.grids.prefill_ladder import _batch_sizes, cheapest_prefill, prefill_padding
from noria.compile.grids.row_shape import RowShape
from noria.sharding.layout import Layout


def rows_of(lengths, max_tokens=16):
    return [RowShape(int(length), max_tokens) for length in lengths]


def cost_of(lengths, buckets, price_of_graph) -> int:
    """Return the computed tokens plus the price of the graphs in tokens."""
    return prefill_padding(lengths, buckets)[1] + len(buckets) * price_of_graph


def brute_force(lengths, defaults: GridDefaults, price_of_graph: int) -> int:
    """Return the cost of the best borders and batches, by exhaustive search."""
    borders = sorted({-(-length // LENGTH_STEP) * LENGTH_STEP for length in lengths})
    best = None
    for count in range(1, defaults.max_prefill_graphs + 1):
        for chosen in combinations(borders[:-1], min(count, len(borders)) - 1):
            ends = [*chosen, borders[-1]]
            batches = []
            for start, end in pairwise([0, *ends]):
                rows = sum(start < length <= end for length in lengths)
                half = -(-defaults.tokens_per_prefill // (2 * end))
                most = max(1, defaults.tokens_per_prefill // end)
                batches.append(range(min(half, rows, most), most + 1))
            for sizes in product(*batches):
                buckets = [PrefillBucket(*pair) for pair in zip(ends, sizes, strict=True)]
                computed = cost_of(lengths, buckets, price_of_graph)
                best = computed if best is None else min(best, computed)
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("price_of_graph", [0, 150])
@pytest.mark.parametrize("graphs", [1, 2, 3])
def test_the_prefill_buckets_are_those_of_least_cost(seed, graphs, price_of_graph):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 150, size=rng.integers(1, 25)).tolist()
    defaults = GridDefaults(tokens_per_prefill=128, max_prefill_graphs=graphs)
    chosen = cheapest_prefill(lengths, 4096, defaults, price_of_graph=price_of_graph)
    assert len(chosen) <= graphs
    best = brute_force(lengths, defaults, price_of_graph)
    assert cost_of(lengths, chosen, price_of_graph) == best


def test_every_row_that_the_model_can_hold_fits():
    rng = np.random.default_rng(0)
    rows = [
        RowShape(int(length), int(tokens))
        for length, tokens in zip(rng.integers(1, 400, 50), rng.integers(1, 100, 50), strict=True)
    ]
    grid = derive_grid(rows, 8192)
    for row in rows:
        assert grid.fit(row.prompt_length, row.max_tokens)


def test_a_row_beyond_the_models_length_does_not_stretch_the_grid():
    grid = derive_grid([*rows_of([20, 30]), RowShape(20, 10**6), RowShape(9000, 10)], 512)
    assert grid.max_length == 48
    assert grid.prefill[-1].length == 32


def test_a_row_without_max_tokens_gets_the_planned_output_up_to_the_models_length():
    defaults = GridDefaults(unspecified_output=100)
    assert derive_grid([RowShape(20, None)], 512, defaults).max_length == 128
    assert derive_grid([RowShape(20, None)], 64, defaults).max_length == 64


def test_slots_count_sequences_and_stop_at_the_limit():
    assert derive_grid([RowShape(5, 5, num_sequences=3), RowShape(5, 5)], 512).decode_slots == 4
    assert derive_grid(rows_of([5] * 200), 512).decode_slots == GridDefaults().max_decode_slots


def test_score_graphs_are_planned_only_when_a_row_is_scored():
    assert not derive_grid(rows_of([5]), 512).score
    assert derive_grid([RowShape(5, 0, is_scored=True)], 512).score


def test_a_job_without_runnable_rows_still_has_a_grid():
    assert derive_grid([], 512).decode_slots == 1


@pytest.mark.parametrize("max_length", [1, 2, 16, 100, 2048])
def test_the_ladder_reaches_its_length(max_length):
    grid = ladder_grid(max_length, 8, score=True)
    assert grid.prefill[-1].length == grid.max_length == max_length
    assert grid.pages == 8 * -(-max_length // 64)
    assert grid.score


def test_a_length_too_short_for_the_layout_is_refused_with_both_numbers():
    message = "max_length: expected at least 24, .* got 16. Plan longer rows"
    with pytest.raises(ValueError, match=message):
        ladder_grid(16, 8, score=False, defaults=GridDefaults(length_multiple=24))


def test_a_page_divides_as_the_layout_splits_the_cache():
    rows = [RowShape(900, 50)]
    assert derive_grid(rows, 1000).page == 64
    table = {"name": "ring", "mesh": {"data": 128}, "rules": {"cache_length": "data"}}
    assert GridDefaults.for_layout(Layout.from_table(table)).page == 128
    pages = [GridDefaults.for_layout(None, "tpu", codes).page for codes in (None, "int8")]
    assert pages == [64, 128]
    assert GridDefaults.for_layout(None, "gpu", "int8").page == 64
    for groups in (1, 4):
        defaults = GridDefaults(page=128, slot_multiple=groups, slot_groups=groups)
        for grid in (
            derive_grid(rows, 1000, defaults),
            ladder_grid(1000, 4, score=False, defaults=defaults),
        ):
            assert (grid.page, grid.slot_groups or 1) == (128, groups)
            assert grid.pages == 8 * grid.decode_slots


@pytest.mark.parametrize("multiple", [3, 32, 48])
def test_a_row_fits_the_grid_that_is_derived_for_it_whatever_the_layout_splits(multiple):
    for length in (20, 32, 50):
        grid = derive_grid([RowShape(length, 10)], 1000, GridDefaults(page_multiple=multiple))
        assert grid.fit(length, 10)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_few_rows_are_one_call_without_dummies(rows):
    grid = derive_grid([RowShape(32, 4)] * rows, max_position=128)
    assert grid.prefill == (PrefillBucket(32, rows),)


@pytest.mark.parametrize("impossible", [RowShape(500, 8), RowShape(5, 10**6), RowShape(128, None)])
@pytest.mark.parametrize("max_tokens", [8, None])
def test_rows_that_no_grid_can_hold_do_not_change_it(impossible, max_tokens):
    rows = [RowShape(20, max_tokens), RowShape(30, max_tokens)]
    defaults = GridDefaults(unspecified_output=16)
    assert derive_grid([*rows, impossible], 128, defaults) == derive_grid(rows, 128, defaults)


def test_a_job_that_only_scores_has_no_slots_and_the_same_prefill():
    rows = [RowShape(length, 0, is_scored=True) for length in (5, 40, 300, 41)]
    grid = derive_grid(rows, 512)
    kept = derive_grid(rows, 512, with_overrides(GridDefaults(), {"decode_slots": 4}))
    assert (grid.decode_slots, grid.pages, grid.page) == (0, None, None)
    assert derive_grid(rows, 512, with_overrides(GridDefaults(), {"decode_slots": 0})) == grid
    assert kept.decode_slots and kept.pages
    assert grid.prefill == kept.prefill
    for other in (RowShape(5, 1), RowShape(5, None, is_scored=True)):
        assert derive_grid([*rows, other], 512).decode_slots
    assert derive_grid(rows, 512, GridDefaults(chunks=(16,))).decode_slots


def test_a_prompt_as_long_as_the_model_can_be_scored():
    grid = derive_grid([RowShape(128, 0, is_scored=True)], 128)
    assert grid.fit(128, 0).length == 128


@pytest.mark.parametrize("max_position", [100, 512, 8192])
@pytest.mark.parametrize("chunk", [16, 48, 96])
def test_a_grid_of_chunks_holds_every_prompt(chunk, max_position):
    rows = [RowShape(length, 4) for length in (1, chunk, max_position - 4)]
    grid = derive_grid(rows, max_position, GridDefaults(chunks=(chunk,)))
    for row in rows:
        assert grid.fit(row.prompt_length, row.max_tokens).tokens == chunk
    assert grid.chunks and grid.chunks == (chunk,)


def test_a_chunk_call_has_as_many_pieces_as_fill_it_and_no_more_than_prompts_have():
    grids = [
        derive_grid([RowShape(200, 8)] * n, 8192, GridDefaults(chunks=(128,))) for n in (1, 3, 9)
    ]
    assert [grid.prefill[0].batch for grid in grids] == [2, 4, 4]


def test_prompts_that_are_only_scored_are_poured_in_full_calls():
    """Each scored prompt takes a slot during its prefill, as a generating prompt does."""
    scored, generating = (
        derive_grid([RowShape(200, n, is_scored=True)] * 64, 1024, GridDefaults(chunks=(64,)))
        for n in (0, 1)
    )
    assert scored.decode_slots == generating.decode_slots == 64
    assert [b.batch for b in scored.prefill] == [b.batch for b in generating.prefill]


def test_chunks_of_several_sizes_share_the_rows_that_there_are():
    grid = derive_grid([RowShape(100, 8)] * 8, 8192, GridDefaults(chunks=(16, 128)))
    assert [(bucket.chunk, bucket.batch) for bucket in grid.prefill] == [(16, 28), (128, 4)]


def test_a_chunk_longer_than_every_row_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"buckets.chunk: expected at most 100, .* got 128"):
        derive_grid([RowShape(10, 8)], 100, GridDefaults(chunks=(128,)))


def test_chunks_are_padded_to_whole_ones_alone():
    assert prefill_padding([1, 16, 17], [PrefillBucket(64, 2, 16)]) == (34, 64)


def test_the_ladder_of_chunks_reaches_its_length():
    grid = ladder_grid(2048, 8, score=True, defaults=GridDefaults(chunks=(256,)))
    assert grid.prefill[-1].length == grid.max_length == 2048


def test_rows_without_max_tokens_go_as_far_as_the_cache_fits():
    rows, defaults = [RowShape(20, None)] * 4, GridDefaults(unspecified_output=100)

    assert derive_grid(rows, 4096, defaults, lambda length: True).max_length == 4096
    assert derive_grid(rows, 4096, defaults, lambda length: length <= 1000).max_length == 960
    # a lack of memory never reduces a plan below the expected lengths
    assert derive_grid(rows, 4096, defaults, lambda length: False).max_length == 128
    limited = [RowShape(20, 100)] * 4
    assert derive_grid(limited, 4096, defaults, lambda length: True).max_length == 128


@pytest.mark.parametrize("asked", [1024, 64])
def test_a_grid_has_the_length_that_a_user_asks_for(asked):
    defaults = with_overrides(GridDefaults(), {"max_length": asked})
    grid = derive_grid([RowShape(10, None), RowShape(5, 3)], 8192, defaults, lambda _: True)
    assert grid.max_length == asked
    assert grid.pages == asked // 64 + 1, "only one row may be as long"


def test_there_are_fewer_slots_than_a_device_holds_rows():
    def holds(rows, length):
        return rows * length <= 400

    grid = derive_grid([RowShape(90, 6)] * 9, 8192, holds=holds)
    assert (grid.max_length, grid.decode_slots) == (96, 4)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (5, "buckets: expected a table, got 5"),
        ("chunk", "buckets: expected a table, got 'chunk'"),
        ({"max_length": "x"}, "buckets.max_length: expected a positive integer, got 'x'"),
        ({"max_length": 2**31}, "buckets.max_length: expected at most 2147483647, got 2147483648"),
        ({"chunk": {}}, "buckets.chunk: expected growing positive integers, got"),
    ],
)
def test_what_no_grid_can_be_derived_for_is_refused_by_its_key(asked, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(GridDefaults(), asked)


@pytest.mark.parametrize("multiple", [1, 3, 7])
def test_batches_are_multiples_up_to_the_target_of_tokens(multiple):
    defaults = GridDefaults(tokens_per_prefill=640, batch_multiple=multiple)
    every = {-(-n // multiple) * multiple for n in range(1, 11)}
    assert _batch_sizes(64, defaults) == sorted(every, reverse=True)


def test_buckets_of_very_many_devices_are_found_at_once():
    defaults = GridDefaults(tokens_per_prefill=2**50, batch_multiple=2**40)
    (bucket,) = cheapest_prefill([16, 16], 32, defaults)
    assert bucket == PrefillBucket(16, 2**40)


def test_a_page_is_a_power_of_two():
    found = with_overrides(GridDefaults(), {"page": 16})
    assert found.page == 16 and found.keeps_slots
    for page in (False, -1, 0, 24):
        with pytest.raises(ValueError, match=r"buckets\.page: expected"):
            with_overrides(GridDefaults(), {"page": page})
