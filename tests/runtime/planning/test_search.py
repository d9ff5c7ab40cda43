"""Candidates and their bounds: no schedule beats its bound, and the best grid is chosen."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from related_prompts import table_of
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.grid_defaults import LENGTH_STEP, GridDefaults
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.grids.prefix_table import PrefixTable
from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.candidates import Budget, CandidateGrids, working_bytes
from noria.compile.planning.compile_time import GraphSeconds
from noria.compile.planning.cost import CostModel
from noria.compile.planning.run_bounds import ExpectedRow, entries_by_bucket, rows_by_bucket
from noria.compile.planning.work import Work
from noria.runtime.engine.metrics import DecodeUse, EngineMetrics
from noria.runtime.errors import NoPlanFits
from noria.runtime.planning import search
from noria.runtime.planning.planner import Planner, PlanResult
from noria.runtime.planning.search import (
    Schedules,
    find_best_grid,
    has_larger_calls,
    simulate_grid,
    simulate_in_order,
)
from noria.runtime.planning.simulator import Schedule, schedule

HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
COST = CostModel(Work(AbstractModel(CONFIG), "float32"), HARDWARE)


def rows_of(seed: int, count: int = 30, longest: int = 90) -> list[ExpectedRow]:
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, longest, count), rng.integers(0, 30, count)
    return [
        ExpectedRow(RowShape(int(prompt), int(output) + 3, int(rng.integers(1, 3))), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def seeds(count: int) -> list:
    """Return the numbers of random jobs, of which every run has the first."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(count)]


def candidates(rows, budget=None, defaults=None) -> list:
    budget, defaults = budget or Budget(), defaults or GridDefaults()
    return CandidateGrids(rows, CONFIG.max_position, COST, budget, defaults).candidates()


@pytest.mark.parametrize("seed", seeds(5))
def test_no_schedule_comes_below_its_bound_and_every_row_fits(seed):
    rows, budget = rows_of(seed), Budget(graph_seconds=GraphSeconds(0.003, 0.003))
    found = candidates(rows, budget)
    assert any(candidate.grid.chunks for candidate in found)
    assert any(not candidate.grid.chunks for candidate in found)
    for candidate in found[seed::5]:
        for row in rows:
            candidate.grid.fit(row.need.prompt_length, row.need.max_tokens)
        tried = simulate_grid(candidate.grid, Schedules(rows), COST, budget)
        assert tried.seconds >= candidate.bound * (1 - 1e-9)
        assert tried.padding >= candidate.padding * (1 - 1e-9)
        sequences = sum(row.output * row.need.num_sequences for row in rows)
        assert tried.simulation.metrics.emitted_tokens == sequences


@pytest.mark.parametrize("seed", seeds(3))
def test_the_best_of_the_family_is_found_without_trying_all_of_it(seed):
    rows, budget = rows_of(seed), Budget()
    found = candidates(rows, budget)[seed::3]
    search = find_best_grid(found, Schedules(rows), COST, budget, max_simulated=len(found))
    assert search.gap == 0
    every = [
        simulate_grid(candidate.grid, Schedules(rows), COST, budget).seconds for candidate in found
    ]
    assert search.best.seconds == min(every)
    assert search.num_simulated < search.num_candidates == len(found)


def prompts_of(seed: int, shared: int) -> tuple[list[ExpectedRow], PrefixTable]:
    """Return rows that begin with one of two beginnings, and what they share."""
    rng = np.random.default_rng(seed)
    beginnings = rng.integers(0, 99, (2, shared)).tolist()
    prompts = [beginnings[row % 2] + rng.integers(0, 99, 4 + row % 9).tolist() for row in range(60)]
    table, _ = table_of(prompts)
    return [ExpectedRow(RowShape(len(prompt), 5, 1), 4) for prompt in prompts], table


def grids_of(rows, table, budget=None, **defaults) -> CandidateGrids:
    return CandidateGrids(
        rows, CONFIG.max_position, COST, budget or Budget(), GridDefaults(**defaults), table
    )


