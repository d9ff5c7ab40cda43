"""The engine and generator over a real compiled model, against plain forward passes."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import (
    CHUNK_GRID,
    EOS_ID,
    FEW_PAGES_CHUNK_GRID,
    FEW_PAGES_GRID,
    GRID,
    TAIL_GRID,
    TinyModel,
    prompts,
)
from tiny import TWO_LAYERS as CONFIG

from noria.compile.graph_failures import GraphFailed
from noria.compile.graphs.graph_kinds import EMPTY_STATE, FORK, GraphKey, graph_keys
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.monitor import compile_monitor
from noria.runtime.batch.batch_model import needs_graph
from noria.runtime.engine.admission import Admission
from noria.runtime.errors import RowError
from noria.runtime.request import Request, RequestMetrics, SamplingParams
from noria.runtime.rows.scan import RowRequirements

GREEDY = SamplingParams(temperature=0, max_tokens=12)
GRIDS = {
    "whole": GRID,
    "chunks": CHUNK_GRID,
    "tails": TAIL_GRID,
    "few pages": FEW_PAGES_GRID,
    "chunks in few pages": FEW_PAGES_CHUNK_GRID,
}
COMBINED = {"chunks", "tails", "few pages"}
"""Grids that only `--slow` runs: "whole" has whole prompts, and "chunks in few pages" has few pages
and the chunks of "tails", which are longer and shorter than the window."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name in COMBINED), id=name) for name in GRIDS
    ],
)
def model(request) -> TinyModel:
    return TinyModel(CONFIG, GRIDS[request.param])


def run(model: TinyModel, requests: list[Request], **options):
    generator = model.generator(**options)
    for request in requests:
        generator.submit(request)
    outputs = {output.request_id: output for output in generator.run()}
    assert set(outputs) == {request.request_id for request in requests}
    return outputs


def requests_of(rows: list[list[int]], params: SamplingParams = GREEDY) -> list[Request]:
    return [Request(f"row-{i}", row, params) for i, row in enumerate(rows)]


def has_few_pages(grid: BucketGrid) -> bool:
    return grid.pages < grid.most_pages


def ids(outputs) -> dict[str, list[list[int]]]:
    return {name: [o.token_ids for o in output.outputs] for name, output in outputs.items()}


def test_greedy_tokens_equal_a_whole_forward_pass_per_token(model):
    rows = prompts(13)
    outputs = run(model, requests_of(rows))
    for i, row in enumerate(rows):
        assert outputs[f"row-{i}"].outputs[0].token_ids == model.greedy(row, 12)


def test_no_compile_happens_after_the_build_in_a_run_that_uses_every_graph(model):
    generator = model.generator()
    before = compile_monitor().num_compiles
    short = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2, logprobs=3)
    generator.submit(Request("short", [5, 6, 7], short))
    generator.run()
    scored = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2, logprobs=3)
    sampled = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, max_tokens=20, seed=3)
    for i, row in enumerate(prompts(9, seed=2)):
        generator.submit(Request(f"scored-{i}", row, scored))
        generator.submit(Request(f"sampled-{i}", row, sampled))
    generator.run()
    report = generator.statistics()
    assert compile_monitor().num_compiles == before
    assert report["compiles_during_run"] == 0
    names = set(map(str, model.grid.prefill))
    assert set(report["buckets"]["prefill"]) == names | {f"{name} scored" for name in names}
    assert len(report["buckets"]["decode"]) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rows_are_bit_identical_under_permutation_subset_and_split(model, temperature):
    rows = prompts(14, seed=5)
    params = SamplingParams(
        temperature=temperature, max_tokens=15, logprobs=2, prompt_logprobs=1, n=2
    )
    requests = requests_of(rows, params)
    whole = run(model, requests)
    order = np.random.default_rng(0).permutation(len(rows))
    permuted = run(model, [requests[i] for i in order])
    subset = run(model, requests[3:8])
    parts = run(model, requests[:5]) | run(model, requests[5:])
    for other in (permuted, subset, parts):
        for name, output in other.items():
            assert output.outputs == whole[name].outputs
            assert output.prompt_logprobs == whole[name].prompt_logprobs


