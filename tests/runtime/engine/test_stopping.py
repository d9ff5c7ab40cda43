"""Rows whose samples stop early, in the engine: the same outputs in every schedule."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tiny import CONFIG, EOS_ID, GRID, TinyModel, prompts

from noria.runtime.errors import RowError
from noria.runtime.request import Request, RequestOutput, SampleRule, SamplingParams

SMALL_GRID = replace(GRID, prefill=((16, 2),), score=False)
N = 6
PATTERN = "([ab])"
SAMPLED = SamplingParams(n=N, max_tokens=40, logit_bias={EOS_ID: 2.5})
AGREE = SampleRule(PATTERN, stop_when=3)
CERTAIN = SampleRule(PATTERN, probe_every=3, probes=2)
BOTH = SampleRule(PATTERN, stop_when=3, probe_every=6, probes=4)


class Letters:
    """A tokenizer with one of eight letters for each token."""

    special_ids = frozenset({EOS_ID})
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id % 8])


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(grid=SMALL_GRID)


def requests_of(rule: SampleRule | None, **changes) -> list[Request]:
    params = replace(SAMPLED, stopping=rule, **changes)
    return [Request(f"row-{i}", row, params) for i, row in enumerate(prompts(5, longest=14))]


def generator_of(model: TinyModel, **options):
    return model.generator(tokenizer=Letters(), **options)


def run(generator, requests: list[Request]) -> dict[str, RequestOutput]:
    for request in requests:
        generator.submit(request)
    return {output.request_id: replace(output, metrics=None) for output in generator.run()}


def text_of(token_ids: list[int]) -> str:
    return "".join(Letters().token_bytes(t).decode() for t in token_ids if t != EOS_ID)


def answer_of(token_ids: list[int]) -> str | None:
    return next((letter for letter in text_of(token_ids) if letter in "ab"), None)


def defined(samples: list[list[int]], rule: SampleRule) -> list[tuple[list[int], str | None]]:
    """Return the tokens of each sample, and why it stops, from its tokens without a rule."""
    ends = []
    for ids in samples:
        end, why = len(ids), None
        if rule.probes is not None:
            found = [
                answer_of(ids[:length]) for length in range(rule.probe_every, end, rule.probe_every)
            ]
            for i in range(rule.probes, len(found) + 1):
                last = set(found[i - rule.probes : i])
                if len(last) == 1 and last != {None}:
                    end, why = i * rule.probe_every, "certainty"
                    break
        ends.append((end, why, answer_of(ids[:end])))
    limit = None
    if rule.stop_when is not None:
        for length in range(1, max(end for end, _, _ in ends) + 1):
            votes = Counter(a for end, _, a in ends if end <= length and a is not None)
            if max(votes.values(), default=0) >= rule.stop_when:
                limit = length
                break
    return [
        (ids[:end], why) if limit is None or end <= limit else (ids[:limit], "agreement")
        for ids, (end, why, _) in zip(samples, ends, strict=True)
    ]


@pytest.mark.parametrize("rule", [AGREE, CERTAIN, BOTH], ids=["agree", "certain", "both"])
def test_samples_stop_where_the_rule_says_and_are_otherwise_as_without_it(model, rule):
    whole_generator, generator = generator_of(model), generator_of(model)
    whole = run(whole_generator, requests_of(None))
    stopping = run(generator, requests_of(rule))
    reasons = Counter()
    for name, output in stopping.items():
        expected = defined([o.token_ids for o in whole[name].outputs], rule)
        assert [(o.token_ids, o.stopped_early) for o in output.outputs] == expected
        for completion, alone in zip(output.outputs, whole[name].outputs, strict=True):
            reasons[completion.stopped_early] += 1
            assert completion.text == text_of(completion.token_ids)
            if completion.stopped_early is None:
                ended = replace(completion, answer=None, votes=0)
                assert ended == alone
                assert completion.answer == answer_of(completion.token_ids)
            else:
                assert completion.finish_reason == "stop" and completion.stop_reason is None
                assert (completion.answer is None) == (completion.stopped_early == "agreement")
        assert output.samples.total == N
        assert output.samples.stopped == sum(o.stopped_early is not None for o in output.outputs)
        assert output.samples.output_tokens == sum(len(o.token_ids) for o in output.outputs)
    assert len(reasons) == 1 + (rule.stop_when is not None) + (rule.probes is not None), reasons
    # the tokens that were decoded are those that are kept and those that are cut
    metrics = generator.metrics
    kept = sum(output.samples.output_tokens for output in stopping.values())
    assert metrics.emitted_tokens == kept
    decoded, decoded_whole = (g.metrics.decode.emitted_tokens for g in (generator, whole_generator))
    assert decoded == kept + metrics.cut_tokens
    assert kept <= decoded < decoded_whole
    assert not generator.slots.in_slot


def test_a_sample_stops_those_in_slots_before_and_after_its_own(model):
    """All samples of a row run in the same calls."""
    rule = SampleRule(PATTERN, stop_when=2)
    params = replace(SAMPLED, n=4)
    rows = [Request(f"row-{i}", row, params) for i, row in enumerate(prompts(30, longest=14))]
    whole = run(generator_of(model), rows)
    rows = [replace(row, params=replace(params, stopping=rule)) for row in rows]
    places = Counter()
    for name, output in run(generator_of(model), rows).items():
        expected = defined([o.token_ids for o in whole[name].outputs], rule)
        assert [(o.token_ids, o.stopped_early) for o in output.outputs] == expected
        limit = max(len(o.token_ids) for o in output.outputs)
        last = [
            o.index for o in output.outputs if len(o.token_ids) == limit and not o.stopped_early
        ]
        places.update(o.index < last[0] for o in output.outputs if o.stopped_early)
    assert places[True] and places[False]


@pytest.mark.parametrize("keep", ["all", "majority", "best"])
def test_outputs_do_not_depend_on_groups_slots_neighbours_or_order(model, keep):
    """With slots reserved, a row's samples run in groups of other sizes, one after another."""
    requests = requests_of(replace(BOTH, keep=keep), logprobs=0 if keep == "all" else None)
    expected = run(generator_of(model), requests)
    assert any(output.samples.stopped for output in expected.values())
    for num_reserved in (1, 2, 3):
        generator = generator_of(model)
        generator.reserve(num_reserved)
        assert run(generator, requests) == expected
    assert run(generator_of(model), requests[::-1]) == expected
    for request in requests:
        assert run(generator_of(model), [request]) == {
            request.request_id: expected[request.request_id]
        }
    others = [
        Request(f"other-{i}", row, SamplingParams(temperature=0, max_tokens=3 + 5 * i))
        for i, row in enumerate(prompts(6, seed=8, longest=10))
    ]
    mixed = run(generator_of(model), [*others[:3], *requests, *others[3:]])
    assert {name: mixed[name] for name in expected} == expected


