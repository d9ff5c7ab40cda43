"""Prompts that share much share pieces and pages, and never so that a row no longer fits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from related_prompts import table_of
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel, model_sizes
from noria.compile.grids import prefix_choice
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.default_grid import derive_grid
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefix_choice import prefixes_of_rows
from noria.compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.cost import CostModel
from noria.compile.planning.graph_prices import GraphPrices
from noria.compile.planning.run_bounds import ExpectedRow
from noria.compile.planning.work import Work
from noria.modelzoo.config import DecoderConfig
from noria.runtime.files.layout_files import named_layout_tables, read_layout_table
from noria.runtime.planning import shared_grids
from noria.runtime.planning.search import simulate_in_order
from noria.runtime.planning.shared_grids import fits_grid, with_sharing
from noria.runtime.rows.prefix_index import UNIT, PrefixIndex
from noria.sharding.layout import Layout
from noria.sharding.legality import check

CONTEXT = 1000
DIVISIBLE = DecoderConfig.alike(
    vocab_size=1000,
    embed=96,
    mlp=192,
    num_query_heads=48,
    num_kv_heads=24,
    head_dim=48,
    windows=(None,),
    max_position=CONTEXT,
)
"""A model that all named layouts can split."""
HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
PRICES = GraphPrices(
    CostModel(Work(AbstractModel(replace(CONFIG, max_position=CONTEXT)), "float32"), HARDWARE)
)


def few_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 9, count).tolist()


def rows_and_table(lengths: list[int], shared: int) -> tuple[list[ExpectedRow], PrefixTable]:
    prompts = [few_tokens(shared, 0) + few_tokens(n, i + 1) for i, n in enumerate(lengths)]
    table, _ = table_of(prompts)
    return [ExpectedRow(RowShape(len(prompt), 4), 4) for prompt in prompts], table


def choose(rows, table, defaults: GridDefaults | None = None) -> tuple[BucketGrid, BucketGrid]:
    """Return the grid of whole prompts and the chosen grid."""
    defaults = defaults or GridDefaults()

    def derive(rows: Sequence[RowShape], defaults: GridDefaults) -> BucketGrid:
        return derive_grid(rows, CONTEXT, defaults)

    whole = derive([row.need for row in rows], defaults)
    return whole, with_sharing(whole, rows, table, defaults, PRICES, derive)


def test_prompts_with_one_long_beginning_share_it_if_that_is_predicted_faster():
    rows, table = rows_and_table([20, 30, 40, 50] * 30, shared=500)
    whole, chosen = choose(rows, table)
    assert chosen.chunks
    shared, computed = (
        simulate_in_order(rows, grid, PRICES.cost, table) for grid in (chosen, whole)
    )
    assert shared.seconds < 0.5 * computed.seconds
    assert shared.metrics.saved_tokens > 0.7 * 500 * len(rows)


def test_scored_prompts_with_one_long_beginning_copy_pieces_of_it():
    index = PrefixIndex()
    prompts = [few_tokens(500, 0) + few_tokens(20 + i % 40, i + 1) for i in range(120)]
    for row, prompt in enumerate(prompts):
        index.add(row, prompt, 0)
    rows = [ExpectedRow(RowShape(len(prompt), 0, is_scored=True), 0) for prompt in prompts]
    table = index.table()
    whole, chosen = choose(rows, table)
    assert whole.decode_slots == 0 and chosen.chunks and chosen.score
    metrics = simulate_in_order(rows, chosen, PRICES.cost, table).metrics
    assert metrics.saved_tokens > 0.7 * 500 * len(rows)


def test_a_beginning_of_many_rows_is_read_once_if_that_is_predicted_faster(monkeypatch):
    """Questions about one document read it once; a beginning below a page is read by each row."""
    for shared, is_grouped in ((500, True), (48, False)):
        rows, table = rows_and_table([20, 30, 40, 50] * 30, shared)
        _, chosen = choose(rows, table)
        assert (chosen.prefixes is not None) == is_grouped
        with monkeypatch.context() as patch:
            patch.setattr(prefix_choice, "GROUPS", ())
            _, other = choose(rows, table)
        assert other.prefixes is None
        seconds = [
            simulate_in_order(rows, grid, PRICES.cost, table).seconds for grid in (chosen, other)
        ]
        assert seconds[0] < seconds[1] if is_grouped else seconds[0] == seconds[1]


def test_prefixes_have_slots_and_pages_beside_those_of_all_rows():
    """Otherwise the last row would wait for a slot until all others end, and decode alone."""
    rows, table = rows_and_table([30, 40] * 12, shared=128)
    whole, chosen = choose(rows, table)
    assert whole.decode_slots == len(rows) < chosen.decode_slots
    calls = [
        simulate_in_order(rows, grid, PRICES.cost, table).metrics.decode.calls
        for grid in (whole, chosen, replace(chosen, decode_slots=len(rows)))
    ]
    assert calls[0] == calls[1] < calls[2]


def test_a_grid_with_calls_alike_needs_a_smaller_gain(monkeypatch):
    rows, table = rows_and_table([30, 40] * 12, shared=128)
    defaults = GridDefaults(chunks=(64,))
    monkeypatch.setattr(shared_grids, "CHUNKS", ((32,),))
    monkeypatch.setattr(shared_grids, "_batches", lambda grid, batch: [grid])
    monkeypatch.setattr(shared_grids, "MAX_SHARE_OF_SECONDS", 0)
    whole, chosen = choose(rows, table, defaults)
    calls = [{x.batch * x.tokens for x in grid.prefill} for grid in (whole, chosen)]
    assert chosen != whole and calls[0] == calls[1]
    monkeypatch.setattr(shared_grids, "MAX_SHARE_ALIKE", 0)
    assert choose(rows, table, defaults)[1] == whole


def one_document() -> tuple[list[ExpectedRow], PrefixTable]:
    return rows_and_table([20, 30, 40, 50] * 30, shared=500)


@pytest.mark.parametrize("is_known", [False, True])
def test_prompts_that_share_little_stay_whole(is_known):
    rows, table = rows_and_table([400, 300, 420] * 10, shared=16)
    whole, chosen = choose(rows, table if is_known else NOTHING_SHARED)
    assert chosen == whole


def test_nothing_is_shared_without_a_table():
    rows, _ = one_document()
    whole, chosen = choose(rows, NOTHING_SHARED)
    assert chosen == whole


def test_no_row_that_fits_whole_is_lost():
    rows, table = rows_and_table([496, 20, 30, 40] * 20, shared=500)
    rows[4] = replace(rows[4], need=replace(rows[4].need, prompt_length=CONTEXT - 1, max_tokens=1))
    rows[5] = replace(rows[5], need=replace(rows[5].need, max_tokens=CONTEXT - 520))
    rows[6] = replace(rows[6], need=replace(rows[6].need, max_tokens=None))
    whole, chosen = choose(rows, table)
    assert rows[0].need.prompt_length == CONTEXT - 4
    for grid in (whole, chosen):
        assert all(fits_grid(row.need, grid) for row in rows)


def test_rows_with_other_beginnings_fit_a_grid_with_prefixes():
    prompts = [few_tokens(500, i % 3) + few_tokens(20 + i, i) for i in range(90)]
    prompts += [few_tokens(n, 1000 + n) for n in (1, 480, 996)]
    table, _ = table_of(prompts)
    rows = [ExpectedRow(RowShape(len(prompt), 4), 4) for prompt in prompts]
    _, chosen = choose(rows, table)
    assert len(chosen.prefixes.shared) == 3
    assert list(map(chosen.prefixes.prefix_of, prompts[-3:])) == [None] * 3
    assert all(fits_grid(row.need, chosen) for row in rows)


def test_calls_stay_multiples_of_the_pieces_of_a_layout():
    rows, table = one_document()
    _, chosen = choose(rows, table, GridDefaults(batch_multiple=4, length_multiple=32))
    assert chosen.chunks
    assert all(bucket.batch % 4 == 0 for bucket in chosen.prefill)
    assert all(chunk % 32 == 0 for chunk in chosen.chunks)


@pytest.mark.parametrize("spelling", [*named_layout_tables(), "sequence-parallel@tensor=12"])
def test_a_grid_with_prefixes_divides_as_a_layout_splits_it(spelling, monkeypatch):
    layout = Layout.from_table(read_layout_table(spelling))
    # enough rows that splitting slots and rows over devices does not fill them with dummies
    rows, table = rows_and_table([20, 30, 40, 50] * 60, shared=500)
    monkeypatch.setattr(shared_grids, "MAX_SHARE_OF_SECONDS", np.inf)
    _, chosen = choose(rows, table, GridDefaults.for_layout(layout))
    grouped = prefix_choice.with_prefixes(
        chosen, table, np.array([row.need.prompt_length for row in rows])
    )
    # no chunk is a multiple of twelve
    assert bool(grouped) == bool(chosen.chunks) == (spelling != "sequence-parallel@tensor=12")
    for grid in (chosen, *grouped):
        sizes = model_sizes(DIVISIBLE, layout.mesh.num_devices, grid)
        assert check(layout, sizes) == []


def test_a_part_of_a_large_job_shares_as_much_as_all_of_it(monkeypatch):
    monkeypatch.setattr(shared_grids, "MAX_ROWS", 24)
    rows, table = one_document()
    chosen = choose(rows, table)[1]
    assert chosen.chunks and chosen.prefixes is not None


def test_a_group_has_rows_enough_for_half_of_its_places(monkeypatch):
    monkeypatch.setattr(prefix_choice, "GROUPS", (8,))
    prompts = [few_tokens(500, i // 6) + few_tokens(20, 1000 + i) for i in range(120)]
    prompts += [few_tokens(500, 77)] * 2
    table, _ = table_of(prompts)
    lengths = np.array(list(map(len, prompts)))
    grid = BucketGrid(600, ((600, 8, 16),), 64)
    ((prefixes),) = (grid.prefixes for grid in prefix_choice.with_prefixes(grid, table, lengths))
    assert len(prefixes.shared) == 20
    num_rows = Counter(prefixes_of_rows(table, lengths, prefixes))
    assert prefixes.rows == 8
    assert all(num_rows[prefix] >= 4 for prefix in prefixes.shared)


@pytest.mark.parametrize("shared", [100, 500])
def test_one_long_beginning_is_read_by_one_group(shared):
    rows, table = rows_and_table([20, 30, 40, 50] * 30, shared)
    whole, chosen = choose(rows, table)
    prefixes = chosen.prefixes
    assert prefixes is not None and prefixes.groups == 1
    assert prefixes.rows == chosen.decode_slots
    assert [prefix.length for prefix in prefixes.shared] == [shared // UNIT * UNIT]
    assert prefixes.length == prefixes.shared[0].length // chosen.page * chosen.page
    faster, computed = (
        simulate_in_order(rows, grid, PRICES.cost, table) for grid in (chosen, whole)
    )
    assert faster.seconds < shared_grids.MAX_SHARE_OF_SECONDS * computed.seconds


def test_places_suffice_for_any_rows_of_the_prefixes():
    """Each of a few prefixes may have a group that is not full."""
    prompts = [few_tokens(100, i // 20) + few_tokens(9, 1000 + i) for i in range(120)]
    table, _ = table_of(prompts)
    lengths = np.array(list(map(len, prompts)))
    grid = BucketGrid(200, ((200, 8, 16),), 20)
    for grouped in prefix_choice.with_prefixes(grid, table, lengths):
        prefixes = grouped.prefixes
        for counts in ([20], [15, 5], [1, 1, 18], [4, 4, 4, 4, 4], [3, 3, 3, 3, 4, 4]):
            if len(counts) <= grid.decode_slots // prefixes.rows:
                assert sum(-(-n // prefixes.rows) for n in counts) <= prefixes.groups


def test_a_cut_through_the_rows_of_a_prefix_shows_the_prefix(monkeypatch):
    """A part of the rows has only one row of the last document."""
    monkeypatch.setattr(shared_grids, "MAX_ROWS", 15)
    prompts = [
        few_tokens(300, document) + few_tokens(20, 100 + 7 * document + row)
        for document in range(8)
        for row in range(7)
    ]
    table, _ = table_of(prompts)
    rows = [ExpectedRow(RowShape(len(prompt), 4), 4) for prompt in prompts]
    assert choose(rows, table)[1].prefixes is not None