def test_rows_that_are_computed_again_have_the_bits_that_they_have_alone(model):
    """With few pages, rows give theirs to others while they decode."""
    params = SamplingParams(temperature=0.9, max_tokens=20, logprobs=2, ignore_eos=True, n=2)
    requests = requests_of(prompts(12, seed=25), params)
    generator = model.generator()
    for request in requests:
        generator.submit(request)
    together = {output.request_id: output.outputs for output in generator.run()}
    assert (generator.metrics.pages.replays > 0) == has_few_pages(model.grid)
    for request in requests[::3]:
        alone = run(model, [request])[request.request_id]
        assert alone.outputs == together[request.request_id]


def test_a_row_with_nan_weights_in_its_path_fails_alone(model):
    rows = prompts(9, seed=3, longest=14)
    healthy = run(model, requests_of(rows))
    met = {token for row in rows for token in row}
    met |= {token for output in healthy.values() for token in output.outputs[0].token_ids}
    poison = next(token for token in range(3, CONFIG.vocab_size) if token not in met)
    table = model.parameters["embedding.table"].at[poison].set(np.nan)
    requests = requests_of(rows)
    requests.insert(4, Request("poisoned", [5, poison, 9], GREEDY))
    outputs = run(model, requests, parameters=model.parameters | {"embedding.table": table})
    assert outputs["poisoned"].error.code == "nonfinite_logits"
    assert outputs["poisoned"].outputs == []
    for name, output in healthy.items():
        assert outputs[name].outputs == output.outputs


def test_a_reused_slot_never_sees_its_predecessors_cache(model):
    rows = prompts(10, seed=8)
    clean = run(model, requests_of(rows))
    generator = model.generator()
    for i in range(3 * model.grid.decode_slots):
        length, most = ((45, 19), (12, 4))[i % 2]
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        generator.submit(Request(f"before-{i}", [5] * length, params))
    generator.run()
    state = generator.runner.state
    canary = jax.tree.map(lambda x: jax.numpy.full_like(x, 1e4), state.cache)
    generator.runner.state = state._replace(cache=canary)
    for request in requests_of(rows):
        generator.submit(request)
    outputs = {output.request_id: output for output in generator.run()}
    assert ids(outputs) == ids(clean)


def test_the_slots_and_order_of_arrival_do_not_change_seeded_samples(model):
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=11, n=3)
    outputs = run(model, requests_of([[5, 6, 7]] * 2, params))
    first, second = (ids(outputs)[f"row-{i}"] for i in range(2))
    assert first == second
    assert len({tuple(sequence) for sequence in first}) == 3


def test_every_sequence_of_a_request_continues_the_whole_prompt(model):
    """Another row is far longer, and all samples of the first begin within one of its pages."""
    row = prompts(1, seed=13, longest=14)[0]
    params = SamplingParams(temperature=0, max_tokens=12, n=3)
    long = Request("long", [5] * 45, SamplingParams(temperature=0, max_tokens=19, ignore_eos=True))
    sequences = ids(run(model, [long, *requests_of([row], params)]))["row-0"]
    assert sequences == [model.greedy(row, 12)] * 3


def test_logprobs_of_different_samples_equal_the_reference(model):
    """The samples begin within a page, and none reads what another one has written."""
    from tolerances import FLOAT32_MODEL_LOGPROB

    row = prompts(1, seed=26, longest=14)[0][:11]
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=5, n=3, logprobs=0)
    completions = run(model, requests_of([row], params))["row-0"].outputs
    assert len({tuple(completion.token_ids) for completion in completions}) == 3
    for completion in completions:
        for t, score in enumerate(completion.logprobs):
            logits = model.next_logits(row + completion.token_ids[:t]).astype(np.float64)
            logprob = logits[score.token_id] - logits.max()
            logprob -= np.log(np.exp(logits - logits.max()).sum())
            assert score.logprob == pytest.approx(logprob, abs=FLOAT32_MODEL_LOGPROB)