def test_other_slots_and_calls_stop_the_same_samples(model):
    requests = requests_of(BOTH)
    expected = run(generator_of(model), requests)
    other = TinyModel(grid=replace(SMALL_GRID, decode_slots=8, steps_per_call=3))
    assert run(generator_of(other), requests) == expected


def test_one_returned_sample_is_that_of_the_most_votes(model):
    whole = run(generator_of(model), requests_of(None))
    for name, output in run(
        generator_of(model), requests_of(SampleRule(PATTERN, keep="majority"))
    ).items():
        answers = [answer_of(o.token_ids) for o in whole[name].outputs]
        votes = [answers.count(answer) if answer else 0 for answer in answers]
        (completion,) = output.outputs
        assert completion.index == votes.index(max(votes))
        assert (completion.answer, completion.votes) == (
            answers[completion.index],
            max(votes),
        )
        assert output.samples.output_tokens == sum(len(o.token_ids) for o in whole[name].outputs)


def test_more_than_half_of_the_votes_give_the_answer_of_all_samples(model):
    stop = SampleRule(PATTERN, stop_when=N // 2 + 1, keep="majority")
    early = run(generator_of(model), requests_of(stop))
    late = run(generator_of(model), requests_of(replace(stop, stop_when=None)))
    assert any(output.samples.stopped for output in early.values())
    for name, output in early.items():
        if output.samples.stopped:
            assert output.outputs[0].answer == late[name].outputs[0].answer


def test_the_best_sample_has_the_highest_mean_logprob_and_shows_none(model):
    shown = run(generator_of(model), requests_of(None, logprobs=0))
    for name, output in run(generator_of(model), requests_of(SampleRule(keep="best"))).items():
        means = [o.cumulative_logprob / len(o.token_ids) for o in shown[name].outputs]
        (completion,) = output.outputs
        assert completion.index == int(np.argmax(means))
        assert completion.logprobs is None
        assert (
            completion.cumulative_logprob
            == shown[name].outputs[completion.index].cumulative_logprob
        )


def test_logits_that_are_not_finite_fail_a_row_only_before_it_stops(model):
    """The embedding of one token is NaN; the sample that draws it cannot draw another."""
    whole = run(generator_of(model), requests_of(None))
    stopping = run(generator_of(model), requests_of(AGREE))
    prompted = {token for output in whole.values() for token in output.prompt_token_ids}
    num_checked = Counter()
    for name, output in stopping.items():
        limit = max(len(o.token_ids) for o in output.outputs)
        if not output.samples.stopped:
            continue
        # the first places of each token, in samples that go on after it
        first: dict[int, int] = {}
        for completion in whole[name].outputs:
            for place, token in enumerate(completion.token_ids[:-1], 1):
                first[token] = min(place, first.get(token, place))
        for needed in (True, False):
            fitting = (
                t for t, place in first.items() if (place < limit) == needed and t not in prompted
            )
            if (token := next(fitting, None)) is None:
                continue
            table = model.parameters["embedding.table"].at[token].set(np.nan)
            parameters = model.parameters | {"embedding.table": table}
            requests = [r for r in requests_of(AGREE) if r.request_id == name]
            for num_reserved in (0, 3):
                generator = generator_of(model, parameters=parameters)
                generator.reserve(num_reserved)
                poisoned = run(generator, requests)[name]
                if needed:
                    assert poisoned.error.code == "nonfinite_logits"
                else:
                    assert poisoned == output
                num_checked[needed] += 1
    assert num_checked[True] and num_checked[False]


def test_a_stop_string_ends_a_sample_within_a_rule(model):
    rule = SampleRule(PATTERN, stop_when=2)
    whole = run(generator_of(model), requests_of(None, stop=["h", "ce"]))
    stopping = run(generator_of(model), requests_of(rule, stop=["h", "ce"]))
    found = Counter()
    for name, output in stopping.items():
        expected = defined([o.token_ids for o in whole[name].outputs], rule)
        assert [(o.token_ids, o.stopped_early) for o in output.outputs] == expected
        found.update((o.stop_reason, o.stopped_early) for o in output.outputs)
        for completion, alone in zip(output.outputs, whole[name].outputs, strict=True):
            if completion.stopped_early is None:
                assert (completion.text, completion.stop_reason) == (alone.text, alone.stop_reason)
    assert found["h", None] and found[None, "agreement"]


def test_a_rule_with_an_answer_needs_a_tokenizer(model):
    with pytest.raises(RowError, match=r"stopping\.answer: expected none, as the model has no"):
        model.generator().submit(requests_of(AGREE)[0])
    assert len(run(model.generator(), requests_of(SampleRule(keep="best")))) == 5


def test_rows_that_drain_finish_as_their_rule_says(model):
    requests = requests_of(BOTH)
    expected = run(generator_of(model), requests)
    generator = generator_of(model)
    for request in requests:
        generator.submit(request)
    finished = generator.step() + generator.step()
    dropped = generator.drain()
    finished += generator.run()
    outputs = {output.request_id: replace(output, metrics=None) for output in finished}
    assert dropped and outputs
    assert outputs == {name: expected[name] for name in expected if name not in dropped}


def test_vocabulary_has_letters_for_all_answers():
    assert {answer_of([token]) for token in range(3, CONFIG.vocab_size)} >= {"a", "b"}
