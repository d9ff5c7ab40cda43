"""Packed prefill calls: which pieces of which prompts a call has, and what becomes of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_device import NOT_FINITE, VOCAB, session

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.engine.actions import (
    DecodeAction,
    ForkAction,
    PrefillAction,
    ScheduledRequest,
)
from noria.runtime.engine.scheduler import Scheduler
from noria.runtime.planning.simulator import SimulatedRow, schedule
from noria.runtime.request import Request, SamplingParams

GRID = BucketGrid(
    max_length=96,
    prefill=((96, 6, 8),),
    decode_slots=16,
    steps_per_call=4,
    score=True,
    chunks_per_decode=3,
    pages=96,
    page=16,
)
TWO_SIZES = replace(GRID, prefill=((96, 5, 4), (96, 3, 16)))


def scheduled(number, length, max_tokens=8, num_sequences=1, is_scored=False) -> ScheduledRequest:
    return ScheduledRequest(number, length, length + max_tokens, num_sequences, is_scored)


def next_calls(scheduler, count: int) -> list[list[tuple[int, int, int]]]:
    """Return number, start and count of each row of the next prefill calls."""
    calls = []
    while len(calls) < count:
        action = scheduler.next_action()
        if isinstance(action, PrefillAction):
            calls.append([(r.sequence.request.number, r.start, r.count) for r in action.rows])
    return calls


def test_prompts_fill_a_call_in_order_and_go_on_in_the_next_one():
    scheduler = Scheduler(GRID)
    for number, length in enumerate([20, 9, 30, 5]):
        scheduler.submit(scheduled(number, length))
    assert next_calls(scheduler, 2) == [
        [(0, 0, 8), (0, 8, 8), (0, 16, 4), (1, 0, 8), (1, 8, 1), (2, 0, 8)],
        [(2, 8, 8), (2, 16, 8), (2, 24, 6), (3, 0, 5)],
    ]


def test_a_prompt_that_is_longer_than_a_call_fills_several_and_the_next_one_follows():
    scheduler = Scheduler(GRID)
    scheduler.submit(scheduled(0, 80))
    scheduler.submit(scheduled(1, 10))
    first, second = next_calls(scheduler, 2)
    assert first == [(0, 8 * i, 8) for i in range(6)]
    assert second == [*((0, 8 * i, 8) for i in range(6, 10)), (1, 0, 8), (1, 8, 2)]


def test_a_call_has_pieces_of_one_size():
    scheduler = Scheduler(TWO_SIZES)
    for number, length in enumerate([40, 18, 33]):
        scheduler.submit(scheduled(number, length))
    assert next_calls(scheduler, 4) == [
        [(0, 0, 16), (0, 16, 16), (1, 0, 16)],
        [(0, 32, 4), (0, 36, 4), (1, 16, 2)],
        [(2, 0, 16), (2, 16, 16)],
        [(2, 32, 1)],
    ]


@pytest.mark.parametrize(("length", "is_full"), [(40, False), (41, True)])
def test_a_call_is_full_when_its_rows_are_however_few_prompts_they_are_of(length, is_full):
    """One free slot is too few to run a call with an empty row."""
    scheduler = Scheduler(GRID)
    for number in range(16):
        scheduler.submit(scheduled(number, 5, max_tokens=80))
    while not isinstance(scheduler.next_action(), DecodeAction):
        pass
    for number in (16, 17):
        scheduler.submit(scheduled(number, length))
    scheduler.slots.release(3)
    assert isinstance(scheduler.next_action(), PrefillAction if is_full else DecodeAction)
    scheduler.slots.release(7)
    assert isinstance(scheduler.next_action(), PrefillAction)


def test_a_row_reads_whole_pages_up_to_its_own_end():
    scheduler = Scheduler(GRID)
    scheduler.submit(scheduled(0, 35))
    action = scheduler.next_action()
    assert isinstance(action, PrefillAction)
    assert action.read_entries == 16 + 16 + 32 + 32 + 48
    metrics = schedule(GRID, [SimulatedRow(35, 96, (4,))]).metrics
    assert metrics.prefill[str(GRID.prefill[0])].read_entries == action.read_entries


@pytest.mark.parametrize("length", [5, 48, 90])
def test_a_prompt_that_is_only_scored_has_pages_and_gives_them_back(length):
    """A piece reads its own tokens from pages, so a short prompt needs a slot, too."""
    generator = session(GRID)
    prompt = [3 + i % 90 for i in range(length)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    generator.submit(Request("0", prompt, params))
    (output,) = generator.run()
    scores = [score.logprob for score in output.prompt_logprobs[1:]]
    assert scores == [-token / VOCAB for token in prompt[1:]]
    (use,) = generator.metrics.prefill.values()
    assert (use.calls, use.rows) == (-(-length // 48), -(-length // 8))
    assert generator.next_action() is None
    assert generator.slots.scheduler.slots.pool.num_free == GRID.pages


def test_samples_that_do_not_fit_together_score_their_prompt_once_each():
    """Both prompts of the request have pieces in one call."""
    grid = replace(GRID, pages=9, prefill=((96, 12, 8),))
    generator, prompt = session(grid), list(range(3, 27))
    generator.submit(Request("0", prompt, SamplingParams(max_tokens=4, n=12, prompt_logprobs=0)))
    (output,) = generator.run()
    assert [s.logprob for s in output.prompt_logprobs[1:]] == [-t / VOCAB for t in prompt[1:]]
    assert len(output.outputs) == 12


def test_one_piece_that_is_not_finite_fails_its_request_alone():
    generator = session(GRID)
    params = SamplingParams(max_tokens=4)
    for number in range(3):
        prompt = [9] * 20
        prompt[9] = NOT_FINITE if number == 1 else 9
        generator.submit(Request(f"{number}", prompt, params))
    outputs = {output.request_id: output for output in generator.run()}
    assert outputs["1"].error.code == "nonfinite_logits"
    assert outputs["0"].error is outputs["2"].error is None
    assert next(iter(generator.metrics.prefill.values())).calls == 2


def test_an_average_prompt_is_padded_by_half_a_piece():
    grid = BucketGrid(
        max_length=1024, prefill=((1024, 64, 16),), decode_slots=64, pages=2048, page=64
    )  # fmt: skip
    lengths = [20 + i * 37 % 400 for i in range(600)]
    metrics = schedule(grid, [SimulatedRow(n, 1024, (60,)) for n in lengths]).metrics
    use = metrics.prefill[str(grid.prefill[0])]
    assert use.computed_tokens <= 1.06 * sum(lengths)


requests = st.builds(
    lambda length, max_tokens, n, is_scored: (length, max_tokens, n, is_scored),
    st.integers(1, 60), st.sampled_from([0, 1, 5, 30]), st.integers(1, 4), st.booleans(),
)  # fmt: skip
grids = st.builds(
    lambda grid, pages, batch, groups: replace(
        grid,
        pages=groups * pages,
        slot_groups=groups,
        prefill=tuple((96, batch + i, bucket.chunk) for i, bucket in enumerate(grid.prefill)),
    ),
    st.sampled_from([GRID, TWO_SIZES]),
    st.sampled_from([6, 9, 30, 96]),
    st.integers(1, 20),
    st.sampled_from([1, 2]),
)


@settings(max_examples=60, deadline=None)
@given(grids, st.lists(requests, min_size=1, max_size=25))
def test_every_piece_runs_once_in_order_and_before_its_row_decodes(grid, rows):
    scheduler, length, limit = Scheduler(grid), {}, {}
    of_slot, computed = {}, {}
    for number, (prompt, max_tokens, n, is_scored) in enumerate(rows):
        scheduler.submit(scheduled(number, prompt, max_tokens, n if max_tokens else 1, is_scored))

    def begin(slot, request):
        length[slot], limit[slot] = request.prompt_length, request.max_total_length

    while (action := scheduler.next_action()) is not None:
        match action:
            case PrefillAction(bucket=bucket):
                assert 1 <= len(action.rows) <= bucket.batch
                for row in action.rows:
                    request = row.sequence.request
                    assert row.slot is not None and row.slot not in length
                    if row.start == 0:
                        assert row.slot not in of_slot
                        of_slot[row.slot] = request.number, 0
                    # the piece follows the one before, with the same owner
                    assert of_slot[row.slot] == (request.number, row.start)
                    assert bucket == grid.bucket_of(request.prompt_length, row.start)
                    assert row.count == min(bucket.tokens, request.prompt_length - row.start)
                    of_slot[row.slot] = request.number, row.start + row.count
                    computed[request.number] = computed.get(request.number, 0) + row.count
                    if row.is_last:
                        del of_slot[row.slot]
                        if request.generates:
                            begin(row.slot, request)
            case ForkAction():
                begin(action.slot, action.sequence.request)
            case DecodeAction():
                for slot in action.given_back:
                    del length[slot]
                for slot in action.slots:
                    assert slot not in of_slot
                    grown = min(grid.steps_per_call, limit[slot] - length[slot])
                    scheduler.slots.advance(slot, grown)
                    length[slot] += grown
                    if length[slot] == limit[slot]:
                        del length[slot]
                        scheduler.slots.release(slot)
    assert not length and not of_slot and not scheduler.num_waiting
    assert scheduler.slots.pool.num_free == grid.pages
    for number, (prompt, max_tokens, n, _) in enumerate(rows):
        assert computed[number] >= prompt and computed[number] % prompt == 0
        if grid.pages >= 96 and n == 1 and not max_tokens:
            assert computed[number] == prompt
