"""Rows on pages: outputs, counters and calls on a device whose pages hold tokens."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from paged_device import EOS_ID, NOT_FINITE, VOCAB, PagedDevice, answer, session
from related_prompts import related_prompts

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.engine.padding import row_seed
from noria.runtime.engine.shared_prefixes import plan_submission
from noria.runtime.planning.simulator import SimulatedRow, schedule
from noria.runtime.request import Request, SampleRule, SamplingParams
from noria.runtime.rows.prefix_index import PrefixIndex

WHOLE = BucketGrid(
    max_length=96,
    prefill=((8, 4), (32, 2), (64, 1)),
    decode_slots=32,
    steps_per_call=4,
    score=True,
    pages=40,
    page=8,
)
CHUNKS = replace(WHOLE, prefill=((96, 3, 8),), chunks_per_decode=3)
TAILS = replace(WHOLE, prefill=((96, 5, 4), (96, 3, 16)), page=4, pages=60)
TIGHT = replace(CHUNKS, pages=12)
LONG_CALLS = replace(WHOLE, pages=24, page=4, steps_per_call=16)
GRIDS = {
    "whole": WHOLE,
    "chunks": CHUNKS,
    "tails": TAILS,
    "pages for one row": TIGHT,
    "several pages a call": LONG_CALLS,
    "whole, pages for one row": replace(WHOLE, pages=12),
    "groups of slots": replace(CHUNKS, slot_groups=4, pages=64),
    "groups, pages for one row": replace(WHOLE, slot_groups=2, pages=24),
    "pages of slots": replace(CHUNKS, row_tokens=16),
    "pages of slots, whole prompts": replace(LONG_CALLS, row_tokens=1),
    "pages of slots, groups": replace(TAILS, row_tokens=16, slot_groups=2),
    "enough pages": replace(WHOLE, pages=32 * 12),
}


@pytest.fixture(params=GRIDS.values(), ids=GRIDS)
def grid(request) -> BucketGrid:
    return request.param


def mixed_requests(seed: int, count: int = 40, not_finite: float = 0.05) -> list[Request]:
    """Return rows whose limits are far above their outputs; some are scored or not finite."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        length = int(rng.integers(1, 50))
        prompt = rng.integers(3, NOT_FINITE, length).tolist()
        if rng.random() < not_finite:
            prompt[rng.integers(length)] = NOT_FINITE
        num_stops = int(rng.choice([0, 4, 7]))
        params = SamplingParams(
            max_tokens=0 if i % 9 == 4 else int(rng.integers(1, 96 - length)),
            n=int(rng.choice([1, 1, 1, 2, 5])) if i % 9 != 4 else 1,
            stop_token_ids=tuple(rng.integers(3, NOT_FINITE, num_stops).tolist()),
            prompt_logprobs=1 if rng.random() < 0.3 or i % 9 == 4 else None,
            logprobs=0 if rng.random() < 0.3 else None,
        )
        requests.append(Request(f"row-{i}", prompt, params))
    return requests


def run(grid, requests, prefixes=None, num_held=0):
    """Run requests in their order; return the session and the outputs."""
    generator, outputs = session(grid), {}
    generator.reserve(num_held)
    waiting = list(zip(requests, prefixes or [None] * len(requests), strict=True))
    while waiting or generator.unfinished:
        while waiting and generator.wants_more:
            generator.submit(*waiting.pop(0))
        for output in generator.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        pool = generator.slots.scheduler.slots.pool
        assert 0 <= pool.num_free <= grid.pages
        assert len(set(pool.table[pool.table < grid.pages].tolist())) == grid.pages - pool.num_free
    assert generator.next_action() is None
    assert pool.num_free == grid.pages
    return generator, outputs


def answers(request) -> list[list[int]]:
    """Return the tokens of each sample without a device."""
    params, prompt = request.params, request.prompt_token_ids
    key, stop_ids = row_seed(params, 0, request.request_id), (EOS_ID, *params.stop_token_ids)
    limit = len(prompt) + params.max_tokens
    return [answer(prompt, key, sample, limit, stop_ids) for sample in range(params.n)]


