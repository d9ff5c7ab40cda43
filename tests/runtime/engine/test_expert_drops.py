"""Rows with dropped choices of experts: exactly these rows are reported, with correct counts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from alike import changed
from tiny import CONFIG, TinyModel, prompts
from unoptimized import set_optimized

from noria.compile.expert_plan import ExpertPlan
from noria.compile.grids.bucket_grid import BucketGrid
from noria.modelzoo.moe.call import ExpertUse
from noria.modelzoo.moe_config import LOSSLESS, Dispatch, MoeConfig, Routing
from noria.runtime.engine.actions import DecodeAction, ForkAction, PrefillAction
from noria.runtime.engine.metrics import ExpertSetup, ExpertTotals
from noria.runtime.request import Request, SamplingParams

NUM_CHOSEN = 2
MOE = MoeConfig(Routing(6, NUM_CHOSEN), mlp=16)
SPARSE = (False, True, True)
MIXED = changed(CONFIG, moe=MOE, sparse=SPARSE)
GRID = BucketGrid(64, ((16, 3), (40, 2)), decode_slots=13, page=16, score=True)
TIGHT = Dispatch("capacity", 1.0)
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def lossy() -> TinyModel:
    return TinyModel(MIXED, GRID, ExpertPlan(TIGHT, TIGHT, "drop"))


@pytest.fixture(scope="module")
def lossless(optimizes: bool) -> TinyModel:
    """A lossless model with optimized programs, as the tests compare bits."""
    set_optimized(True)
    model = TinyModel(MIXED, GRID)
    set_optimized(optimizes)
    return model


def requests(count: int = 14) -> list[Request]:
    """Return three kinds of requests: plain, two continuations, scored without continuation."""
    kinds = [
        GREEDY,
        replace(GREEDY, n=2, temperature=1.0),
        SamplingParams(max_tokens=0, prompt_logprobs=0),
    ]
    rows = prompts(count, seed=17)
    return [Request(f"row-{i}", row, kinds[i % 3]) for i, row in enumerate(rows)]


def run(generator, rows: list[Request]):
    for request in rows:
        generator.submit(request)
    return {output.request_id: output for output in generator.run()}


class Reports:
    """The drops that the graphs reported for every row, recorded apart from the engine."""

    def __init__(self, generator):
        self.of_prompt: Counter[int] = Counter()
        self.of_tokens: Counter[tuple[int, int]] = Counter()
        self._slots = {}
        self._action = None
        self._scheduler, self._graphs = generator.slots.scheduler, generator.runner.graphs
        generator.slots.scheduler, generator.runner.graphs = self, self

    def __getattr__(self, name: str):
        return getattr(self._scheduler, name, None) or getattr(self._graphs, name)

    def next_action(self):
        self._action = self._scheduler.next_action()
        match self._action:
            case PrefillAction(rows=rows):
                self._slots |= {row.slot: row.sequence for row in rows}
            case ForkAction(slot=slot, sequence=sequence):
                self._slots[slot] = sequence
        return self._action

    def call(self, *arguments):
        state, output = self._graphs.call(*arguments)
        match self._action:
            case PrefillAction(rows=rows):
                for i, row in enumerate(rows):
                    dropped = int(output.experts.num_dropped_B[i])
                    self.of_prompt[row.sequence.request.number] += dropped
            case DecodeAction(slots=slots):
                for slot in slots:
                    sequence = self._slots[slot]
                    dropped = int(output.experts.num_dropped_B[slot])
                    self.of_tokens[sequence.request.number, sequence.sample] += dropped
        return state, output


def test_every_row_has_the_count_that_the_graphs_gave_it(lossy):
    generator = lossy.generator()
    reports = Reports(generator)
    rows = requests()
    outputs = run(generator, rows)
    counts = []
    for number, request in enumerate(rows):
        output, prompt = outputs[request.request_id], reports.of_prompt[number]
        tokens = [reports.of_tokens[number, sample] for sample in range(request.params.n)]
        assert output.error is None
        assert output.dropped_expert_choices == prompt + sum(tokens)
        assert [o.dropped_expert_choices for o in output.outputs] == [prompt + t for t in tokens]
        counts.append(output.dropped_expert_choices)
    # the test needs rows with and without drops, and drops in both phases
    assert 0 < np.count_nonzero(counts) < len(counts)
    assert any(reports.of_prompt.values()) and any(reports.of_tokens.values())


def test_under_the_policy_of_errors_the_same_rows_end_as_errors_and_the_others_are_equal(lossy):
    rows = requests()
    answered = run(lossy.generator(), rows)
    strict = replace(lossy.experts, plan=replace(lossy.experts.plan, overflow="error"))
    refused = run(lossy.generator(experts=strict), rows)
    for name, output in answered.items():
        count = output.dropped_expert_choices
        if not count:
            assert refused[name].error is None and refused[name].outputs == output.outputs
            continue
        assert refused[name].outputs == []
        assert refused[name].error.code == "expert_overflow"
        message = refused[name].error.message
        assert f"request {name!r}: expected no dropped expert choices, got {count}" in message
        assert all(remedy in message for remedy in ("capacity_factor", "lossless", '"drop"'))


def test_without_loss_no_row_is_touched_and_company_changes_no_bit(lossless):
    rows = requests()
    whole = run(lossless.generator(), rows)
    assert not any(output.dropped_expert_choices for output in whole.values())
    order = np.random.default_rng(0).permutation(len(rows))
    permuted = run(lossless.generator(), [rows[i] for i in order])
    alone = run(lossless.generator(), rows[4:5])
    for other in (permuted, alone):
        for name, output in other.items():
            assert output.outputs == whole[name].outputs
            assert output.prompt_logprobs == whole[name].prompt_logprobs


def test_loads_are_all_choices_of_all_tokens(lossy):
    generator = lossy.generator()
    rows = requests()
    outputs = run(generator, rows)
    report = generator.statistics()["experts"]
    num_tokens = {
        "prefill": sum(len(row.prompt_token_ids) for row in rows),
        "decode": sum(len(o.token_ids) for output in outputs.values() for o in output.outputs),
    }
    dropped = 0
    for phase, tokens in num_tokens.items():
        of_phase = report[phase]
        assert [layer["layer"] for layer in of_phase["layers"]] == [1, 2]
        assert [sum(layer["load"]) for layer in of_phase["layers"]] == [tokens * NUM_CHOSEN] * 2
        assert of_phase["choices"] == tokens * NUM_CHOSEN * 2
        assert of_phase["dropped"] == sum(sum(layer["dropped"]) for layer in of_phase["layers"])
        assert of_phase["rows"] == sum(sum(layer["rows"]) for layer in of_phase["layers"])
        held = of_phase["choices"] - of_phase["dropped"]
        assert of_phase["padded_share"] == pytest.approx(1 - held / of_phase["rows"])
        for layer in of_phase["layers"]:
            assert layer["balance"] == pytest.approx(max(layer["load"]) / np.mean(layer["load"]))
        dropped += of_phase["dropped"]
    assert dropped == sum(output.dropped_expert_choices for output in outputs.values())


def test_rows_hold_all_choices_but_those_that_a_capacity_drops(lossless, lossy):
    expected = {lossless: ("lossless", None), lossy: ("capacity", TIGHT.capacity_factor)}
    for model, dispatch in expected.items():
        generator = model.generator()
        run(generator, requests())
        report = generator.statistics()["experts"]
        for phase in ("prefill", "decode"):
            found = report[phase]
            assert (found["dispatch"], found["capacity_factor"]) == dispatch
            assert found["rows"] >= found["choices"] - found["dropped"]
            assert (found["dropped"] == 0) == (model is lossless)


def test_sums_do_not_wrap_at_32_bits():
    totals = ExpertTotals()
    counts = np.full((1, 2, 4), 2**30, np.int32)
    for _ in range(4):
        totals.add(ExpertUse(counts, counts, counts))
    moe = MoeConfig(Routing(4, 2), mlp=8)
    report = ExpertSetup(moe.routing, (0,), ExpertPlan()).report({"decode": totals})
    assert report["decode"]["choices"] == 4 * 4 * 2 * 2**30


def test_a_prompt_that_is_read_again_for_more_sequences_counts_once():
    grid = BucketGrid(64, ((64, 2, 16),), decode_slots=2, page=8)
    model = TinyModel(MIXED, grid, ExpertPlan(Dispatch("capacity", 0.5), LOSSLESS, "drop"))
    prompt = (prompts(1, seed=4)[0] * 4)[:28]
    counts = []
    for n in (1, 2, 5):
        (output,) = run(model.generator(), [Request("row", prompt, replace(GREEDY, n=n))]).values()
        of_each = {one.dropped_expert_choices for one in output.outputs}
        assert len(output.outputs) == n and of_each == {output.dropped_expert_choices}
        counts.append(output.dropped_expert_choices)
    assert counts[0] > 0 and len(set(counts)) == 1
