"""Prompts that share much share in one of two ways, and never so that a row no longer fits."""

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


def leave_out(monkeypatch, kind: str) -> None:
    """Try no grids that share in this way."""
    module, name = {"chunks": (shared_grids, "CHUNKS"), "prefixes": (prefix_choice, "GROUPS")}[kind]
    monkeypatch.setattr(module, name, ())


@pytest.fixture(params=["chunks", "prefixes"])
def kind(request, monkeypatch) -> str:
    """Leave one way to share."""
    leave_out(monkeypatch, "prefixes" if request.param == "chunks" else "chunks")
    return request.param


def shares(grid: BucketGrid, kind: str) -> bool:
    """Return whether rows of a grid share in this way, and in no other one."""
    ways = {"chunks": bool(grid.chunks), "prefixes": grid.prefixes is not None}
    return ways.pop(kind) and not any(ways.values())


def test_prompts_with_one_long_beginning_share_it_if_that_is_predicted_faster(kind):
    rows, table = rows_and_table([20, 30, 40, 50] * 30, shared=500)
    whole, chosen = choose(rows, table)
    assert shares(chosen, kind)
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
    assert whole.decode_slots == 0 and shares(chosen, "chunks") and chosen.score
    metrics = simulate_in_order(rows, chosen, PRICES.cost, table).metrics
    assert metrics.saved_tokens > 0.7 * 500 * len(rows)


def test_the_faster_way_to_share_is_taken(monkeypatch):
    """Questions about one document read it once; turns of a conversation have no common part."""

    def seconds_of(grid: BucketGrid, rows, table) -> float:
        return simulate_in_order(rows, grid, PRICES.cost, table).seconds

    for make, kind in ((one_document, "prefixes"), (conversations, "chunks")):
        rows, table = make()
        _, chosen = choose(rows, table)
        assert shares(chosen, kind)
        with monkeypatch.context() as patch:
            leave_out(patch, kind)
            _, other = choose(rows, table)
        assert seconds_of(chosen, rows, table) < seconds_of(other, rows, table)


def one_document() -> tuple[list[ExpectedRow], PrefixTable]:
    return rows_and_table([20, 30, 40, 50] * 30, shared=500)


def conversations() -> tuple[list[ExpectedRow], PrefixTable]:
    prompts: list[list[int]] = []
    for conversation in range(4):
        turns: list[int] = []
        for turn in range(30):
            turns = turns + few_tokens(32, 100 * conversation + turn)
            prompts.append(turns)
    table, _ = table_of(prompts)
    return [ExpectedRow(RowShape(len(prompt), 4), 4) for prompt in prompts], table


@pytest.mark.parametrize("is_known", [False, True])
def test_prompts_that_share_little_stay_whole(is_known):
    rows, table = rows_and_table([400, 300, 420] * 10, shared=16)
    whole, chosen = choose(rows, table if is_known else NOTHING_SHARED)
    assert chosen == whole


def test_nothing_is_shared_without_a_table(kind):
    rows, _ = one_document()
    whole, chosen = choose(rows, NOTHING_SHARED)
    assert chosen == whole


def after_prefixes(
    rows: list[ExpectedRow], table: PrefixTable, grid: BucketGrid
) -> list[ExpectedRow]:
    """Return the rows as a grid serves them: in a grid with prefixes, what follows these."""
    if grid.prefixes is None:
        return rows
    lengths = np.array([row.need.prompt_length for row in rows])
    planned = prefixes_of_rows(table, lengths, grid.prefixes)
    assert any(planned)
    return [row.after(p.length if p else 0) for row, p in zip(rows, planned, strict=True)]


def test_no_row_that_fits_whole_is_lost(kind):
    rows, table = rows_and_table([496, 20, 30, 40] * 20, shared=500)
    rows[4] = replace(rows[4], need=replace(rows[4].need, prompt_length=CONTEXT - 1, max_tokens=1))
    rows[5] = replace(rows[5], need=replace(rows[5].need, max_tokens=CONTEXT - 520))
    rows[6] = replace(rows[6], need=replace(rows[6].need, max_tokens=None))
    whole, chosen = choose(rows, table)
    assert rows[0].need.prompt_length == CONTEXT - 4
    for grid in (whole, chosen):
        assert all(fits_grid(row.need, grid) for row in after_prefixes(rows, table, grid))


