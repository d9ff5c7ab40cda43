"""The engine and generator over a real compiled model, against plain forward passes."""

import jax
import numpy as np
import pytest
from tiny import (
    CHUNK_GRID,
    CONFIG,
    EOS_ID,
    GRID,
    RAGGED_CHUNK_GRID,
    RAGGED_GRID,
    TAIL_GRID,
    TinyModel,
    prompts,
)

from noria.compile.monitor import compile_monitor
from noria.runtime.request import Request, RowError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
GRIDS = {
    "whole": GRID,
    "ragged": RAGGED_GRID,
    "chunks": CHUNK_GRID,
    "tails": TAIL_GRID,
    "ragged chunks": RAGGED_CHUNK_GRID,
}


@pytest.fixture(scope="module", params=GRIDS.values(), ids=GRIDS)
def model(request) -> TinyModel:
    return TinyModel(grid=request.param)


def run(model: TinyModel, requests: list[Request], **options):
    generator = model.generator(**options)
    for request in requests:
        generator.submit(request)
    outputs = {output.request_id: output for output in generator.run()}
    assert set(outputs) == {request.request_id for request in requests}
    return outputs


def requests_of(rows: list[list[int]], params: SamplingParams = GREEDY) -> list[Request]:
    return [Request(f"row-{i}", row, params) for i, row in enumerate(rows)]


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
    assert set(report["buckets"]["decode"]) == set(map(str, model.grid.decode_spans))


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
    state = generator.engine._state
    canary = jax.tree.map(lambda x: jax.numpy.full_like(x, np.nan), state.cache.layers)
    positions = jax.tree.map(jax.numpy.zeros_like, state.cache.positions)
    cache = state.cache._replace(layers=canary, positions=positions)
    generator.engine._state = state._replace(cache=cache)
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
    """Wherever its slot ends, and beside a row that makes decode read the longest span."""
    row = prompts(1, seed=13, longest=14)[0]
    params = SamplingParams(temperature=0, max_tokens=12, n=3)
    long = Request("long", [5] * 45, SamplingParams(temperature=0, max_tokens=19, ignore_eos=True))
    sequences = ids(run(model, [long, *requests_of([row], params)]))["row-0"]
    assert sequences == [model.greedy(row, 12)] * 3


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


def test_scoring_needs_no_slot_and_gives_no_tokens(model):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    rows = prompts(9, seed=9)
    outputs = run(model, requests_of(rows, params))
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
        ([5] * 49, GREEDY, "context_length_exceeded"),
        ([5] * 40, SamplingParams(temperature=0, max_tokens=25), "context_length_exceeded"),
        ([5], SamplingParams(stop_token_ids=[CONFIG.vocab_size]), "invalid_token_id"),
        ([5], SamplingParams(logit_bias={CONFIG.vocab_size: 1.0}), "invalid_token_id"),
        ([5], SamplingParams(stop="x"), "invalid_request"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_name(model, prompt, params, code):
    generator = model.generator()
    with pytest.raises(RowError) as caught:
        generator.submit(Request("q17", prompt, params))
    assert caught.value.code == code
    assert generator.unfinished == 0


def test_without_max_tokens_a_row_fills_the_plans_length(model):
    row = prompts(1, seed=12)[0]
    params = SamplingParams(temperature=0, ignore_eos=True)
    completion = run(model, requests_of([row], params))["row-0"].outputs[0]
    assert len(row) + len(completion.token_ids) == GRID.max_length


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


def test_padding_and_tokens_are_counted(model):
    rows = prompts(11, seed=14)
    generator = model.generator()
    assert generator.padding_waste is None
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
    assert generator.padding_waste == pytest.approx(wasted / padding["computed_tokens"])
