"""The line after a job that says what a better plan would have saved."""

import random
from itertools import count

import pytest
from related_prompts import hash_tokens, table_of
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.grids.prefix_table import NOTHING_SHARED
from noria.compile.grids.row_shape import RowShape
from noria.compile.planning.graph_prices import GraphPrices
from noria.compile.planning.run_bounds import ExpectedRow
from noria.compile.planning.work import Work
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.planning.better_plan import OtherGrids, better_plan_note, saved_share

POOR = BucketGrid(128, ((96, 1),), 2, steps_per_call=8)
RNG = random.Random(2)
ROWS = [
    ExpectedRow(RowShape(RNG.randint(3, 90), 30, 1, False), RNG.randint(1, 30)) for _ in range(900)
]
OTHERS = OtherGrids(
    GraphPrices.of_target("cpu", Work(AbstractModel(CONFIG), "float32"), known_hardware()),
    GridDefaults(),
    CONFIG.max_position,
)


def share(grid: BucketGrid, rows=ROWS, **changes) -> float:
    return saved_share(grid, rows, NOTHING_SHARED, OTHERS, **{"search_seconds": 60.0, **changes})


def test_a_poor_plan_is_named_with_its_share_and_a_good_one_is_not():
    poor = share(POOR)
    assert 0.1 < poor < 1
    note = better_plan_note(POOR, ROWS, NOTHING_SHARED, OTHERS, 600.0)
    assert note is not None and "noria plan --from-output" in note
    percent = int(note.partition("save ")[2].partition("%")[0])
    assert percent == pytest.approx(100 * poor, abs=1)
    assert better_plan_note(POOR, ROWS, NOTHING_SHARED, OTHERS, 59.0) is None
    assert better_plan_note(POOR, [], NOTHING_SHARED, OTHERS, 600.0) is None


def test_a_plan_with_prefixes_is_simulated_with_the_prefixes_of_all_rows():
    """The simulated rows are those of different documents."""
    documents = [[5] * 4 + [6 + i // 50] * 14 + [6 + i % 50] * 14 for i in range(170)]
    prompts = [[*document, 7 + i, 8] for document in documents for i in range(5)]
    rows = [ExpectedRow(RowShape(len(prompt), 8), 4) for prompt in prompts]
    shared = tuple(sorted(PlannedPrefix(32, hash_tokens(document)) for document in documents))
    grid = BucketGrid(64, ((64, 4, 16),), 8, page=16, prefixes=PrefixGrid(2, 8, 32, shared))
    found = saved_share(grid, rows, table_of(prompts)[0], OTHERS, search_seconds=1.0)
    assert 0 <= found < 1


def test_the_search_ends_when_its_seconds_are_over():
    ticks = count()
    assert 0 <= share(POOR, clock=lambda: next(ticks), search_seconds=9.0) < 1
    assert next(ticks) < 40
    ticks = count()
    assert share(POOR, clock=lambda: next(ticks), search_seconds=0.0) == 0
