"""Which devices a plan may run on, and which of them jax is let start."""

from types import SimpleNamespace

import jax
import pytest
from tiny import GRID

from noria.compile.bucket_grid import BucketGrid
from noria.compile.plan import Plan, PlannedModel
from noria.compile.targets import Target
from noria.runtime.session import check_layout, check_target, prepare_cpu


def plan_for(target: str) -> Plan:
    return Plan(target, PlannedModel("tiny", "", "bfloat16"), GRID)


def present(name: str, platform: str, count: int) -> Target:
    return Target(name, platform, tuple(range(count)), is_present=True)


@pytest.mark.parametrize(
    ("planned", "found"),
    [
        ("tpu:v5e:2x4", present("tpu:8", "tpu", 8)),
        ("gpu:h100:8", present("gpu:8", "gpu", 8)),
        ("cpu", present("cpu", "cpu", 1)),
    ],
)
def test_a_plan_for_a_topology_runs_on_as_many_devices_of_its_platform(planned, found):
    check_target(plan_for(planned), found)


@pytest.mark.parametrize(
    ("planned", "found"),
    [
        ("tpu:v5e:2x4", present("tpu:4", "tpu", 4)),
        ("tpu:v5e:2x4", present("cpu:8", "cpu", 8)),
        ("cpu", present("cpu:2", "cpu", 2)),
    ],
)
def test_a_plan_for_other_devices_is_refused_by_name(planned, found):
    with pytest.raises(ValueError, match=f"expected {found.name}, got {planned}"):
        check_target(plan_for(planned), found)


@pytest.mark.parametrize(
    ("target", "starts"),
    [
        ("cpu", {"jax_platforms": "cpu"}),
        ("gpu:h100:8", {"jax_platforms": "cpu"}),
        ("tpu:v5e:2x4", {"jax_platforms": "cpu"}),
        ("gpu:8", {}),
        ("tpu", {}),
        (None, {}),
    ],
)
def test_jax_starts_no_other_backend_for_what_is_not_to_run_on_one(target, starts, monkeypatch):
    set_by_us = {}
    values = {"jax_platforms": None, "jax_num_cpu_devices": 0}
    config = SimpleNamespace(values=values, update=set_by_us.__setitem__)
    monkeypatch.setattr(jax, "config", config)
    prepare_cpu(target)
    assert set_by_us == starts


@pytest.mark.parametrize("groups", [1, 2, None])
def test_slots_in_groups_need_the_layout_that_has_them(groups):
    """On one device the long slots are the first: rows in others would lose what they said."""
    span_slots = None if groups is None else (4, 2)
    grid = BucketGrid(64, ((16, 1),), 4, (32, 64), span_slots=span_slots, slot_groups=groups)
    one = present("cpu", "cpu", 1)
    if groups != 2:
        check_layout(None, None, one, grid)
        return
    with pytest.raises(ValueError, match=r"slot_groups: without a layout, expected 1, .* got 2"):
        check_layout(None, None, one, grid)