def check(requests, outputs) -> int:
    """Compare outputs with those without a device; return the number of tokens."""
    num_tokens = 0
    assert outputs.keys() == {request.request_id for request in requests}
    for request in requests:
        output, params = outputs[request.request_id], request.params
        prompt, expected = request.prompt_token_ids, answers(request)
        if NOT_FINITE in prompt:
            assert params.max_tokens == 0 or output.error.code == "nonfinite_logits"
            continue
        assert [list(o.token_ids) for o in output.outputs] == expected
        for o, tokens in zip(output.outputs, expected, strict=True):
            num_tokens += len(tokens)
            if params.logprobs is not None:
                assert [s.logprob for s in o.logprobs] == [-token / VOCAB for token in tokens]
        if params.prompt_logprobs is not None:
            scores = [s.logprob for s in output.prompt_logprobs[1:]]
            assert scores == [-token / VOCAB for token in prompt[1:]]
    return num_tokens


def without_times(report) -> dict:
    uses = {
        f"{phase} {name}": {key: use[key] for key in use if key != "seconds"}
        for phase, of_phase in report["buckets"].items()
        for name, use in of_phase.items()
    }
    return uses | {key: report[key] for key in ("padding", "waits", "replays", "shared_prefixes")}


@cache
def mixed_run(grid, seed):
    """Run mixed requests; return the requests, the session and the number of tokens."""
    requests = mixed_requests(seed)
    generator, outputs = run(grid, requests)
    return requests, generator, check(requests, outputs)


@pytest.mark.parametrize("seed", range(2))
def test_rows_emit_what_they_emit_alone_and_pages_come_back(grid, seed):
    pages = mixed_run(grid, seed)[1].metrics.pages
    if grid.pages == 32 * 12:
        assert not pages.waits and not pages.replays
    elif grid.pages // (grid.slot_groups or 1) < 24:
        assert pages.waits


@pytest.mark.parametrize("seed", range(2))
def test_what_is_computed_again_is_no_real_token(grid, seed):
    _, generator, num_tokens = mixed_run(grid, seed)
    report = generator.metrics.report()
    padding, pages = report["padding"], generator.metrics.pages
    again = pages.recomputed_prompt_tokens + pages.recomputed_output_tokens
    assert padding["recomputed_tokens"] == again
    assert (again > 0) == (report["replays"] > 0)
    assert generator.metrics.emitted_tokens == num_tokens
    waste = ("prefill_padding_tokens", "idle_slot_tokens", "overshoot_tokens", "recomputed_tokens")
    parts = [padding[name] for name in waste]
    assert all(part >= 0 for part in parts)
    assert padding["computed_tokens"] == padding["real_tokens"] + sum(parts)


@pytest.mark.parametrize("seed", range(2))
def test_the_simulator_has_the_counts_of_the_run(grid, seed):
    requests, generator, _ = mixed_run(grid, seed)
    rows = []
    for request in requests:
        length, params = len(request.prompt_token_ids), request.params
        lengths = tuple(map(len, answers(request)))
        is_scored = params.prompt_logprobs is not None
        emitted = lengths if params.max_tokens else ()
        rows.append(SimulatedRow(length, length + params.max_tokens, emitted, is_scored=is_scored))
    simulation = schedule(grid, rows).priced(grid, None)
    assert without_times(simulation.metrics.report()) == without_times(generator.metrics.report())
    assert simulation.metrics.pages == generator.metrics.pages


