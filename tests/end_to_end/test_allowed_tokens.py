"""Keys of rows that restrict answers, cut prompts or begin answers, from line to line."""

import re
from dataclasses import replace

import pytest
from command import chat, completion, write_lines

from noria.runtime import LLM, AllowedTokens, SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
ASKED = [{"role": "user", "content": "water wheel"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "the water"}]
CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.fixture(scope="module")
def choices(noria, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("allowed")
    first = [
        completion("plain", "the water wheel", **GREEDY, logprobs=0),
        completion("ids", [5, 6, 7, 8, 9, 10], **GREEDY, logprobs=0),
    ]
    rows, _ = noria.batch(write_lines(folder / "a.jsonl", first), folder / "a.out.jsonl")
    plain = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in rows}
    words = re.findall("[a-z]{2,}", plain["plain"]["text"])
    second = [
        *first,
        completion("no word", "the water wheel", **GREEDY, bad_words=words[:1], logprobs=0),
        completion("some", "the water wheel", **GREEDY, allowed_token_ids=[7.0, 8], logprobs=0),
        completion("last ids", [9, 9, 5, 6, 7, 8, 9, 10], **GREEDY, truncate_prompt_tokens=6),
        completion("echo", [9, 9, 5, 6], **GREEDY, truncate_prompt_tokens=2, echo=True, logprobs=0),
        completion("whole", [5, 6, 7, 8, 9, 10], **GREEDY, truncate_prompt_tokens=-1),
        completion("too many", [5, 6], **GREEDY, truncate_prompt_tokens=10**6),
        chat("continued", "x", **GREEDY, **CONTINUE) | {"x": BEGUN},
        chat("both", "x", **GREEDY, continue_final_message=True),
        chat("beam", "x", **GREEDY, use_beam_search=True),
        chat("template", "x", **GREEDY, chat_template="{{ messages[0].content }}"),
        chat("effort", "x", **GREEDY, reasoning_effort="high", harmless=1),
    ]
    for row in second:
        if messages := row.pop("x", None):
            row["body"]["messages"] = messages
    source = write_lines(folder / "b.jsonl", second)
    rows, _ = noria.batch(source, folder / "b.out.jsonl", "--ignore-unknown", expect=1)
    return {"alone": plain["plain"], "words": words} | {
        row["custom_id"]: (row["response"]["body"].get("choices") or [row["response"]["body"]])[0]
        for row in rows
    }


def test_a_forbidden_word_is_not_generated_and_other_rows_keep_their_bits(choices):
    first = choices["words"][0]
    assert first in choices["plain"]["logprobs"]["tokens"]
    assert first not in choices["no word"]["logprobs"]["tokens"]
    assert choices["no word"]["text"] != choices["plain"]["text"] == choices["alone"]["text"]


def test_only_allowed_ids_are_generated(choices):
    assert len(choices["some"]["logprobs"]["tokens"]) == 6
    assert len(set(choices["some"]["logprobs"]["tokens"])) <= 2


def test_the_last_tokens_of_a_prompt_are_kept(choices):
    assert choices["last ids"]["text"] == choices["whole"]["text"] == choices["ids"]["text"]
    assert len(choices["echo"]["logprobs"]["tokens"]) == 2 + 6


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("too many", "truncate_prompt_tokens"),
        ("both", "add_generation_prompt"),
        ("beam", "use_beam_search"),
        ("template", "chat_template"),
        ("effort", "reasoning_effort"),
    ],
)
def test_other_keys_that_change_answers_stay_errors(choices, name, key):
    assert key in choices[name]["error"]["message"]


def test_answers_of_python_are_those_of_the_command(noria, choices):
    rule = AllowedTokens(bad_words=(choices["words"][0],))
    params = SamplingParams(**GREEDY, bad_words=rule.bad_words)
    options = {"max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"}
    with LLM(str(noria.model), structured_outputs=[rule], **options) as llm:
        (output,) = llm.generate("the water wheel", params)
        assert output.outputs[0].text == choices["no word"]["text"]
        plain = SamplingParams(**GREEDY)
        (begun,) = llm.chat(BEGUN, plain, **CONTINUE)
        assert begun.outputs[0].text == choices["continued"]["message"]["content"]
        with pytest.raises(ValueError, match="or allowed tokens, that the plan"):
            llm.generate("the water", replace(params, bad_words=["other"]))
