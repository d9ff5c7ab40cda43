"""`LLM` over a small model: forms of prompts, order, refusals, scores."""

import pytest
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.bucket_grid import BucketGrid
from noria.compile.plan import Plan, PlannedModel
from noria.runtime import LLM, SamplingParams
from noria.runtime.request import RowError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
GRID = BucketGrid(max_length=64, prefill=((16, 2),), decode_slots=2, decode_spans=(64,))


@pytest.fixture(scope="module")
def llm(noria):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", noria.environment["XDG_CACHE_HOME"])
        llm = LLM(model=str(noria.model), max_model_len=64, max_num_seqs=3)
    yield llm
    llm.close()


def ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def num_prefills(llm) -> int:
    return sum(use["calls"] for use in llm._generator.statistics()["buckets"]["prefill"].values())


def test_a_prompt_is_the_same_in_every_form(llm):
    tokens = llm.get_tokenizer().encode("the water", special_tokens=True)
    forms = ["the water", tokens, {"prompt": "the water"}, {"prompt_token_ids": tokens}]
    outputs = llm.generate(forms, GREEDY)
    assert len({tuple(row) for row in ids(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["the water", None, "the water", None]
    assert all(output.prompt_token_ids == tokens for output in outputs)
    for form in forms:
        assert ids(llm.generate(form, GREEDY)) == ids(outputs[:1])


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_parameters(llm):
    rows = [[5] * length for length in (40, 3, 17, 1, 30, 8)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in range(6, 0, -1)]
    outputs = llm.generate(rows, params)
    assert [output.prompt_token_ids for output in outputs] == rows
    assert [len(row) for row in ids(outputs)] == [6, 5, 4, 3, 2, 1]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    alone = [llm.generate(row, param)[0] for row, param in zip(rows, params, strict=True)]
    assert ids(alone) == ids(outputs)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == llm.generate([], []) == llm.chat([]) == []


@pytest.mark.parametrize("params", [[], [GREEDY], [GREEDY] * 3])
def test_as_many_parameters_as_prompts_are_expected(llm, params):
    with pytest.raises(ValueError, match=rf"one each \(2\), got {len(params)}"):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([5] * 65, "context_length_exceeded"),
        ([5, 100_000], "invalid_token_id"),
        ([], "empty_prompt"),
        ({"text": "x"}, "invalid_request"),
    ],
)
def test_a_refusal_raises_before_any_row_of_the_call_runs(llm, prompt, code):
    before = num_prefills(llm)
    with pytest.raises(RowError) as caught:
        llm.generate([[5, 6], prompt], GREEDY)
    assert caught.value.code == code
    assert num_prefills(llm) == before
    assert len(llm.generate([[5, 6]], GREEDY)) == 1


def test_scores_are_the_logprobs_with_which_the_tokens_were_made(llm):
    prompt = [5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    (made,) = llm.generate(prompt, params)
    completion = made.outputs[0]
    (scored,) = llm.score([*prompt, *completion.token_ids])
    assert scored.prompt_logprobs[0] is None
    assert [entry.token_id for entry in scored.prompt_logprobs[1:]] == [6, 7, *completion.token_ids]
    expected = [entry.logprob for entry in completion.logprobs]
    found = [entry.logprob for entry in scored.prompt_logprobs[len(prompt) :]]
    assert found == pytest.approx(expected, abs=FLOAT32_MODEL_LOGPROB)
    assert completion.cumulative_logprob == pytest.approx(sum(expected))


def test_one_conversation_or_several(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("the wheel", "the stream")]
    several = llm.chat(conversations, GREEDY)
    assert ids(several) == [ids(llm.chat(one, GREEDY))[0] for one in conversations]
    tokenizer = llm.get_tokenizer()
    start = tokenizer.encode("<|im_start|>user\nthe wheel<|im_end|>\n", special_tokens=True)
    assert several[0].prompt_token_ids[: len(start)] == start


def test_a_length_beyond_the_models_is_refused(noria):
    with pytest.raises(ValueError, match=r"max_model_len: expected at most 128.*got 129"):
        LLM(model=str(noria.model), max_model_len=129)


@pytest.mark.parametrize(
    ("planned", "options", "message"),
    [
        (PlannedModel("m", "sha256:00", "float32"), {}, "plan model.fingerprint: expected sha256"),
        (
            PlannedModel("m", "", "float32"),
            {"dtype": "bfloat16"},
            "plan model.dtype: expected bfloat16, got float32",
        ),
        (
            PlannedModel("m", "", "float32"),
            {"target": "tpu:v5e:2x4"},
            "target: expected one that is on this machine|no topology",
        ),
    ],
)
def test_a_plan_for_something_else_is_refused(noria, planned, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(model=str(noria.model), plan=Plan("cpu", planned, GRID), **options)