STOPPED = {
    "string": {"stop": ("ab", "hf")},
    "agreement": {"stopping": SampleRule("([ab])", stop_when=2), "n": 4},
    "certainty": {"stopping": SampleRule("([ab])", probe_every=8, probes=3), "n": 6},
    "agreement while samples start again": {
        "stopping": SampleRule("([abcd])", stop_when=2), "n": 6, "stop": ("ab", "cd", "ee"),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((kind, seed) for kind in ("string", "agreement", "certainty") for seed in range(2)),
        *(("agreement while samples start again", seed) for seed in (3, 9)),
    ],
)
def test_text_ends_rows_where_it_ends_them_with_enough_pages(kind, seed):
    grid, rng = TIGHT, np.random.default_rng(seed)
    requests = [
        Request(
            f"row-{i}",
            rng.integers(3, NOT_FINITE, int(rng.integers(1, 40))).tolist(),
            SamplingParams(max_tokens=50, **STOPPED[kind]),
        )
        for i in range(12)
    ]
    generator, outputs = run(grid, requests)
    _, expected = run(replace(grid, pages=32 * 12), requests)
    assert {name: replace(output, metrics=None) for name, output in outputs.items()} == {
        name: replace(output, metrics=None) for name, output in expected.items()
    }
    assert generator.metrics.pages.replays
    if kind == "string":
        rows = [
            SimulatedRow(
                len(request.prompt_token_ids),
                len(request.prompt_token_ids) + 50,
                (len(outputs[request.request_id].outputs[0].token_ids),),
                ends_on_host=outputs[request.request_id].outputs[0].finish_reason == "stop",
            )
            for request in requests
        ]
        metrics = schedule(grid, rows).priced(grid, None).metrics
        assert without_times(metrics.report()) == without_times(generator.metrics.report())
        assert metrics.pages == generator.metrics.pages


def test_tight_pools_make_rows_wait_and_start_again():
    generator, _ = run(TIGHT, mixed_requests(0))
    assert generator.metrics.pages.replays and generator.metrics.pages.waits


