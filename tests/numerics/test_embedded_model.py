"""The embedded model against transformers: same prompts, same greedy tokens, same probabilities.

The reference is transformers' LlamaForCausalLM in float32, over weights that are dequantised and
renamed here without noria's code. It reads noria's tokens: given the same earlier tokens, its
likeliest next token is the choice of its own greedy search. So one pass over a row checks every
step, also the steps after a near tie. The layers run in a loop, which compiles much sooner;
`--slow` unrolls them.
"""

import numpy as np
import pytest
import tolerances
from numerics_helpers import embedded_file, script

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.runtime import LLM, SamplingParams

pytestmark = pytest.mark.reference

NUM_TOKENS = 32
GRID = BucketGrid(max_length=112, prefill=((112, 2),), decode_slots=3, page=16, score=True)
QUESTIONS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about an old mill by the river.",
    "How do I make bread? List the steps.",
    "Translate to French: the night train arrives at seven.",
    "Who was Ada Lovelace, and why do people still speak of her work on the analytical engine?",
]
CONVERSATIONS = [[{"role": "user", "content": question}] for question in QUESTIONS]
CONVERSATIONS[1].insert(0, {"role": "system", "content": "You answer like a physicist."})


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The model and tokenizer of transformers."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("reference")
    script("scripts/peers/export_model.py").export_hugging_face(embedded_file(), directory)
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    (directory / "model.safetensors").unlink()
    return model.eval(), transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def llm(optimizes):
    model = PlannedModel("smollm2", "", scan_layers=not optimizes)
    plan = Plan("cpu", model, Numbers("float32"), GRID)
    llm = LLM("smollm2", plan=plan)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def answers(llm):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    return llm.chat(CONVERSATIONS, params)


def reference_logprobs(model, tokens):
    """Return log-probabilities `[T, V]`: entry t is for the token at t + 1."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1).numpy()


def test_chat_prompts_have_the_ids_of_the_published_tokenizer_and_template(reference, answers):
    _, tokenizer = reference
    for conversation, answer in zip(CONVERSATIONS, answers, strict=True):
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert answer.prompt_token_ids == ids


def test_greedy_tokens_and_their_logprobs_are_the_references(reference, answers):
    model, _ = reference
    for answer in answers:
        prompt, output = answer.prompt_token_ids, answer.outputs[0]
        assert len(output.token_ids) == NUM_TOKENS
        logprobs = reference_logprobs(model, prompt + output.token_ids)[len(prompt) - 1 : -1]
        for step, (row, score) in enumerate(zip(logprobs, output.logprobs, strict=True)):
            second, best = np.sort(row)[-2:]
            is_near_tie = best - second < tolerances.NEAR_TIE_GAP
            token = score.token_id
            assert token == output.token_ids[step]
            assert token == row.argmax() or is_near_tie, (
                f"step {step}: expected {row.argmax()} (gap {best - second}), got {token}"
            )
            tolerance = tolerances.FLOAT32_MODEL_LOGPROB
            assert score.logprob == pytest.approx(row[token], abs=tolerance)
            for other, logprob in score.top:
                assert logprob == pytest.approx(row[other], abs=tolerance)


def test_scores_of_prompts_are_the_references(reference, answers, llm):
    model, _ = reference
    rows = [answer.prompt_token_ids + answer.outputs[0].token_ids for answer in answers]
    rows.append(rows[0][:40])
    for row, scored in zip(rows, llm.score(rows, num_alternatives=1), strict=True):
        logprobs = reference_logprobs(model, row)
        assert scored.prompt_logprobs[0] is None
        assert [score.token_id for score in scored.prompt_logprobs[1:]] == row[1:]
        for expected, score in zip(logprobs, scored.prompt_logprobs[1:], strict=False):
            tolerance = tolerances.FLOAT32_MODEL_LOGPROB
            assert score.logprob == pytest.approx(expected[score.token_id], abs=tolerance)
            assert score.top[0][1] == pytest.approx(expected.max(), abs=tolerance)


def test_the_capital_of_france_is_paris(llm):
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    output = answer.outputs[0]
    assert output.text == "The capital of France is Paris."
    assert output.token_ids[:7] == [504, 3575, 282, 4649, 314, 7042, 30]
    assert output.finish_reason == "stop"
