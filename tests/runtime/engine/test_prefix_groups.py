"""Groups of slots with planned prefixes: the schedule, and real runs against plans without them."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from related_prompts import related_prompts, table_of
from tiny import CONFIG, TWO_LAYERS, TinyModel
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_choice import choose_prefixes
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid, hash_tokens
from noria.runtime.engine.decode_slots import DecodeAction, ScheduledRequest
from noria.runtime.engine.prefix_groups import PrefixGroups, WaitingRows
from noria.runtime.engine.scheduler import (
    ForkAction,
    PrefillAction,
    PrefixAction,
    Scheduler,
)
from noria.runtime.engine.shared_prefixes import plan_submission
from noria.runtime.errors import RowError
from noria.runtime.planning.simulator import SimulatedRow, simulate
from noria.runtime.request import Request, SamplingParams

GROUPS, STEPS = 3, 8


def grid_for(prompts: list[list[int]], rng: np.random.Generator) -> BucketGrid | None:
    """Return a grid with the prefixes that these prompts share; None if they share none."""
    table, _ = table_of(prompts)
    lengths = np.array([len(prompt) for prompt in prompts])
    if not (shared := choose_prefixes(table, lengths, 2)):
        return None
    slots = GROUPS * int(rng.choice([1, 2, 5]))
    prefixes = PrefixGrid(GROUPS, 256, 64, tuple(shared))
    batches = rng.choice([1, 2, 4], 2).tolist()
    prefill = ((64, batches[0]), (256, batches[1]))
    return BucketGrid(320, prefill, slots, (128, 320), prefixes=prefixes)


class SymbolicRun:
    """A job whose slots hold numbers of rows, and whose groups hold the tokens of prefixes."""

    def __init__(self, seed: int, *, in_order: bool = True, drain_at: int | None = None):
        rng = np.random.default_rng(seed)
        self.prompts = related_prompts(seed)
        grid = grid_for(self.prompts, rng)
        if grid is None:
            pytest.skip("these prompts share nothing")
        self.grid, count = grid, len(self.prompts)
        assert grid.prefixes is not None
        self.prefixes = [grid.prefixes.prefix_of(prompt) for prompt in self.prompts]
        self.outputs = rng.integers(1, 30, count).tolist()
        self.num_samples = rng.choice([1, 1, 3, grid.decode_slots], count).tolist()
        lengths = [(len(p), n) for p, n in zip(self.prompts, self.outputs, strict=True)]
        order = plan_submission(lengths, table_of(self.prompts)[0], grid).rows
        assert sorted(order) == list(range(count))
        self.waiting = deque(order if in_order else rng.permutation(count).tolist())
        self.scheduler = Scheduler(grid)
        self.groups: list[tuple[int, ...]] = [()] * GROUPS
        self.live: dict[int, list] = {}
        self.started: set[int] = set()
        self.done: set[tuple[int, int]] = set()
        self.dropped: set[int] = set()
        self.num_prefix_tokens = 0
        self._run(drain_at)

    def own_length(self, row: int) -> int:
        prefix = self.prefixes[row]
        return len(self.prompts[row]) - (prefix.length if prefix else 0)

    def _run(self, drain_at: int | None) -> None:
        for step in range(100_000):
            while self.waiting and self.scheduler.wants_more:
                row = self.waiting.popleft()
                length = self.own_length(row)
                self.scheduler.submit(
                    ScheduledRequest(
                        row,
                        length,
                        length + self.outputs[row],
                        self.num_samples[row],
                        False,
                        planned_prefix=self.prefixes[row],
                    )
                )
            if step == drain_at:
                self.dropped = {request.number for request in self.scheduler.drain()}
                self.dropped |= set(self.waiting)
                self.waiting.clear()
            match self.scheduler.next_action():
                case PrefixAction() as action:
                    self._prefix(action)
                case PrefillAction() as action:
                    self._prefill(action)
                case ForkAction(source=source, slot=slot, sequence=sequence):
                    assert self.group_of(source) == self.group_of(slot)
                    self._put(slot, sequence)
                case DecodeAction(slots=slots):
                    self._decode(slots)
                case None:
                    return
        raise AssertionError("the job does not end")

    def group_of(self, slot: int) -> int:
        return slot * GROUPS // self.grid.decode_slots

    def _prefix(self, action: PrefixAction) -> None:
        assert not any(self.group_of(slot) == action.group for slot in self.live)
        if action.prefix is None:
            self.groups[action.group] = ()
            return
        row = self.prefixes.index(action.prefix)
        known = () if action.start == 0 else self.groups[action.group]
        assert len(known) == action.start
        new = tuple(self.prompts[row][action.start : action.start + action.count])
        self.groups[action.group] = known + new
        self.num_prefix_tokens += action.count

    def _prefill(self, action: PrefillAction) -> None:
        assert 0 < len(action.rows) <= action.bucket.batch
        for piece in action.rows:
            row = piece.sequence.request.number
            assert (piece.start, piece.count) == (0, self.own_length(row))
            assert self.group_of(piece.slot) == action.group
            self.started.add(row)
            self._put(piece.slot, piece.sequence)

    def _put(self, slot: int, sequence) -> None:
        assert slot not in self.live
        row = sequence.request.number
        prefix = self.prefixes[row]
        wanted = self.prompts[row][: prefix.length] if prefix else []
        assert self.groups[self.group_of(slot)] == tuple(wanted)
        self.live[slot] = [sequence, 0]

    def _decode(self, slots: tuple[int, ...]) -> None:
        assert set(slots) == set(self.live)
        for slot in slots:
            sequence, emitted = self.live[slot]
            row = sequence.request.number
            if emitted + STEPS < self.outputs[row]:
                self.scheduler.advance(slot, STEPS)
                self.live[slot][1] += STEPS
                continue
            del self.live[slot]
            self.scheduler.release(slot)
            key = (row, sequence.sample)
            assert key not in self.done
            self.done.add(key)


def every_sequence(run: SymbolicRun) -> set[tuple[int, int]]:
    return {
        (row, sample)
        for row, count in enumerate(run.num_samples)
        if row not in run.dropped
        for sample in range(count)
    }


@pytest.mark.parametrize("seed", range(40))
def test_rows_decode_once_in_a_group_with_their_prefix(seed):
    run = SymbolicRun(seed)
    assert run.done == every_sequence(run)


@pytest.mark.parametrize("seed", range(20))
def test_rows_in_any_order_decode_once(seed):
    run = SymbolicRun(seed, in_order=False)
    assert run.done == every_sequence(run)


@pytest.mark.parametrize("seed", range(0, 40, 4))
@pytest.mark.parametrize("drain_at", [0, 1, 2, 3, 5, 9])
def test_drained_rows_never_start_and_the_others_end(seed, drain_at):
    run = SymbolicRun(seed, drain_at=drain_at)
    assert run.done == every_sequence(run)
    assert not run.started & run.dropped


def test_rows_that_wait_for_a_full_group_get_a_second_one():
    prefix = PlannedPrefix(16, "0" * 16)
    grid = BucketGrid(64, ((32, 1),), 8, (64,), prefixes=PrefixGrid(2, 16, 16, (prefix,)))
    scheduler = Scheduler(grid)
    for number in range(8):
        scheduler.submit(ScheduledRequest(number, 8, 24, 1, False, planned_prefix=prefix))
    actions = [scheduler.next_action() for _ in range(10)]
    assert [type(action) for action in actions] == (
        [PrefixAction] + 4 * [PrefillAction] + [PrefixAction] + 4 * [PrefillAction]
    )
    groups = [action.group for action in actions if isinstance(action, PrefixAction)]
    assert sorted(groups) == [0, 1]


def test_a_group_keeps_its_prefix_while_a_slot_is_taken():
    grid = BucketGrid(
        64, ((32, 1),), 4, (64,), prefixes=PrefixGrid(2, 16, 16, (PlannedPrefix(16, "0" * 16),))
    )
    scheduler = Scheduler(grid)
    groups = PrefixGroups(grid, scheduler._slots)
    a, b = PlannedPrefix(16, "a" * 16), PlannedPrefix(16, "b" * 16)
    one = WaitingRows(1, 1)
    assert groups.assign({a: one, b: one}) == (0, a)
    scheduler._slots.claim([0])
    assert groups.assign({b: one}) == (1, b)
    scheduler._slots.claim([2])
    assert groups.assign({None: one}) is None
    scheduler._slots.release(0)
    assert groups.assign({None: one}) == (0, None)


PREFIXES = PlannedPrefix(16, "a" * 16), PlannedPrefix(16, "b" * 16)


def two_groups(slots: int, batch: int) -> Scheduler:
    """Return a scheduler with two groups of slots, for rows of 8 own tokens."""
    prefixes = PrefixGrid(2, 16, 16, PREFIXES)
    return Scheduler(BucketGrid(64, ((32, batch),), slots, (64,), prefixes=prefixes))


def test_a_batch_that_waits_for_slots_does_not_stop_other_groups():
    scheduler = two_groups(64, 4)
    for number in range(38):
        scheduler.submit(ScheduledRequest(number, 8, 60, 1, False, planned_prefix=PREFIXES[0]))
    slots: list[int] = []
    while not isinstance(action := scheduler.next_action(), DecodeAction):
        slots += [row.slot for row in getattr(action, "rows", ())]
    scheduler.release(slots[0])
    for number in range(38, 78):
        scheduler.submit(ScheduledRequest(number, 8, 60, 1, False, planned_prefix=PREFIXES[1]))
    actions = [scheduler.next_action() for _ in range(9)]
    rows = sum(len(action.rows) for action in actions if isinstance(action, PrefillAction))
    assert rows == 32 and isinstance(actions[0], PrefixAction)


def test_a_request_of_more_samples_than_a_group_has_free_gets_a_second_group():
    scheduler = two_groups(12, 2)
    for number in range(8):
        scheduler.submit(ScheduledRequest(number, 8, 24, 4, False, planned_prefix=PREFIXES[0]))
    groups = set()
    while not isinstance(action := scheduler.next_action(), DecodeAction):
        groups |= {action.group} if isinstance(action, PrefixAction) else set()
    assert groups == {0, 1} and len(action.slots) == 8


def test_prefixes_of_equally_many_rows_run_longest_rows_first():
    prompts = [[n] * 32 + [end] for n in (1, 2, 3) for end in (1, 2)]
    limits = [10, 10, 50, 50, 30, 30]
    shared = tuple(PlannedPrefix(32, hash_tokens(prompts[i][:32])) for i in (0, 2, 4))
    grid = BucketGrid(64, ((16, 1),), 4, (64,), prefixes=PrefixGrid(2, 64, 64, shared))
    lengths = [(33, limit) for limit in limits]
    order = plan_submission(lengths, table_of(prompts)[0], grid).rows
    assert [limits[row] for row in order] == [50, 50, 30, 30, 10, 10]


def prompts_of_groups() -> list[list[int]]:
    """Return prompts with two beginnings of 20 and 33 tokens, and two without any of them."""
    rng = np.random.default_rng(3)
    vocab = CONFIG.vocab_size
    first, second = (rng.integers(3, vocab, n).tolist() for n in (20, 33))
    ends = [rng.integers(3, vocab, n).tolist() for n in (1, 5, 9, 3, 7, 2, 8, 4)]
    return [
        *(first + end for end in ends[:4]),
        *(second + end for end in ends[4:6]),
        *ends[6:],
    ]


def grid_of_groups(prompts: list[list[int]]) -> BucketGrid:
    shared = (PlannedPrefix(20, hash_tokens(prompts[0][:20])),)
    shared += (PlannedPrefix(33, hash_tokens(prompts[4][:33])),)
    prefixes = PrefixGrid(2, 48, 16, shared)
    return BucketGrid(48, ((16, 2),), 4, (24, 48), steps_per_call=4, prefixes=prefixes)


@pytest.fixture(scope="module")
def models() -> tuple[TinyModel, TinyModel]:
    """Return a model whose rows share prefixes, and the same without prefixes."""
    grid = grid_of_groups(prompts_of_groups())
    alone = replace(grid, prefixes=None, max_length=80, prefill=((48, 2),), decode_spans=(80,))
    return TinyModel(TWO_LAYERS, grid), TinyModel(TWO_LAYERS, alone)


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=9, logprobs=2),
    "penalties": SamplingParams(
        temperature=0, max_tokens=9, repetition_penalty=1.7, presence_penalty=0.4,
        frequency_penalty=0.3, logprobs=2,
    ),
    "seeds": SamplingParams(temperature=1.0, seed=5, max_tokens=9, min_tokens=4, logprobs=2),
    "samples": SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=6, logprobs=2),
}  # fmt: skip


def answers(model: TinyModel, prompts: dict[str, list[int]], params: SamplingParams):
    session = model.generator()
    for name, prompt in prompts.items():
        session.submit(Request(name, prompt, params))
    return {output.request_id: output for output in session.run()}, session


@pytest.mark.parametrize("kind", PARAMS)
def test_answers_equal_those_of_a_plan_without_prefixes(models, kind):
    prompts = {str(i): prompt for i, prompt in enumerate(prompts_of_groups())}
    shared, session = answers(models[0], prompts, PARAMS[kind])
    alone, _ = answers(models[1], prompts, PARAMS[kind])
    for name in prompts:
        for ours, wanted in zip(shared[name].outputs, alone[name].outputs, strict=True):
            assert ours.token_ids == wanted.token_ids
            found, expected = ([x.logprob for x in o.logprobs] for o in (ours, wanted))
            np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)
    counts = session.engine.metrics.shared_prefixes
    assert counts["copied_tokens"] == 4 * 20 + 2 * 33
    assert counts["computed_tokens"] >= 20 + 33


def test_a_row_keeps_its_bits_under_permutation_and_subset(models):
    prompts = {str(i): prompt for i, prompt in enumerate(prompts_of_groups())}
    together, _ = answers(models[0], prompts, PARAMS["seeds"])
    backwards, _ = answers(models[0], dict(reversed(prompts.items())), PARAMS["seeds"])
    for name, prompt in prompts.items():
        alone, _ = answers(models[0], {name: prompt}, PARAMS["seeds"])
        for other in (alone, backwards):
            assert other[name].outputs[0].token_ids == together[name].outputs[0].token_ids
            assert other[name].outputs[0].logprobs == together[name].outputs[0].logprobs


def test_the_simulator_has_the_calls_and_tokens_of_the_run(models):
    prompts = {str(i): prompt for i, prompt in enumerate(prompts_of_groups())}
    _, session = answers(models[0], prompts, PARAMS["greedy"])
    found = session.engine.metrics
    grid = models[0].grid
    assert grid.prefixes is not None
    rows = []
    outputs, _ = answers(models[0], prompts, PARAMS["greedy"])
    for name, prompt in prompts.items():
        prefix = grid.prefixes.prefix_of(prompt)
        own = len(prompt) - (prefix.length if prefix else 0)
        emitted = len(outputs[name].outputs[0].token_ids)
        rows.append(SimulatedRow(own, own + 9, (emitted,), planned_prefix=prefix))
    simulated = simulate(grid, rows, None).metrics
    for phase in ("prefill", "decode"):
        ours, wanted = getattr(simulated, phase), getattr(found, phase)
        assert ours.keys() == wanted.keys()
        for name, use in wanted.items():
            assert vars(ours[name]) | {"seconds": 0} == vars(use) | {"seconds": 0}
    assert simulated.shared_prefixes == found.shared_prefixes
    assert simulated.padding == found.padding


def test_a_row_that_is_too_long_after_its_prefix_is_refused_by_name(models):
    prompt = prompts_of_groups()[0][:20] + [5] * 17
    session = models[0].generator()
    with pytest.raises(
        RowError, match=r"needs prefill length 17; buckets.prefill has lengths \[16\]"
    ):
        session.submit(Request("long", prompt, PARAMS["greedy"]))


def test_other_tokens_with_the_hash_of_a_prefix_are_refused(models, monkeypatch):
    first, other = prompts_of_groups()[0], prompts_of_groups()[4]
    session = models[0].generator()
    session.submit(Request("first", first, PARAMS["greedy"]))
    prefix = models[0].grid.prefixes.prefix_of(first)
    monkeypatch.setattr(PrefixGrid, "prefix_of", lambda self, ids: prefix)
    with pytest.raises(RowError, match=f"those of the other prompts with the hash {prefix.hash}"):
        session.submit(Request("other", other, PARAMS["greedy"]))


def test_rows_of_a_prefix_with_an_unclean_piece_are_errors_and_the_next_prefix_is_clean(models):
    """The first piece of the prefix of 33 tokens is not finite."""
    prompts = {str(i): prompt for i, prompt in enumerate(prompts_of_groups())}
    wanted, _ = answers(models[0], prompts, PARAMS["greedy"])
    others = {token for name in "01" for token in prompts[name]}
    bad_id = next(token for token in prompts["4"][:16] if token not in others)
    parameters = dict(models[0].parameters)
    table = parameters["embedding.table"]
    parameters["embedding.table"] = table.at[bad_id].set(np.nan)
    session = models[0].generator(parameters)
    groups = set()
    for name in ("4", "0"):
        session.submit(Request(name, prompts[name], PARAMS["greedy"]))
        (output,) = session.run()
        groups |= session.engine._unclean_prefixes
        if name == "4":
            assert output.error is not None and output.error.code == "nonfinite_logits"
        else:
            assert output.error is None
            assert output.outputs[0].token_ids == wanted[name].outputs[0].token_ids
    assert groups == {0}
    assert session.engine.scheduler._groups._prefixes == [session.grid.prefixes.shared[0], None]
