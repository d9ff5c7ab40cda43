"""The plan of a case of `noria bench`: a slot for each row, if there are as many."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import CONFIG

from noria.compile.grids.row_shape import RowShape
from noria.compile.plan import Numbers
from noria.compile.targets import find_target
from noria.runtime.devices.graph_memory import MEMORY_SHARE
from noria.runtime.planning import case_plan as case
from noria.runtime.planning.target_work import work_of


@pytest.fixture
def planned(monkeypatch):
    files: Any = SimpleNamespace(
        spec=SimpleNamespace(config=CONFIG), name="tiny", fingerprint=lambda: ""
    )

    def plan(platform: str, num_rows: int, memory: float = 0):
        target = replace(find_target("cpu"), name=platform, platform=platform)
        monkeypatch.setattr(case, "device_bytes", lambda target: memory)
        return case.case_plan(
            files, target, "float32", None, [RowShape(20, 12)] * num_rows, ()
        ).buckets

    return plan


def test_a_case_has_a_slot_for_each_row_and_an_accelerator_at_most_512(planned):
    assert planned("cpu", 600).decode_slots == 600
    assert planned("gpu", 600).decode_slots == 512
    assert planned("gpu", 30).decode_slots == 30


def test_an_accelerator_takes_more_tokens_a_call(planned):
    tokens = {
        platform: max(bucket.batch * bucket.length for bucket in planned(platform, 512).prefill)
        for platform in ("cpu", "gpu")
    }
    assert tokens["cpu"] <= 512 < tokens["gpu"] <= 2048


def test_a_case_has_no_more_slots_than_memory_holds(planned):
    target = replace(find_target("cpu"), name="gpu", platform="gpu")
    work = work_of(CONFIG, Numbers("float32"), None, target)
    held = (work.parameter_bytes + 50.5 * work.page_bytes(64)) / MEMORY_SHARE
    assert planned("gpu", 600, held).decode_slots == 50
