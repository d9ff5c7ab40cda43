"""Jobs of many rows in a pool for few of them, with forecasts that are wrong."""

from dataclasses import replace

import numpy as np
import pytest

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.engine.actions import DecodeAction
from noria.runtime.engine.scheduler import Scheduler
from noria.runtime.planning.simulator import SimulatedRow, schedule

WHOLE = BucketGrid(
    max_length=256,
    prefill=((32, 8), (64, 4)),
    decode_slots=64,
    steps_per_call=8,
    score=True,
    pages=320,
    page=16,
)
CHUNKS = replace(WHOLE, prefill=((256, 4, 16), (256, 2, 64)), chunks_per_decode=2)
GRIDS = {
    "whole": WHOLE,
    "chunks": CHUNKS,
    "few pages": replace(WHOLE, pages=24),
    "chunks, few pages": replace(CHUNKS, pages=24),
    "large calls of tiles": replace(WHOLE, prefill=((256, 16, 16),), chunks_per_decode=2),
}
OUTPUTS = {
    "ten times longer at the end": lambda i, rng: 15 if i < 100 else 150,
    "ten times shorter at the end": lambda i, rng: 150 if i < 100 else 15,
    "growing": lambda i, rng: 1 + i * 9 // 10,
    "short or long": lambda i, rng: int(rng.choice([3, 180])),
}


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", GRIDS)
def test_every_job_ends_with_all_its_tokens(name, outputs):
    grid, rng = GRIDS[name], np.random.default_rng(1)
    rows = [
        SimulatedRow(
            int(rng.integers(1, 64)),
            256,
            (OUTPUTS[outputs](i, rng),) * int(rng.choice([1, 1, 1, 3])),
            is_scored=bool(rng.random() < 0.2),
        )
        for i in range(200)
    ]
    metrics = schedule(grid, rows).priced(grid, None).metrics
    num_tokens = sum(sum(row.outputs) for row in rows)
    assert metrics.emitted_tokens == num_tokens
    padding = metrics.padding
    assert padding["real_tokens"] - num_tokens >= sum(row.prompt_length for row in rows)
    assert padding["overshoot_tokens"] >= 0
    if grid.pages == 24:
        assert metrics.pages.replays and metrics.pages.waits
        assert padding["recomputed_tokens"] > 0


@pytest.mark.parametrize("rows_of_call", [4, 16, 64])
def test_packed_calls_are_full_but_for_the_first_fill_and_the_end(rows_of_call):
    grid = replace(WHOLE, pages=1024, prefill=((256, rows_of_call, 16),), chunks_per_decode=99)
    rng = np.random.default_rng(0)
    rows = [SimulatedRow(int(n), 256, (60,)) for n in rng.integers(1, 120, 600)]
    use = schedule(grid, rows).metrics.prefill[str(grid.prefill[0])]
    num_tiles = sum(-(-row.prompt_length // 16) for row in rows)
    assert use.rows == num_tiles
    assert use.calls <= -(-num_tiles // rows_of_call) + 3


def test_more_pages_take_fewer_calls():
    rows = [SimulatedRow(30, 256, (100,)) for _ in range(100)]
    calls = []
    for pages in (16, 40, 100, 400, 1024):
        grid = replace(WHOLE, pages=pages)
        metrics = schedule(grid, rows).priced(grid, None).metrics
        calls.append(metrics.decode.calls)
    assert calls == sorted(calls, reverse=True)
    assert calls[0] > 10 * calls[-1]


def test_the_oldest_row_always_goes_on():
    grid = replace(CHUNKS, pages=20)
    scheduler, rng = Scheduler(grid), np.random.default_rng(0)
    rows = [SimulatedRow(int(rng.integers(1, 64)), 250, (200,)) for _ in range(30)]
    for number, row in enumerate(rows):
        scheduler.submit(row.request(number))
    slots, num_calls = scheduler.slots, 0
    while (action := scheduler.next_action()) is not None:
        assert 0 <= slots.pool.num_free <= 20
        if not isinstance(action, DecodeAction):
            continue
        num_calls += 1
        ages = slots.growth.by_age(np.array(slots.live)).tolist()
        assert ages[0] in action.slots
        assert action.num_waiting == len(slots.live) - len(action.slots)
        assert not set(action.given_back) & set(action.slots)
        for slot in action.slots:
            slots.advance(slot, 8)
            if slots._length_B[slot] >= slots._max_length_B[slot]:
                slots.release(slot)
    assert num_calls
    assert slots.pool.num_free == 20