def test_rows_with_other_beginnings_fit_a_grid_with_prefixes(monkeypatch):
    monkeypatch.setattr(shared_grids, "CHUNKS", ())
    prompts = [few_tokens(500, i % 3) + few_tokens(20 + i, i) for i in range(90)]
    prompts += [few_tokens(n, 1000 + n) for n in (1, 480, 996)]
    table, _ = table_of(prompts)
    rows = [ExpectedRow(RowShape(len(prompt), 4), 4) for prompt in prompts]
    _, chosen = choose(rows, table)
    assert shares(chosen, "prefixes")
    assert len(chosen.prefixes.shared) == 3
    assert list(map(chosen.prefixes.prefix_of, prompts[-3:])) == [None] * 3
    assert all(fits_grid(row.need, chosen) for row in after_prefixes(rows, table, chosen))
    assert chosen.prefill[-1].length >= 996


def test_calls_stay_multiples_of_the_pieces_of_a_layout(kind):
    rows, table = one_document()
    _, chosen = choose(rows, table, GridDefaults(batch_multiple=4, length_multiple=32))
    assert shares(chosen, kind)
    assert all(bucket.batch % 4 == 0 for bucket in chosen.prefill)
    assert all(chunk % 32 == 0 for chunk in chosen.chunks)


@pytest.mark.parametrize("spelling", [*named_layout_tables(), "sequence-parallel@tensor=12"])
def test_a_grid_with_prefixes_divides_as_a_layout_splits_it(spelling, monkeypatch):
    monkeypatch.setattr(shared_grids, "CHUNKS", ())
    layout = Layout.from_table(read_layout_table(spelling))
    # enough rows that splitting slots and rows over devices does not fill them with dummies
    rows, table = rows_and_table([20, 30, 40, 50] * 60, shared=500)
    monkeypatch.setattr(shared_grids, "MAX_SHARE_OF_SECONDS", np.inf)
    _, chosen = choose(rows, table, GridDefaults.for_layout(layout))
    assert shares(chosen, "prefixes")
    sizes = model_sizes(DIVISIBLE, layout.mesh.num_devices, chosen)
    assert check(layout, sizes) == []


def test_a_part_of_a_large_job_shares_as_much_as_all_of_it(monkeypatch, kind):
    monkeypatch.setattr(shared_grids, "MAX_ROWS", 24)
    rows, table = one_document()
    assert shares(choose(rows, table)[1], kind)


def test_scored_rows_share_no_planned_prefix(monkeypatch):
    monkeypatch.setattr(shared_grids, "CHUNKS", ())
    rows, table = one_document()
    rows[0] = replace(rows[0], need=replace(rows[0].need, is_scored=True))
    whole, chosen = choose(rows, table)
    assert whole.score
    assert chosen == whole


def test_a_group_has_rows_enough_for_half_of_its_slots(monkeypatch):
    monkeypatch.setattr(shared_grids, "CHUNKS", ())
    monkeypatch.setattr(prefix_choice, "GROUPS", (8,))
    prompts = [few_tokens(500, i // 6) + few_tokens(20, 1000 + i) for i in range(120)]
    prompts += [few_tokens(500, 77)] * 2
    table, _ = table_of(prompts)
    rows = [ExpectedRow(RowShape(len(prompt), 4), 4) for prompt in prompts]
    _, chosen = choose(rows, table)
    assert shares(chosen, "prefixes")
    prefixes = chosen.prefixes
    assert len(prefixes.shared) == 20
    lengths = np.array(list(map(len, prompts)))
    num_rows = Counter(prefixes_of_rows(table, lengths, prefixes))
    size = chosen.decode_slots / prefixes.groups
    assert all(num_rows[prefix] >= size / 2 for prefix in prefixes.shared)


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
