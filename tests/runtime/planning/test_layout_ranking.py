"""Ranking of layouts for a mixture of experts: communication counts."""

from dataclasses import replace

import pytest
from planning_models import SPARSE

from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.candidates import Budget
from noria.compile.planning.run_bounds import ExpectedRow
from noria.runtime.files.layout_files import named_layout_tables
from noria.runtime.planning.layout_ranking import RankedLayout, Ranking, all_layouts

FAST = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
SLOW = replace(FAST, link_rate=1e4)
ROWS = [ExpectedRow(RowShape(length, 8, 1), 8) for length in (8, 16, 24, 40)]
NAMES = ("data-parallel", "expert-parallel", "expert-stationary", "expert-tensor")


def ranked(hardware: Hardware, num_devices: int, **options) -> list[RankedLayout]:
    tables = {name: named_layout_tables()[name] for name in NAMES}
    ranking = Ranking(SPARSE, ROWS, hardware, "float32", Budget(), num_devices, **options)
    return ranking.rank(list(all_layouts(tables, num_devices)))


def bounds(found: list[RankedLayout]) -> dict[str, float]:
    return {one.layout.name: one.bound for one in found if one.layout and one.bound is not None}


def test_every_legal_layout_of_a_sparse_model_has_a_bound():
    found = ranked(FAST, 2)
    assert {one.layout.name for one in found if one.layout} == {*NAMES[:3]}
    assert all(one.bound is not None and not one.findings for one in found)


def test_slow_links_favour_what_sends_least():
    """Data parallelism sends only the keys and values that prefill writes."""
    fast, slow = bounds(ranked(FAST, 2)), bounds(ranked(SLOW, 2))
    assert next(iter(fast)) == "expert-parallel"
    assert next(iter(slow)) == "data-parallel"
    assert slow["expert-parallel"] > 3 * slow["data-parallel"]


def test_more_dimensions_of_a_torus_make_links_count_for_less():
    line, plane = (bounds(ranked(SLOW, 4, torus=torus)) for torus in ((4,), (2, 2)))
    for name in ("expert-parallel", "data-parallel"):
        assert plane[name] == pytest.approx(line[name] / 2, rel=0.02)


def test_with_pages_layouts_that_split_heads_or_rows_are_ranked():
    found = [one for one in ranked(FAST, 2, page=16) if one.layout]
    assert {one.layout.name for one in found} == {*NAMES[:3]}
    assert all(one.bound is not None and not one.findings for one in found)
