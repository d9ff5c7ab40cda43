"""The run that a report draws: its seconds, and what rows hold as the scheduler itself has it."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.cost import CostModel
from noria.compile.planning.work import Work
from noria.runtime.engine.actions import DecodeAction, PrefillAction
from noria.runtime.engine.scheduler import Scheduler
from noria.runtime.planning.page import draw_run
from noria.runtime.planning.report import bytes_by_kind
from noria.runtime.planning.simulator import SimulatedRow, Timeline, schedule

HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
COST = CostModel(Work(AbstractModel(CONFIG), "float32"), HARDWARE)
PAGED = BucketGrid(
    max_length=256,
    prefill=((256, 16, 16),),
    decode_slots=16,
    chunks_per_decode=2,
    pages=24,
    page=16,
)
WHOLE = replace(PAGED, prefill=((32, 8), (64, 4)), chunks_per_decode=None, pages=256)


@pytest.fixture
def rows() -> list[SimulatedRow]:
    rng = np.random.default_rng(1)
    lengths = [(int(rng.integers(1, 64)), int(rng.integers(1, 150))) for _ in range(80)]
    return [SimulatedRow(prompt, 256, (output,) * 2) for prompt, output in lengths]


@pytest.fixture
def seen(monkeypatch) -> list:
    """The actions, with the slots and pages that the scheduler then has in use."""
    seen, next_action = [(object(), 0, 0)], Scheduler.next_action

    def watched(self):
        action, slots = next_action(self), self.slots
        num_pages = len(np.setdiff1d(slots.pool.table, slots.pool.no_page))
        # the scheduler asks itself for the action that follows another
        if action is not seen[-1][0]:
            seen.append((action, len(slots) - len(slots.free), num_pages))
        return action

    monkeypatch.setattr(Scheduler, "next_action", watched)
    return seen


@pytest.mark.parametrize("grid", [PAGED, WHOLE], ids=["few pages", "all pages"])
def test_the_run_in_time_is_that_of_the_scheduler(grid, rows, seen):
    found = schedule(grid, rows)
    timeline = Timeline.of(found, grid, COST)
    calls = [
        one for one in seen[1:] if isinstance(one[0], (PrefillAction, DecodeAction, type(None)))
    ]
    assert timeline.slots_T.tolist() == [slots for _, slots, _ in calls]
    assert timeline.pages_T.tolist() == [pages for *_, pages in calls]
    assert timeline.slots_T.max() <= grid.decode_slots
    assert timeline.pages_T.max() <= grid.pages
    assert not (timeline.slots_T[-1] or timeline.pages_T[-1] or timeline.waiting_T[-1])
    metrics = found.priced(grid, COST).metrics
    assert timeline.waiting_T.sum() == metrics.pages.waits
    assert (metrics.pages.waits > 0) == (grid.pages < grid.most_pages)
    seconds_C = np.diff(timeline.end_T)
    for uses, is_kind_C in (
        (list(metrics.prefill.values()), ~timeline.is_decode_C),
        ([metrics.decode], timeline.is_decode_C),
    ):
        seconds = sum(use.seconds for use in uses)
        # the counters price all calls of a graph that reads pages at their average entries
        reads_pages = grid.chunks or uses == [metrics.decode]
        tolerance = 0.01 if reads_pages else 1e-9
        assert seconds_C[is_kind_C].sum() == pytest.approx(seconds, rel=tolerance)
    png = draw_run(timeline, grid.decode_slots, grid.pages)
    assert png.startswith(b"\x89PNG")


def test_the_share_of_decode_is_that_of_its_seconds():
    no_rows = np.zeros(4, int)
    timeline = Timeline(
        np.array([0.0, 1.0, 3.0, 4.0]), np.array([False, True, False]), *[no_rows] * 3
    )
    shares = timeline.share_of_decode(np.array([0.0, 2.0, 2.5, 4.0]))
    assert shares == pytest.approx([0.5, 1.0, 1 / 3])


@pytest.mark.parametrize("row_tokens", [None, 16])
def test_the_kinds_of_memory_are_parts_of_a_device(row_tokens):
    """With `row_tokens`, slots have pages of their own beside the pool."""
    work, grid = COST.work, replace(PAGED, row_tokens=row_tokens)
    of_pool, of_slot = work.bytes_of_pages(grid.page, grid.window_pages)
    memory = {"weights": 5000, "cache": work.grid_bytes(grid), "page": of_pool}
    memory |= {"working": 0.0, "device": 10**7}
    kinds = bytes_by_kind(grid, {"memory_bytes": memory, "held": {"pages": 5}})
    assert sum(kinds.values()) == pytest.approx(10**7)
    assert (kinds["held"], kinds["unused"]) == pytest.approx((5 * of_pool, 19 * of_pool))
    assert kinds["cache"] == pytest.approx(16 * of_slot)