def test_planned_prefixes_are_in_a_plan_if_they_save_seconds():
    rows, table = prompts_of(0, shared=64)
    plans = [planner(rows, table=table, may_group=may_group).plan() for may_group in (False, True)]
    apart, grouped = (plan.best for plan in plans)
    assert apart.grid.prefixes is None
    assert grouped.grid.prefixes is not None
    assert grouped.seconds < apart.seconds
    assert plans[1].search.num_candidates > plans[0].search.num_candidates
    # a beginning that is shorter than a page is read by each row
    shared, table = prompts_of(0, shared=16)
    assert planner(shared, table=table, may_group=True).plan().best.grid.prefixes is None


def test_chunks_that_a_layout_does_not_divide_are_left_out_of_every_candidate():
    defaults = GridDefaults(length_multiple=32, page_multiple=32)
    found = candidates(rows_of(0, longest=50), defaults=defaults)
    assert {one.grid.chunks for one in found} == {(), (32,), (64,)}


def test_calls_have_as_many_rows_as_a_layout_divides():
    """The batch of prompts may be split further than the slots."""
    defaults = GridDefaults(batch_multiple=8, slot_multiple=2)
    found = candidates(rows_of(0, count=10, longest=50), defaults=defaults)
    batches = {bucket.batch % 8 for one in found for bucket in one.grid.prefill}
    assert batches == {0}
    assert any(one.grid.decode_slots % 8 for one in found)


