"""Layouts in the order of their compiled graphs; layouts that do not fit into memory come last."""

import math
import re
from dataclasses import replace

import pytest
from planning_models import SPARSE
from tolerances import EXTRAPOLATED_LAYERS_RELATIVE

from noria.compile.graphs.graph_kinds import DECODE
from noria.compile.grids.adapter_grid import AdapterGrid
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.hardware import Hardware
from noria.compile.plan import Numbers
from noria.compile.planning.candidates import Budget
from noria.compile.planning.compiled_call import CompiledCall
from noria.compile.planning.run_bounds import ExpectedRow
from noria.runtime.files.layout_files import named_layout_tables
from noria.runtime.planning.compiled_layouts import LayoutCompiler, PlannedLayout, _costliest
from noria.runtime.planning.figures import layout_figures
from noria.runtime.planning.layout_ranking import Ranking, all_layouts
from noria.runtime.planning.planner import Planner
from noria.runtime.planning.summary import _compiled_layout_lines

HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
COMPILER = LayoutCompiler("cpu:2", SPARSE, Numbers("float32"))
ROWS = [ExpectedRow(RowShape(length, 8, 1), 8) for length in (8, 16, 24, 40)]


@pytest.fixture(scope="module")
def planned() -> list[PlannedLayout]:
    names = ("data-parallel", "expert-parallel")
    tables = {name: named_layout_tables()[name] for name in names}
    ranking = Ranking(SPARSE, ROWS, HARDWARE, "float32", Budget(), 2)
    found = []
    for one in ranking.rank(list(all_layouts(tables, 2))):
        defaults = GridDefaults.for_layout(one.layout)
        planner = Planner(
            ROWS,
            SPARSE.max_position,
            one.cost,
            Budget(),
            defaults,
            may_chunk=False,
            max_simulated=1,
        )
        found.append(PlannedLayout(one.layout, one.cost, planner.plan()))
    return sorted(found, key=lambda one: one.seconds)


@pytest.fixture(scope="module")
def notes() -> list[str]:
    return []


@pytest.fixture(scope="module")
def compiled(planned, notes) -> list[PlannedLayout]:
    return replace(COMPILER, on_note=notes.append).compile_and_rank(planned, 2)


def call(factor: float, memory_bytes: int = 0) -> CompiledCall:
    return CompiledCall(
        flops=0.0,
        num_bytes=0.0,
        sent={},
        memory_bytes=memory_bytes,
        seconds=factor,
        graph=DECODE,
        shapes_seconds=1.0,
    )


def test_graphs_are_compiled_with_the_room_for_adapters(planned, compiled):
    ranks = {"attention.qkv": 8, "attention.output": 8}
    with_adapters = replace(COMPILER, adapters=AdapterGrid(4, ranks)).compile_and_rank(planned, 2)
    memory = {one.name: one.compiled["decode"].memory_bytes for one in compiled}
    for one in with_adapters:
        assert one.compiled["decode"].memory_bytes > memory[one.name]


def test_each_compiled_program_is_noted_with_its_graph_and_layers(compiled, notes):
    wanted = {
        f"{one.name}: {key}, {count} of {SPARSE.num_layers} layers"
        for one in compiled
        for key in _costliest(one).values()
        for count in (1, 2)
    }
    assert {note.partition(", compiled in ")[0] for note in notes[:-1]} == wanted


def test_a_phase_counts_as_much_longer_as_its_compiled_graph_takes(planned):
    one = replace(planned[0], compiled={"prefill": call(1.0), "decode": call(3.0)})
    decode = one.result.best.simulation.metrics.decode.seconds
    assert one.compiled_seconds == pytest.approx(one.seconds + 2 * decode)


def test_compiled_graphs_send_along_their_axes_and_take_no_less_than_shapes(compiled):
    for one in compiled:
        assert not one.problem
        assert set(one.compiled) == {"prefill", "decode"}
        for found in one.compiled.values():
            assert found.factor > 0.99
            assert found.memory_bytes > 0
            exchanges = ("all-to-all", ("expert",)) in found.sent
            assert exchanges == (one.layout.name == "expert-parallel")
    assert [one.compiled_seconds for one in compiled] == sorted(
        one.compiled_seconds for one in compiled
    )


def test_two_programs_of_few_layers_tell_of_one_with_more(planned, compiled):
    """The larger program has three layers, and its loop runs one layer at a time."""
    layout = next(one for one in planned if one.layout.name == "expert-parallel")
    extrapolated = next(one for one in compiled if one.layout == layout.layout).compiled
    for phase, key in _costliest(layout).items():
        whole = COMPILER._read(layout, key, SPARSE)
        found = extrapolated[phase]
        assert found.sent == whole.sent
        assert found.memory_bytes == pytest.approx(
            whole.memory_bytes, rel=EXTRAPOLATED_LAYERS_RELATIVE
        )
        assert found.num_bytes == pytest.approx(whole.num_bytes, rel=EXTRAPOLATED_LAYERS_RELATIVE)


def test_a_layout_whose_graphs_do_not_fit_says_what_lacks_and_one_not_compiled_stays_behind(
    planned,
):
    small = replace(HARDWARE, memory_bytes=1000.0)
    first = planned[0]
    cost = type(first.cost)(first.cost.work, small)
    found = COMPILER.compile_and_rank([replace(first, cost=cost), planned[1]], 1)
    assert [bool(one.compiled) for one in found] == [True, False]
    assert found[0].compiled_seconds == math.inf
    assert "GB more than a device has" in found[0].problem
    _, row, problem, _ = _compiled_layout_lines(layout_figures(found, []))
    assert re.search(r"cannot run +1 ", row)
    assert problem == f"{found[0].name}: {found[0].problem}"