@pytest.mark.parametrize(("pages", "groups"), [(24, 1), (40, 1), (100, 1), (100, 2), (256, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_rows_share_the_pages_of_prefixes(seed, pages, groups):
    grid = BucketGrid(
        256, ((256, 3, 16),), 32, steps_per_call=4, score=True, chunks_per_decode=3,
        page=16, pages=pages, slot_groups=groups,
    )  # fmt: skip
    prompts, rng = related_prompts(seed), np.random.default_rng(seed)
    prompts = [[NOT_FINITE if token == 8 and rng.random() < 0.02 else token + 3 for token in p]
               for p in prompts]  # fmt: skip
    requests = [
        Request(
            f"row-{i}",
            prompt,
            SamplingParams(
                max_tokens=int(rng.integers(1, 50)),
                n=int(rng.choice([1, 1, 3])),
                prompt_logprobs=int(rng.integers(2)) or None,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]
    lengths = [(len(r.prompt_token_ids), r.params.max_tokens) for r in requests]
    index = PrefixIndex()
    for i, r in enumerate(requests):
        index.add(i, r.prompt_token_ids, r.params.prompt_logprobs)
    plan = plan_submission(lengths, index.table(), grid)
    assert plan.num_held < pages // groups // 16
    ordered = [requests[row] for row in plan.rows]
    generator, outputs = run(grid, ordered, plan.prefixes, plan.num_held)
    check(requests, outputs)
    if pages > 24 and plan.num_held:
        assert generator.metrics.copied_tokens


GROUPS = BucketGrid(
    64, ((64, 16, 8),), 16, steps_per_call=4, score=True, chunks_per_decode=3, page=16,
    slot_groups=2,
)  # fmt: skip


@pytest.mark.parametrize(("pages", "num_samples"), [(64, 8), (12, 1)])
def test_held_prefixes_leave_room_in_every_group(pages, num_samples):
    """Samples need a whole group, or pages hold one more row of a group, and prefixes take some."""
    grid, beginnings = replace(GROUPS, pages=pages), [[5] * 48, [9] * 48]
    prompts = [[*beginnings[i // 3], *range(3, 9), 10 + i, 4] for i in range(6)]
    params = SamplingParams(max_tokens=6, n=num_samples)
    requests = [Request(f"{i}", prompt, params) for i, prompt in enumerate(prompts)]
    index = PrefixIndex()
    for i, request in enumerate(requests):
        index.add(i, request.prompt_token_ids, None)
    plan = plan_submission([(56, 6)] * 6, index.table(), grid)
    ordered = [requests[row] for row in plan.rows]
    _, outputs = run(grid, ordered, plan.prefixes, plan.num_held)
    check(requests, outputs)


def test_rows_begin_in_the_group_of_their_prefix():
    grid = replace(GROUPS, pages=64, slot_groups=4)
    requests = [
        Request(f"{i}", [*[5] * 48, 10 + i], SamplingParams(max_tokens=3)) for i in range(3)
    ]
    index = PrefixIndex()
    for i, request in enumerate(requests):
        index.add(i, request.prompt_token_ids, None)
    plan = plan_submission([(49, 3)] * 3, index.table(), grid)
    ordered = [requests[row] for row in plan.rows]
    generator, outputs = run(grid, ordered, plan.prefixes, plan.num_held)
    check(requests, outputs)
    # the prefix fills whole pages, which are shared within its group and copied to others
    assert plan.num_held and not generator.runner.num_copied


def test_each_group_of_slots_goes_on():
    """The youngest rows of a group give their pages back if all its rows lack pages."""
    grid = replace(WHOLE, slot_groups=2, pages=44)
    requests = [Request(f"{i}", [5 + i] * 30, SamplingParams(max_tokens=60)) for i in range(42)]
    generator, outputs = session(grid), []
    waiting = list(requests)
    slots, stops = generator.slots.scheduler.slots, np.zeros(2)
    while waiting or generator.unfinished:
        while waiting and generator.wants_more:
            generator.submit(waiting.pop(0))
        lengths = slots._length_B.reshape(2, -1).copy()
        is_live = (slots._max_length_B > 0).reshape(2, -1).any(axis=1)
        outputs += generator.step()
        moved = (slots._length_B.reshape(2, -1) != lengths).any(axis=1)
        stops = np.where(is_live & ~moved, stops + 1, 0)
        assert stops.max() < 8
    check(requests, {output.request_id: output for output in outputs})


def test_non_finite_pages_are_cleared_for_the_next_row():
    grid = replace(WHOLE, pages=12)
    requests = [
        Request(f"{i}", [5, NOT_FINITE if i % 3 == 0 else 7] * 12, SamplingParams(max_tokens=20))
        for i in range(12)
    ]
    generator, outputs = run(grid, requests)
    check(requests, outputs)
    assert generator.runner.num_cleared


@pytest.mark.parametrize("steps", [0, 3, 20])
def test_drained_sessions_end_the_rows_with_slots(grid, steps):
    requests = mixed_requests(steps)
    generator, outputs = session(grid), []
    for request in requests:
        generator.submit(request)
    for _ in range(steps):
        outputs += generator.step()
    dropped = generator.drain()
    outputs += generator.run()
    ended = {output.request_id for output in outputs}
    assert ended.isdisjoint(dropped)
    assert ended | set(dropped) == {request.request_id for request in requests}
    check([r for r in requests if r.request_id in ended], {o.request_id: o for o in outputs})
    assert generator.next_action() is None
    assert generator.slots.scheduler.slots.pool.num_free == grid.pages


def test_grids_without_slots_report_nothing_of_pages():
    grid = BucketGrid(max_length=16, prefill=((8, 1),), decode_slots=0, score=True)
    row = SimulatedRow(4, 4, (0,), is_scored=True)
    report = schedule(grid, [row]).priced(grid, None).metrics.report()
    assert report["buckets"]["prefill"]["8x1 scored"]["calls"] == 1
    assert "waits" not in report and "replays" not in report
    assert "recomputed_tokens" not in report["padding"]


def test_read_entries_are_whole_pages_of_each_step():
    grid = replace(WHOLE, pages=40, page=8)
    generator, _ = run(grid, [Request("0", [9] * 6, SamplingParams(max_tokens=4))])
    # positions 6 and 7 are in the first page, 8 and 9 in the second
    assert generator.metrics.decode.read_entries == 8 + 8 + 16 + 16


def test_the_device_is_of_use():
    device = PagedDevice(WHOLE)
    device.entries[3, 0] = NOT_FINITE
    with pytest.raises(AssertionError):
        device._read(np.array([2, 3]), 4)