def test_unseeded_rows_differ_by_id_and_repeat_under_the_same_run_seed(model):
    params = SamplingParams(temperature=1.0, max_tokens=10)
    requests = requests_of([[5, 6, 7]] * 2, params)
    first, again, other = (ids(run(model, requests, run_seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first["row-0"] != first["row-1"]
    assert first != other


def test_generation_ends_at_eos_unless_ignored_or_forbidden(model):
    rows = prompts(40, seed=21)
    bias = {EOS_ID: 9.0}
    likely = SamplingParams(temperature=1.0, max_tokens=20, seed=1, logit_bias=bias)
    completions = [output.outputs[0] for output in run(model, requests_of(rows, likely)).values()]
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == EOS_ID
        assert completion.stop_reason is None
    ignoring = SamplingParams(
        temperature=1.0, max_tokens=20, seed=1, logit_bias=bias, ignore_eos=True
    )
    for output in run(model, requests_of(rows, ignoring)).values():
        assert len(output.outputs[0].token_ids) == 20
        assert output.outputs[0].finish_reason == "length"
    forced = SamplingParams(temperature=1.0, max_tokens=20, seed=1, logit_bias=bias, min_tokens=20)
    for output in run(model, requests_of(rows, forced)).values():
        assert EOS_ID not in output.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 20


def test_rows_that_end_at_once_and_one_far_longer_end_each_as_one_row(model):
    rows = prompts(9, seed=24, longest=14)
    once = requests_of(rows, SamplingParams(temperature=0, max_tokens=1))
    stops = [
        Request(
            f"stop-{i}", row, SamplingParams(temperature=0, stop_token_ids=model.greedy(row, 1))
        )
        for i, row in enumerate(rows)
    ]
    long = Request("long", [5], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    outputs = run(model, [*once, long, *stops])
    lengths = {name: len(output.outputs[0].token_ids) for name, output in outputs.items()}
    assert lengths.pop("long") == 60
    assert set(lengths.values()) == {1}


def test_a_stop_token_of_the_caller_is_named(model):
    row = prompts(1, seed=4)[0]
    expected = model.greedy(row, 6)
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[expected[3]])
    completion = run(model, requests_of([row], params))["row-0"].outputs[0]
    assert completion.token_ids == expected[: expected.index(expected[3]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", expected[3])


def test_prompt_and_output_logprobs_equal_the_reference(model):
    from tolerances import FLOAT32_MODEL_LOGPROB

    row = prompts(1, seed=6, longest=30)[0]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=4, prompt_logprobs=3)
    output = run(model, requests_of([row], params))["row-0"]

    def reference(tokens):
        logits = model.next_logits(tokens).astype(np.float64)
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    assert output.prompt_logprobs[0] is None
    tokens = row + output.outputs[0].token_ids
    scored = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(scored) == len(tokens) - 1
    for t, score in enumerate(scored, start=1):
        logprobs = reference(tokens[:t])
        assert score.token_id == tokens[t]
        assert score.logprob == pytest.approx(logprobs[tokens[t]], abs=FLOAT32_MODEL_LOGPROB)
        best = np.argsort(-logprobs)[: len(score.top)]
        assert [token for token, _ in score.top] == best.tolist()


def test_scoring_gives_no_tokens_and_needs_no_slot_while_all_slots_decode(model):
    """The prompts have a single piece; longer prompts need a slot for their cache.

    A piece in pages always needs a slot, as it attends to the pages that it is written to.
    """
    generator = model.generator()
    long = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for i in range(model.grid.decode_slots):
        generator.submit(Request(f"long-{i}", [5, 6], long))
    while len(generator.slots.in_slot) < model.grid.decode_slots:
        assert not generator.step()
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    rows = prompts(9, seed=9, longest=model.grid.prefill[0].tokens)
    for request in requests_of(rows, params):
        generator.submit(request)
    outputs = {output.request_id: output for output in generator.run()}
    # all of them end before any row leaves its slot
    assert model.grid.chunks or not any(
        name.startswith("long") for name in list(outputs)[: len(rows)]
    )
    for i, row in enumerate(rows):
        output = outputs[f"row-{i}"]
        assert output.outputs[0].token_ids == []
        assert [s.token_id for s in output.prompt_logprobs[1:]] == row[1:]


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ([], GREEDY, "empty_prompt"),
        ([1, -1], GREEDY, "invalid_token_id"),
        ([CONFIG.vocab_size], GREEDY, "invalid_token_id"),
        (None, GREEDY, "context_length_exceeded"),
        ([5] * 40, SamplingParams(temperature=0, max_tokens=25), "context_length_exceeded"),
        ([5], SamplingParams(stop_token_ids=[CONFIG.vocab_size]), "invalid_token_id"),
        ([5], SamplingParams(logit_bias={CONFIG.vocab_size: 1.0}), "invalid_token_id"),
        ([5], SamplingParams(stop="x"), "invalid_request"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_name(model, prompt, params, code):
    generator = model.generator()
    if prompt is None:
        prompt = [5] * (model.grid.prefill[-1].length + 1)
    with pytest.raises(RowError) as caught:
        generator.submit(Request("q17", prompt, params))
    assert caught.value.code == code
    assert generator.unfinished == 0


def test_the_smallest_numbers_that_are_accepted_give_the_greedy_tokens(model):
    rows = prompts(4, seed=22)
    expected = ids(run(model, requests_of(rows)))
    for params in (
        {"temperature": 1e-20},
        {"temperature": 1e-20, "repetition_penalty": 1.0, "top_p": 0.5, "min_p": 0.5},
        {"top_p": 1e-9},
        {"top_p": 1e-20},
        {"top_k": 1, "temperature": 1e20},
    ):
        sampled = SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": 12} | params)
        assert ids(run(model, requests_of(rows, sampled))) == expected, params


def test_no_accepted_penalty_leaves_the_range_of_float32(model):
    """With several infinite logits, sampling would always draw the lowest id."""
    for penalty in (1e-10, 1e10):
        params = {"temperature": 1e-20, "repetition_penalty": penalty, "max_tokens": 6, "seed": 1}
        greedy = SamplingParams(**params | {"temperature": 0})
        sampled = ids(run(model, requests_of([[5, 6, 7]], SamplingParams(**params))))
        assert sampled == ids(run(model, requests_of([[5, 6, 7]], greedy)))


def test_a_top_k_of_the_vocabulary_or_more_leaves_every_token(model):
    rows = prompts(4, seed=23)
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=12)
    expected = ids(run(model, requests_of(rows, free)))
    for top_k in (-1, CONFIG.vocab_size, CONFIG.vocab_size + 1, 2**31 - 1):
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, top_k=top_k)
        assert ids(run(model, requests_of(rows, params))) == expected


def test_min_tokens_that_forbid_the_whole_vocabulary_are_refused(model):
    generator = model.generator()
    generator.admission.vocab_size = 4
    stops = {"min_tokens": 2, "max_tokens": 4, "temperature": 0}
    generator.check(Request("row", [1], SamplingParams(stop_token_ids=[0, 1], **stops)))
    params = SamplingParams(stop_token_ids=[0, 1, 3], **stops)
    with pytest.raises(RowError, match=r"stop_token_ids: expected fewer .* 4 beside min_tokens"):
        generator.check(Request("row", [1], params))


def test_without_max_tokens_a_row_fills_the_plans_length(model):
    row = prompts(1, seed=12)[0]
    params = SamplingParams(temperature=0, ignore_eos=True)
    completion = run(model, requests_of([row], params))["row-0"].outputs[0]
    assert len(row) + len(completion.token_ids) == GRID.max_length


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (49, 2, "buckets.prefill has lengths [8, 16, 48]. Add a length of at least 49, or shorten"),
        (70, 2, "lengths [8, 16, 48]. Raise max_length (64), add a length of at least 70, or"),
        (127, 2, "need 129 positions; the model has 128. Lower max_tokens, or shorten the prompt"),
        (5000, None, "need 5001 positions; the model has 128. Lower max_tokens, or shorten the"),
    ],
)
def test_a_row_that_is_too_long_is_told_what_is_possible(length, max_tokens, message):
    admission = Admission(GRID, CONFIG.vocab_size, CONFIG.max_position, ())
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(RowError, match=re.escape(message)):
        admission.admit(Request("row", [5] * length, params), 0)


def test_a_token_that_stands_for_an_image_is_refused_by_its_key():
    admission = Admission(
        GRID, CONFIG.vocab_size, CONFIG.max_position, (), other_tokens={"image_token_id": 9}
    )
    admission.admit(Request("text", [5, 8], GREEDY), 0)
    with pytest.raises(RowError, match=r"the id 9, the image_token_id of config\.json") as caught:
        admission.admit(Request("image", [5, 9, 8], GREEDY), 0)
    assert caught.value.code == "invalid_token_id"


def test_min_tokens_that_cannot_be_reached_are_refused(model):
    generator = model.generator()
    params = SamplingParams(min_tokens=GRID.max_length - 2)
    generator.check(Request("fits", [5, 6], params))
    with pytest.raises(RowError, match=r"need 65 positions; buckets.max_length") as caught:
        generator.check(Request("row", [5, 6, 7], params))
    assert caught.value.code == "context_length_exceeded"


def test_stop_strings_without_a_tokenizer_are_refused_before_the_row_is_queued(model):
    generator = model.generator()
    with pytest.raises(RowError, match="stop: expected no stop strings"):
        generator.check(Request("row", [5, 6], SamplingParams(stop="x")))
    assert generator.unfinished == 0


def test_drain_returns_what_has_no_slot_and_finishes_the_rest(model):
    rows = prompts(20, seed=13)
    generator = model.generator()
    for request in requests_of(rows):
        generator.submit(request)
    finished = []
    while len(finished) < 2:
        finished += generator.step()
    dropped = generator.drain()
    finished += generator.run()
    names = [output.request_id for output in finished] + dropped
    assert dropped
    assert sorted(names) == sorted(f"row-{i}" for i in range(20))


def test_times_are_those_of_arrival_first_token_and_end(model):
    generator = model.generator()
    moments = iter(range(100, 200))
    generator.clock = lambda: next(moments)
    generator.submit(Request("row", [5, 6, 7], replace(GREEDY, ignore_eos=True)))
    (output,) = generator.run()
    # one call reads the prompt, and three calls of four steps emit the 12 tokens; the clock is read
    # when each of them starts and when it ends
    assert output.metrics == RequestMetrics(arrival=100, first_token=104, finished=108)


def test_padding_and_tokens_are_counted(model):
    rows = prompts(11, seed=14)
    generator = model.generator()
    assert generator.figures.padding_waste is None
    for request in requests_of(rows):
        generator.submit(request)
    outputs = generator.run()
    padding = generator.statistics()["padding"]
    emitted = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert padding["real_tokens"] == sum(map(len, rows)) + emitted
    wasted = (
        padding["prefill_padding_tokens"]
        + padding["idle_slot_tokens"]
        + padding["overshoot_tokens"]
    )
    assert padding["computed_tokens"] == padding["real_tokens"] + wasted
    assert generator.figures.padding_waste == pytest.approx(wasted / padding["computed_tokens"])


def test_a_step_that_the_device_fails_names_its_graph(model, monkeypatch):
    generator = model.generator()
    of_key = type(model.graphs).executable

    def executable(key):
        if key.kind == "decode":
            raise MemoryError
        return of_key(model.graphs, key)

    monkeypatch.setattr(model.graphs, "executable", executable)
    for request in requests_of(prompts(2, seed=4, longest=8)):
        generator.submit(request)
    (decode,) = (key for key in graph_keys(model.grid) if key.kind == "decode")
    said = rf"graph '{decode}' failed as it ran: MemoryError\. Ch"
    with pytest.raises(GraphFailed, match=said):
        generator.run()


def graphs_called(model: TinyModel, request: Request, monkeypatch) -> set[GraphKey]:
    called: set[GraphKey] = set()
    of_key = type(model.graphs).executable

    def executable(key: GraphKey):
        called.add(key)
        return of_key(model.graphs, key)

    monkeypatch.setattr(model.graphs, "executable", executable)
    generator = model.generator()
    generator.submit(request)
    generator.run()
    return called


def test_the_rows_that_need_a_graph_are_those_that_call_it(model, monkeypatch):
    asked = [
        SamplingParams(max_tokens=3, ignore_eos=True),
        SamplingParams(max_tokens=0, prompt_logprobs=0),
        SamplingParams(max_tokens=20, n=2, ignore_eos=True),
        SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True),
    ]
    for ids, params in zip([*prompts(7, seed=3), [5]], asked * 2, strict=True):
        called = graphs_called(model, Request("row", ids, params), monkeypatch)
        need = RowRequirements(len(ids), params.max_tokens, params.n, params.prompt_logprobs)
        wanted = {key for key in graph_keys(model.grid) if needs_graph(key, model.grid, need)}
        # free slots for all samples may be scattered
        assert called <= wanted, called - wanted
        assert wanted - called <= {EMPTY_STATE, FORK}
