"""Suggestions for a plan that does not fit: the suggested numbers fit, and larger ones do not."""

import re

from alike import changed
from tiny import CONFIG

from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.candidates import Budget
from noria.compile.planning.run_bounds import ExpectedRow
from noria.runtime.files.layout_files import read_layout_table
from noria.runtime.planning.layout_ranking import Ranking, suggest_fitting_plan
from noria.sharding.layout import Layout

SPLIT = changed(CONFIG, vocab_size=256, mlp=64, num_query_heads=8, num_kv_heads=8)
"""A model that splits over up to eight devices."""
HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
ROWS = [ExpectedRow(RowShape(40, 60, 1), 60)]


def ranking(memory_bytes: float, num_devices: int = 2) -> Ranking:
    budget = Budget(memory_bytes=memory_bytes)
    return Ranking(SPLIT, ROWS, HARDWARE, "float32", budget, num_devices)


def tensor(num_devices: int) -> Layout:
    return Layout.from_table(read_layout_table(f"weight-stationary-1d@tensor={num_devices}"))


def needed(num_devices: int) -> int:
    """Return the bytes of weights, and of a slot of the longest row, on each device."""
    (one,) = ranking(1e12, num_devices).rank([tensor(num_devices)])
    assert one.min_bytes is not None
    return one.min_bytes


def said(memory_bytes: float, num_devices: int = 2) -> str:
    asked = ranking(memory_bytes, num_devices)
    refused = asked.rank([tensor(num_devices)])
    assert refused[0].bound is None
    return suggest_fitting_plan(asked, refused)


def test_so_many_devices_are_named_that_half_of_them_would_not_do():
    text = said(needed(8))
    assert "8 devices instead of 2 (weight-stationary-1d, tensor=8: 0.00 GB a device)" in text
    assert needed(4) > needed(8)
    assert "4 devices instead of 2" in said(needed(4))


def test_rows_are_named_that_fit_beside_the_weights_and_longer_ones_do_not():
    (one,) = ranking(1e12).rank([tensor(2)])
    assert one.cost is not None and one.max_row_length is not None
    work = one.cost.work
    allowed = work.parameter_bytes + 1.5 * work.page_bytes(64)
    found = re.search(r"rows of at most (\d+) tokens instead of (\d+), 1 at a time", said(allowed))
    assert found is not None
    longest, wanted = map(int, found.groups())
    assert wanted == one.max_row_length
    assert longest == 64


def test_weights_that_no_mesh_of_the_layout_splits_enough_have_no_plan_near():
    assert said(needed(8) / 2, num_devices=8).endswith("fits: none under these layouts.")


def test_nothing_is_said_of_memory_where_it_suffices():
    asked = ranking(1e12)
    assert suggest_fitting_plan(asked, asked.rank([tensor(2)])) == ""