def test_all_slots_of_a_planned_grid_may_fill_before_any_row_decodes():
    found = CandidateGrids(rows_of(0, longest=50), 126, COST, Budget(), GridDefaults())
    grids = [candidate.grid for candidate in found.chunk_candidates()]
    assert grids
    for grid in grids:
        (bucket,) = grid.prefill
        pieces = grid.decode_slots * (grid.max_length // bucket.tokens)
        assert grid.chunks_per_decode == -(-pieces // bucket.batch)


def buckets_of(grid, prompt_length) -> Counter:
    """Count the calls of each bucket for one prompt."""
    found, start = Counter(), 0
    while start < prompt_length:
        bucket = grid.bucket_of(prompt_length, start)
        found[bucket] += 1
        start += bucket.tokens
    return found


@pytest.mark.parametrize("chunks", [(), (8,), (4, 16), (4, 8, 32)])
def test_the_rows_of_every_bucket_are_those_that_prompts_pass_through(chunks):
    whole = [(length, 1) for length in (32, 64, 96)]
    grid = BucketGrid(96, tuple((96, 1, chunk) for chunk in chunks) or tuple(whole), 4)
    prompts = np.random.default_rng(0).integers(1, 97, 50)
    expected = sum((buckets_of(grid, length) for length in prompts.tolist()), Counter())
    assert rows_by_bucket(grid, prompts) == [expected[bucket] for bucket in grid.prefill]


def test_a_plan_pads_no_more_than_it_may():
    rows = rows_of(0, count=400, longest=60)
    free, tight = (
        planner(rows, budget=Budget(padding=most), max_simulated=40).plan() for most in (9, 1.26)
    )
    assert free.best.padding > 1.26 >= tight.best.padding
    assert tight.best.seconds >= free.best.seconds
    with pytest.raises(NoPlanFits, match=r"at most 1.001 times .*, got at least 1\.\d+ times"):
        planner(rows, budget=Budget(padding=1.001)).plan()


def test_what_a_schedule_pads_decides_whether_a_grid_may_be_chosen():
    rows = rows_of(0)
    every = [one for one in candidates(rows) if one.grid.chunks][::19]
    schedules = {one: simulate_grid(one.grid, Schedules(rows), COST, Budget()) for one in every}
    # only grids that pad more than full calls would
    found = [one for one in every if schedules[one].padding > 1.01 * one.padding]
    fastest = min(found, key=lambda one: schedules[one].seconds)
    limit = (fastest.padding + schedules[fastest].padding) / 2
    search = find_best_grid(
        found, Schedules(rows), COST, Budget(padding=limit), max_simulated=len(found)
    )
    within = [one for one in found if schedules[one].padding <= limit]
    assert search.best.seconds == min(schedules[one].seconds for one in within)
    assert search.num_simulated <= sum(one.padding <= limit for one in found)


def test_a_search_that_ends_early_says_what_the_rest_might_be():
    rows, budget = rows_of(0), Budget()
    found = candidates(rows, budget)
    every = [
        simulate_grid(candidate.grid, Schedules(rows), COST, budget).seconds
        for candidate in found[::7]
    ]
    search = find_best_grid(found[::7], Schedules(rows), COST, budget, max_simulated=1)
    assert search.num_simulated == 1
    assert search.gap > 0
    assert search.best.seconds * (1 - search.gap) <= min(every)


def test_a_search_learns_how_wrong_its_expectations_are():
    """Grids of few slots are slow, and are expected to be the fastest."""
    rows, budget, tried = rows_of(0), Budget(), []
    found = [
        replace(one, expected=one.expected / 50) if one.grid.decode_slots <= 2 else one
        for one in candidates(rows, budget)
    ]
    few_slots = sum(one.grid.decode_slots <= 2 for one in found)
    find_best_grid(found, Schedules(rows), COST, budget, 2 * few_slots, tried.append)
    assert 0 < sum(one.grid.decode_slots <= 2 for one in tried) < few_slots


def test_prefill_lengths_are_those_of_least_predicted_seconds():
    rows, tokens = rows_of(1, count=12), 64
    lengths = [row.need.prompt_length for row in rows]
    grids = CandidateGrids(
        rows, CONFIG.max_position, COST, Budget(prefill_graphs=3), GridDefaults()
    )
    found = grids.prefill_buckets(tokens, slots=12)

    def seconds(buckets) -> float:
        total = 0.0
        for start, bucket in zip([0, *(b.length for b in buckets)], buckets, strict=False):
            count = sum(start < length <= bucket.length for length in lengths)
            total += -(-count // bucket.batch) * COST.seconds(bucket.call())
        return total

    borders = sorted({-(-length // LENGTH_STEP) * LENGTH_STEP for length in lengths})
    best = float("inf")
    for size in range(3):
        for chosen in combinations(borders[:-1], size):
            ends = [*chosen, borders[-1]]
            best = min(best, cheapest_batches(ends, lengths, tokens, seconds))
    assert seconds(found) == pytest.approx(best)


def cheapest_batches(ends, lengths, tokens, seconds) -> float:
    """Return the least seconds of these lengths over their allowed batch sizes."""
    total = 0.0
    for start, end in zip([0, *ends], ends, strict=False):
        count = sum(start < length <= end for length in lengths)
        most, half = max(1, tokens // end), -(-tokens // (2 * end))
        sizes = range(max(1, min(half, count, most)), most + 1)
        total += min(
            -(-count // size) * COST.seconds(PrefillBucket(end, size).call()) for size in sizes
        )
    return total


def planner(rows, **options) -> Planner:
    options = {"budget": Budget(), **options}
    return Planner(rows, CONFIG.max_position, COST, defaults=GridDefaults(), **options)


def compared(planner: Planner) -> PlanResult:
    return planner.with_comparison(planner.plan())


def test_the_plan_beats_grids_of_as_many_graphs_that_are_picked_by_hand():
    planned = compared(planner(rows_of(2, count=200)))
    assert {"powers of two", "multiples of 128"} <= set(planned.others)
    for name in ("powers of two", "multiples of 128"):
        assert planned.best.seconds <= planned.others[name].seconds


def test_a_graph_more_never_takes_longer_and_one_fewer_never_less():
    rows = rows_of(3, count=200)
    plans = [
        planner(rows, budget=Budget(prefill_graphs=count), may_chunk=False).plan().best
        for count in (2, 3, 4)
    ]
    assert [len(tried.grid.prefill) for tried in plans] == [2, 3, 4]
    assert plans[0].seconds >= plans[1].seconds >= plans[2].seconds


def test_layouts_share_the_schedules_of_grids(monkeypatch):
    rows, scheduled = rows_of(4), []

    def count(grid, *rest):
        scheduled.append(grid)
        return schedule(grid, *rest)

    monkeypatch.setattr(search, "schedule", count)
    schedules = Schedules(rows)
    grid = BucketGrid(128, ((16, 4), (96, 1)), 4)
    faster = CostModel(COST.work, replace(HARDWARE, memory_rate=1e12))
    for cost in (COST, faster):
        tried = simulate_grid(grid, schedules, cost, Budget())
        assert tried.simulation.metrics == simulate_in_order(rows, grid, cost).metrics
    assert len(scheduled) == 1 + 2
    simulate_grid(replace(grid, decode_slots=5), schedules, COST, Budget())
    assert len(scheduled) == 2 + 2


def test_grids_of_larger_calls_than_one_that_pads_too_much_are_tried_last():
    rows, tried = rows_of(0, count=400, longest=60), []
    of_chunks = [one for one in candidates(rows) if one.grid.chunks]
    limit = 1.02 * min(one.padding for one in of_chunks)
    find_best_grid(of_chunks, Schedules(rows), COST, Budget(padding=limit), 24, tried.append)
    too_padded, is_put_off = [], []
    for one in tried:
        is_put_off.append(any(has_larger_calls(one.grid, other) for other in too_padded))
        too_padded += [one.grid] * (one.padding > limit)
    assert is_put_off == sorted(is_put_off)
    assert any(is_put_off) and not all(is_put_off)


def test_chunks_come_as_asked_for():
    rows = rows_of(0)
    assert planner(rows, may_chunk=False).plan().best.grid.chunks == ()
    assert planner(rows, must_chunk=True).plan().best.grid.chunks


def test_a_prompt_that_no_length_of_a_layout_holds_is_refused():
    rows = [ExpectedRow(RowShape(CONFIG.max_position - 1, 1), 1)]
    with pytest.raises(ValueError, match="longest prefill"):
        candidates(rows, defaults=GridDefaults(length_multiple=3))


def test_rows_that_generate_nothing_can_be_planned_for():
    rows = [ExpectedRow(RowShape(20, 0, is_scored=True), 0)] * 5
    planned = compared(planner(rows, may_chunk=False))
    assert planned.best.grid.score and not planned.best.grid.decode_slots
    assert planned.best.simulation.metrics.emitted_tokens == 0
    assert {one.grid.decode_slots for one in planned.others.values()} == {0}


def test_calls_above_2048_tokens_are_searched_where_memory_allows():
    """Slow memory makes each read of the weights dear, so the fewest calls are the best."""
    rows = [ExpectedRow(RowShape(100, 8), 8)] * 128
    slow = replace(HARDWARE, flops={"float32": 1e12}, memory_rate=1e6)
    largest = {}
    for memory in (1e9, COST.work.parameter_bytes + 6 * 10**6):
        cost = CostModel(COST.work, replace(slow, memory_bytes=memory))
        plan = Planner(rows, CONFIG.max_position, cost, Budget(), GridDefaults()).plan()
        largest[memory] = max(b.batch * b.tokens for b in plan.best.grid.prefill)
        used = COST.work.parameter_bytes + COST.work.grid_bytes(plan.best.grid)
        assert used + working_bytes(COST.work, plan.best.grid) <= memory
    assert largest[1e9] > 2048 > min(largest.values())


def test_pages_stay_within_memory_and_too_little_is_refused():
    rows = rows_of(0, count=200)
    most = COST.work.parameter_bytes + COST.work.page_bytes(16 * 128)
    kept = candidates(rows, Budget(memory_bytes=most))
    assert kept
    for candidate in kept:
        assert COST.work.parameter_bytes + COST.work.grid_bytes(candidate.grid) <= most
    with pytest.raises(NoPlanFits):
        planner(rows, budget=Budget(memory_bytes=COST.work.parameter_bytes)).plan()


def test_graphs_stay_within_the_compile_budget():
    rows = rows_of(0, count=200)
    each = GraphSeconds(1.0, 1.0)
    budget = Budget(compile_seconds=3.0, graph_seconds=each)
    for candidate in candidates(rows, budget):
        grid = candidate.grid
        # and the graph of decode
        assert len(grid.prefill) + 1 <= 3
    with pytest.raises(NoPlanFits):
        planner(rows, budget=Budget(compile_seconds=1.0, graph_seconds=each)).plan()


def test_prompts_that_are_only_scored_are_tried_in_full_calls_of_chunks():
    """Each prompt takes a slot until it is read; whole prompts need no slot."""
    rows = [ExpectedRow(RowShape(80, 0, is_scored=True), 0)] * 64
    grids = CandidateGrids(rows, 128, COST, Budget(), GridDefaults())
    assert {one.grid.decode_slots for one in grids.whole_prompt_candidates()} == {0}
    assert max(one.grid.decode_slots for one in grids.chunk_candidates()) == 64
    assert any(bucket.batch > 1 for one in grids.chunk_candidates() for bucket in one.grid.prefill)


PAGED = BucketGrid(64, ((32, 1),), 4, steps_per_call=4, pages=8, page=16)


def test_a_step_with_pages_takes_the_seconds_of_what_its_rows_read():
    for entries in (64, 128):
        use = DecodeUse(2, 8, read_entries=8 * entries, seen_entries=8 * entries)
        found = Schedule(EngineMetrics(decode=use)).priced(PAGED, COST).metrics.decode
        assert found.seconds == pytest.approx(8 * COST.seconds(PAGED.average_step(entries)))
        assert found.read_entries == 8 * entries


def test_the_bound_of_a_grid_with_pages_is_that_of_rows_that_read_their_own_pages():
    rows = [ExpectedRow(RowShape(15, 6), 6), ExpectedRow(RowShape(30, 4), 4)]
    grids = CandidateGrids(rows, CONFIG.max_position, COST, Budget(), GridDefaults())
    read = 1 * 16 + 5 * 32 + 2 * 32 + 2 * 48
    for slots, pages, steps in ((1, 8, 10), (2, 8, 6), (2, 4, 6)):
        grid = replace(PAGED, decode_slots=slots, pages=pages)
        prefill = 2 * COST.seconds(grid.prefill[0].call())
        decode = steps * COST.seconds(grid.average_step(read / steps))
        assert grids.run_seconds(grid) == pytest.approx(prefill + decode)


def paged_candidates(rows, **options) -> list:
    return candidates(rows, Budget(**options), GridDefaults(page=16))


def test_candidates_with_pages_have_what_memory_holds_and_room_for_the_longest_row():
    rows = rows_of(3)
    limit = max(row.limit(0) for row in rows)
    grids = [candidate.grid for candidate in paged_candidates(rows)]
    assert {bool(grid.chunks) for grid in grids} == {True, False}
    assert all(grid.page == 16 for grid in grids)
    assert all(grid.pages <= -(-grid.max_length // 16) * grid.decode_slots for grid in grids)
    weights = COST.work.parameter_bytes
    num_longest = -(-max(grid.max_length for grid in grids if not grid.chunks) // 16)
    tight = weights + COST.work.page_bytes(16) * (num_longest + 1)
    small = [candidate.grid for candidate in paged_candidates(rows, memory_bytes=tight)]
    # windows have pages of their own where memory then holds more of the others
    own = [grid for grid in small if grid.row_tokens is not None]
    shared = [grid for grid in small if grid.row_tokens is None and grid.decode_slots > 1]
    assert {grid.pages for grid in shared} <= {num_longest + 1} and own
    assert all(grid.pages > num_longest + 1 for grid in own)
    assert all(weights + COST.work.grid_bytes(grid) <= tight for grid in small)
    assert all(grid.max_length >= limit for grid in small)
    short = weights + COST.work.page_bytes(16) * (num_longest - 1)
    assert all(one.grid.row_tokens for one in paged_candidates(rows, memory_bytes=short))
    assert not paged_candidates(rows, memory_bytes=weights + COST.work.page_bytes(16))


PACKED = replace(PAGED, prefill=((64, 3, 8),), chunks_per_decode=4)


@pytest.mark.parametrize("chunks", [((64, 3, 8),), ((64, 3, 4), (64, 2, 16)), ((64, 1, 32),)])
def test_the_pieces_of_prompts_read_whole_pages_up_to_their_ends(chunks):
    grid = replace(PACKED, prefill=chunks)
    prompts, read = np.arange(1, 64), dict.fromkeys(grid.prefill, 0)
    for length in prompts.tolist():
        start = 0
        while start < length:
            bucket = grid.bucket_of(length, start)
            start = min(start + bucket.tokens, length)
            read[bucket] += grid.whole_pages(start)
    assert entries_by_bucket(grid, prompts).tolist() == list(read.values())
    twice = entries_by_bucket(grid, prompts, np.full(63, 2))
    assert twice.tolist() == [2 * entries for entries in read.values()]


def test_the_calls_of_tiles_take_the_seconds_of_what_their_pieces_read():
    rows = [ExpectedRow(RowShape(20, 4), 4), ExpectedRow(RowShape(50, 4), 4)]
    simulated = simulate_in_order(rows, PACKED, COST)
    use = simulated.metrics.prefill[str(PACKED.prefill[0])]
    read = [16, 16, 32, 16, 16, 32, 32, 48, 48, 64]
    assert (use.calls, use.rows, use.read_entries) == (4, 10, sum(read))
    call = PACKED.prefill_call(PACKED.prefill[0], entries=sum(read) / 4)
    assert use.seconds == pytest.approx(4 * COST.seconds(call))
    longer = PACKED.prefill_call(PACKED.prefill[0], entries=sum(read))
    assert COST.seconds(longer) > COST.seconds(call)


def test_tiles_have_the_longest_length_and_several_sizes_of_calls():
    found = paged_candidates(rows_of(3))
    packed = [one.grid for one in found if one.grid.chunks]
    assert packed and all(len(grid.prefill) == 1 for grid in packed)
    assert all(grid.prefill[0].length == grid.max_length for grid in packed)
    # two queries for each head of keys: tiles of 32 have the rows of a product
    assert {grid.chunks for grid in packed} == {(32,), (64,)}
    assert len({grid.prefill[0].batch for grid in packed}) > 3


def test_rows_that_are_only_scored_need_no_pages():
    rows = [ExpectedRow(RowShape(20, 0, is_scored=True), 0)] * 3
    whole = [one.grid for one in paged_candidates(rows) if not one.grid.chunks]
    assert whole and all(grid.pages is None for grid in whole)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_no_schedule_with_pages_comes_below_its_bound(num_sequences):
    rows = rows_of(num_sequences)
    rows = [replace(row, need=replace(row.need, num_sequences=num_sequences)) for row in rows]
    memory = COST.work.parameter_bytes + 20 * COST.work.page_bytes(16)
    budget = Budget(graph_seconds=GraphSeconds(0.003, 0.003), memory_bytes=memory)
    found = candidates(rows, budget, GridDefaults(page=16))
    assert {bool(one.grid.chunks) for one in found} == {True, False}
    for candidate in found[::11]:
        simulated = simulate_grid(candidate.grid, Schedules(rows), COST, budget)
        assert simulated.seconds >= candidate.bound * (1 - 1e-9)
