"""Latency against throughput: what is on the front is beaten by nothing, and all of it fits."""

from dataclasses import replace

import pytest
from planning_models import SPARSE

from noria.compile.bucket_grid import BucketGrid
from noria.compile.default_grid import RowNeed
from noria.compile.planning.candidates import Budget, ExpectedRow
from noria.compile.planning.hardware import Hardware
from noria.runtime.layout_files import named_layout_tables
from noria.runtime.planning.layout_ranking import Ranking, all_layouts
from noria.runtime.planning.tradeoffs import Tradeoff, tradeoffs
from noria.sharding.call import Call

MEMORY = 1e7
HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, MEMORY, 1e8, 1e7, [])
ROWS = [ExpectedRow(RowNeed(length, 8, 1), 8) for length in (8, 16, 24, 40)]
GRID = BucketGrid(48, ((40, 4),), 8, (16, 32, 48), 4)
RANKING = Ranking(SPARSE, ROWS, HARDWARE, "float32", Budget(memory_bytes=MEMORY), 2)


@pytest.fixture(scope="module")
def ranked():
    names = ("data-parallel", "expert-parallel")
    tables = {name: named_layout_tables()[name] for name in names}
    return RANKING.rank(list(all_layouts(tables, 2)))


@pytest.fixture(scope="module")
def points(ranked) -> list[Tradeoff]:
    return tradeoffs(RANKING, ranked, GRID)


def test_the_front_is_what_no_point_beats_in_both(points):
    def beats(one: Tradeoff, other: Tradeoff) -> bool:
        faster = one.step_seconds <= other.step_seconds and one.per_device >= other.per_device
        return faster and (one.step_seconds, one.per_device) != (
            other.step_seconds,
            other.per_device,
        )

    assert any(one.is_best for one in points)
    assert any(not one.is_best for one in points)
    for one in points:
        assert one.is_best == (not any(beats(other, one) for other in points))


def test_points_are_the_cost_models_own_seconds(ranked, points):
    (data_parallel,) = (one for one in ranked if one.layout.name == "data-parallel")
    for point in points:
        if (point.layout, point.devices) == ("data-parallel", 2):
            step = data_parallel.cost.seconds(Call.of_step(point.slots, 32))
            assert point.step_seconds == step
            assert point.tokens_per_second == point.slots / step


def test_slots_go_as_far_as_memory(ranked, points):
    for one in ranked:
        work = one.cost.work
        slots = [p.slots for p in points if (p.layout, p.devices) == (work.layout.name, 2)]
        most = max(slots)
        assert work.parameter_bytes + work.cache_bytes(most, 48) <= MEMORY
        assert work.parameter_bytes + work.cache_bytes(2 * most, 48) > MEMORY


def test_half_and_twice_the_devices_stand_beside_what_was_asked_for(ranked, points):
    assert {point.devices for point in points} == {1, 2, 4}
    simulated = replace(RANKING, hardware=replace(HARDWARE, name="cpu"))
    assert {point.devices for point in tradeoffs(simulated, ranked, GRID)} == {2}


def test_more_and_fewer_devices_are_slices_of_the_same_kind(ranked):
    def steps(torus: tuple[int, ...]) -> dict[int, float]:
        found = tradeoffs(replace(RANKING, torus=torus), ranked, GRID)
        return {
            point.devices: point.step_seconds
            for point in found
            if (point.layout, point.slots) == ("expert-parallel", 16)
        }

    line, switch = steps((1, 2)), steps(())
    # of 2x2 the busiest link carries half an array, a device sends three quarters
    assert line[4] < switch[4]
    assert line[2] == switch[2]
