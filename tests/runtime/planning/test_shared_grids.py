"""Grids that share are chosen where prompts share much, and never so that a row no longer fits."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from related_prompts import table_of
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.default_grid import RowShape, derive_grid
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefix_choice import prefixes_of_rows
from noria.compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from noria.compile.planning.candidates import ExpectedRow
from noria.compile.planning.cost import CostModel
from noria.compile.planning.graph_prices import GraphPrices
from noria.compile.planning.hardware import Hardware
from noria.compile.planning.work import Work
from noria.runtime.batch.prefix_index import UNIT
from noria.runtime.planning import shared_grids
from noria.runtime.planning.forecast import fits_grid
from noria.runtime.planning.search import simulate_in_order
from noria.runtime.planning.shared_grids import with_sharing

CONTEXT = 1000
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


@pytest.fixture
def only_chunks(monkeypatch):
    """Leave out grids with planned prefixes."""
    monkeypatch.setattr(shared_grids, "GROUPS", ())


@pytest.mark.usefixtures("only_chunks")
def test_prompts_with_one_long_beginning_take_chunks_that_are_predicted_faster():
    rows, table = rows_and_table([20, 30, 40, 50] * 30, shared=500)
    whole, chosen = choose(rows, table)
    assert chosen.chunks
    shared, computed = (
        simulate_in_order(rows, grid, PRICES.cost, table) for grid in (chosen, whole)
    )
    assert shared.seconds < 0.5 * computed.seconds
    assert shared.metrics.saved_tokens > 0.7 * 500 * len(rows)


@pytest.mark.parametrize("is_known", [False, True])
def test_prompts_that_share_little_stay_whole(is_known):
    rows, table = rows_and_table([400, 300, 420] * 10, shared=16)
    whole, chosen = choose(rows, table if is_known else NOTHING_SHARED)
    assert chosen == whole


@pytest.mark.usefixtures("only_chunks")
def test_no_row_that_fits_whole_is_lost_to_the_padding_of_chunks():
    rows, table = rows_and_table([496, 20, 30, 40] * 20, shared=500)
    whole, chosen = choose(rows, table)
    assert rows[0].need.prompt_length == CONTEXT - 4
    for grid in (whole, chosen):
        assert all(fits_grid(row.need, grid) for row in rows)


@pytest.mark.usefixtures("only_chunks")
def test_calls_stay_multiples_of_the_pieces_of_a_layout():
    rows, table = rows_and_table([20, 30, 40, 50] * 30, shared=500)
    _, chosen = choose(rows, table, GridDefaults(batch_multiple=4, length_multiple=32))
    assert all(bucket.batch % 4 == 0 for bucket in chosen.prefill)
    assert all(chunk % 32 == 0 for chunk in chosen.chunks)


@pytest.mark.usefixtures("only_chunks")
def test_a_part_of_a_large_job_shares_as_much_as_all_of_it(monkeypatch):
    monkeypatch.setattr(shared_grids, "MAX_ROWS", 24)
    rows, table = rows_and_table([20, 30, 40, 50] * 30, shared=500)
    assert choose(rows, table)[1].chunks


@pytest.mark.parametrize("shared", [100, 500])
def test_one_long_beginning_is_kept_once_for_all_slots(shared):
    rows, table = rows_and_table([20, 30, 40, 50] * 30, shared)
    whole, chosen = choose(rows, table)
    prefixes = chosen.prefixes
    assert prefixes is not None and prefixes.groups == 1
    assert [prefix.length for prefix in prefixes.shared] == [shared // UNIT * UNIT]
    faster, computed = (
        simulate_in_order(rows, grid, PRICES.cost, table) for grid in (chosen, whole)
    )
    assert faster.seconds < shared_grids.MAX_SHARE_OF_SECONDS * computed.seconds
    assert faster.metrics.saved_tokens == (len(rows) - 1) * prefixes.shared[0].length


def test_each_row_fits_the_grid_after_its_prefix():
    rows, table = rows_and_table([496, 20, 30, 40] * 20, shared=500)
    _, chosen = choose(rows, table)
    assert chosen.prefixes is not None
    lengths = np.array([row.need.prompt_length for row in rows])
    for row, prefix in zip(rows, prefixes_of_rows(table, lengths, chosen.prefixes), strict=True):
        assert fits_grid(row.after(prefix.length if prefix else 0).need, chosen)


def test_groups_stay_multiples_of_the_pieces_of_a_layout():
    rows, table = rows_and_table([20, 30, 40, 50] * 30, shared=500)
    aims = GridDefaults(batch_multiple=4, slot_multiple=8, length_multiple=32, span_multiple=8)
    _, chosen = choose(rows, table, aims)
    prefixes = chosen.prefixes
    assert prefixes is not None
    assert prefixes.groups % 8 == 0 == chosen.decode_slots % prefixes.groups
    assert prefixes.batch == 4 and prefixes.chunk % 32 == 0 == prefixes.length % 8
    assert all(bucket.batch % 4 == 0 == bucket.length % 32 for bucket in chosen.prefill)


def test_a_cut_through_the_rows_of_a_prefix_shows_the_prefix(monkeypatch):
    """A part of the rows has only one row of the last document."""
    monkeypatch.setattr(shared_grids, "MAX_ROWS", 15)
    monkeypatch.setattr(shared_grids, "CHUNKS", ())
    prompts = [
        few_tokens(300, document) + few_tokens(20, 100 + 7 * document + row)
        for document in range(8)
        for row in range(7)
    ]
    table, _ = table_of(prompts)
    rows = [ExpectedRow(RowShape(len(prompt), 4), 4) for prompt in prompts]
    assert choose(rows, table)[1].prefixes is not None
