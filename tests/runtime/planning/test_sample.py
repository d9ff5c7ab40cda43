"""Large workloads: a sample is simulated, its error is stated, and every row still has a bucket."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from related_prompts import hash_tokens, table_of
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.grids.prefix_table import NOTHING_SHARED
from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.candidates import Budget, CandidateGrids
from noria.compile.planning.compile_time import GraphSeconds
from noria.compile.planning.cost import CostModel
from noria.compile.planning.run_bounds import ExpectedRow
from noria.compile.planning.work import Work
from noria.runtime.planning import planner as planner_module
from noria.runtime.planning.planner import Planner
from noria.runtime.planning.sample import Sample, SimulatedRows
from noria.runtime.planning.search import Schedules, simulate_grid, simulate_in_order

HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
COST = CostModel(Work(AbstractModel(CONFIG), "float32"), HARDWARE)
LONGEST = CONFIG.max_position


def rows_of(count: int, seed: int = 0, is_open: bool = False) -> list[ExpectedRow]:
    """Return short rows and one of the model's full length; open rows have no max_tokens."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(2.5, 0.5, count).astype(int), 1, 60)
    limits = rng.choice([4, 8, 16], count)
    rows = [
        ExpectedRow(
            RowShape(int(prompt), None if is_open else int(limit)), int(rng.integers(1, limit + 1))
        )
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    rows[count // 3] = ExpectedRow(RowShape(LONGEST - 16, 16), 16)
    return rows


def grids_of(rows, table=NOTHING_SHARED, budget=None):
    return CandidateGrids(rows, LONGEST, COST, budget or Budget(), GridDefaults(), table)


@pytest.fixture
def few(monkeypatch):
    """A sample has about 500 rows, and is taken of more than 1000 rows."""
    monkeypatch.setattr(planner_module, "ROWS_TO_SIMULATE", 500)


@pytest.mark.parametrize(("seed", "is_open"), [(0, False), (1, True), (2, True)])
def test_all_rows_take_what_is_predicted_from_a_sample_within_the_stated_error(few, seed, is_open):
    rows = rows_of(1250, seed, is_open)
    taken = Sample(SimulatedRows(rows, 500), grids_of)
    assert 500 <= len(taken.rows) <= 503
    for grid in [one.grid for one in grids_of(rows).candidates()][seed::400]:
        predicted = simulate_grid(grid, taken.schedules, COST, Budget(), taken.scaled)
        error = taken.uncertainty(predicted, COST)
        whole = simulate_grid(grid, Schedules(rows), COST, Budget())
        assert predicted.simulation.seconds == pytest.approx(
            whole.simulation.seconds, rel=error.relative
        )


def test_seconds_of_a_sample_are_scaled_by_those_of_a_run_however_long_graphs_compile(few):
    """Graphs take far longer to compile here than the sample takes to run."""
    rows = rows_of(1250)
    grid = BucketGrid(LONGEST, ((64, 4), (LONGEST, 1)), 16)
    seconds = []
    for each in (0.0, 0.5, 30.0):
        budget = Budget(graph_seconds=GraphSeconds(each, each))
        taken = Sample(SimulatedRows(rows, 100), partial(grids_of, budget=budget))
        seconds.append(taken.scaled(grid, simulate_in_order(taken.rows, grid, COST)).seconds)
    assert seconds == pytest.approx(3 * [simulate_in_order(rows, grid, COST).seconds], rel=0.05)


def test_sampled_rows_begin_with_the_prefixes_that_all_rows_show(few):
    """In the sample, few documents have two questions, which would show where they end."""
    documents = [[5] * 36 + [6 + i // 50] * 14 + [6 + i % 50] * 14 for i in range(140)]
    prompts = [[*document, 7 + i, 8] for i in range(10) for document in documents]
    table, _ = table_of(prompts)
    rows = [ExpectedRow(RowShape(len(prompt), 4), 4) for prompt in prompts]
    shared = tuple(sorted(PlannedPrefix(64, hash_tokens(document)) for document in documents))
    grid = BucketGrid(80, ((80, 4, 64),), 8, page=16, prefixes=PrefixGrid(2, 8, 64, shared))
    taken = Sample(SimulatedRows(rows, 200, table), grids_of)
    predicted = simulate_grid(grid, taken.schedules, COST, Budget(), taken.scaled)
    whole = simulate_grid(grid, Schedules(rows, table), COST, Budget())
    assert predicted.simulation.seconds == pytest.approx(whole.simulation.seconds, rel=0.25)
    assert taken.uncertainty(predicted, COST) is not None


def test_a_sample_has_its_share_of_every_stratum_and_the_longest_row(few):
    rows = rows_of(1500)
    taken = Sample(SimulatedRows(rows, 500), grids_of).rows
    for limit in (4, 8, 16):
        of_all, of_sample = (
            sum(row.need.max_tokens == limit for row in some) / len(some) for some in (rows, taken)
        )
        assert of_sample == pytest.approx(of_all, abs=0.01)
    assert rows[500] in taken
    assert Sample(SimulatedRows(rows, 500), grids_of).rows == taken


def test_a_sample_is_in_the_order_of_the_workload(few):
    """Rows of equal shape are submitted in this order."""
    rows = rows_of(1250, is_open=True)
    place = {id(row): i for i, row in enumerate(rows)}
    *taken, _, _, _ = (place[id(row)] for row in Sample(SimulatedRows(rows, 500), grids_of).rows)
    assert taken == sorted(taken)


def test_the_plan_of_a_large_workload_holds_every_row_and_states_its_error(few):
    rows = rows_of(1250)
    planner = Planner(rows, LONGEST, COST, Budget(), GridDefaults(), False, max_simulated=2)
    planned = planner.with_comparison(planner.plan())
    for row in rows:
        planned.best.grid.fit(row.need.prompt_length, row.need.max_tokens)
    assert planned.uncertainty is not None
    said = str(planned.uncertainty)
    assert "rows simulated instead of all, and calls and tokens scaled: seconds within" in said
    smaller = replace(planner, rows=rows[:1000])
    assert smaller.with_comparison(smaller.plan()).uncertainty is None


@pytest.mark.parametrize("may_chunk", [False, True])
def test_tokens_of_a_sample_sum_to_those_of_all_rows(few, may_chunk):
    rows = rows_of(1250)
    planner = Planner(
        rows, LONGEST, COST, Budget(), GridDefaults(), may_chunk, may_chunk, max_simulated=1
    )
    planned = planner.with_comparison(planner.plan())
    for simulated in (planned.best, *planned.others.values()):
        metrics = simulated.simulation.metrics
        prompts = sum(use.real_tokens for use in metrics.prefill.values())
        # each count is rounded
        few_tokens = len(metrics.prefill)
        every = sum(row.need.prompt_length for row in rows)
        assert prompts + metrics.saved_tokens == pytest.approx(every, abs=few_tokens)
        assert metrics.emitted_tokens == pytest.approx(sum(row.output for row in rows), abs=1)
        assert min(metrics.padding.values()) >= 0


def test_planners_of_the_same_rows_share_schedules_and_others_do_not(few):
    rows = rows_of(300)
    shared = SimulatedRows(rows, 500)
    planner = Planner(
        rows, LONGEST, COST, Budget(), GridDefaults(), False, simulated_rows=shared, max_simulated=2
    )
    planned = planner.plan()
    known = dict(shared.schedules._known)
    assert known
    assert planner.plan() == planned
    assert replace(planner, rows=rows[:100]).plan() != planned
    assert shared.schedules._known == known


def test_the_time_left_counts_the_rows_that_a_search_may_simulate(few):
    counts = []
    planner = Planner(
        rows_of(1250),
        LONGEST,
        COST,
        Budget(),
        GridDefaults(),
        must_chunk=True,
        max_simulated=3,
        on_simulated=lambda simulated, num_rows: counts.append(num_rows),
    )
    planner.plan()
    assert counts == [503] * 3
    assert planner.max_rows_simulated == sum(counts)
