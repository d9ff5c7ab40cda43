"""Sampling options of a request, from its input line to its output line."""

import shutil

import pytest
from command import chat, completion, write_lines

PROMPT = "the water"
WHEEL = 77
"""The id that these tests force, chosen arbitrarily."""
FORCED = {"temperature": 0, "logit_bias": {str(WHEEL): 100}, "max_tokens": 8}
FREE = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}

ROWS = [
    completion("plain", PROMPT, **FREE),
    completion("forced", PROMPT, **FORCED, logprobs=0),
    completion("stop-id", PROMPT, **FORCED, stop_token_ids=[WHEEL]),
    completion("stop-id-later", PROMPT, **FORCED, stop_token_ids=[WHEEL], min_tokens=3),
    completion("presence", PROMPT, **FREE, presence_penalty=2),
    completion("frequency", PROMPT, **FREE, frequency_penalty=2),
    completion("repetition", PROMPT, **FREE, repetition_penalty=5),
    completion("score", PROMPT, echo=True, max_tokens=0, logprobs=2),
    completion("score-ids", [5, 6, 7], echo=True, max_tokens=0, logprobs=1),
    completion("echo", PROMPT, temperature=0, max_tokens=4, echo=True, logprobs=2),
    completion("echo-only", PROMPT, temperature=0, max_tokens=4, echo=True),
    completion("short", PROMPT, temperature=0, max_tokens=4),
    completion("three", PROMPT, temperature=1.5, max_tokens=10, n=3, seed=1),
    completion("seeded", PROMPT, temperature=1.5, max_tokens=10, seed=1),
    completion("open", PROMPT, temperature=0, ignore_eos=True),
    chat("chat", PROMPT, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3),
    chat("named", PROMPT, temperature=0, max_completion_tokens=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def bodies(noria, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("options")
    source = write_lines(folder / "in.jsonl", ROWS)
    rows, _ = noria.batch(source, folder / "out.jsonl")
    return {row["custom_id"]: row["response"]["body"] for row in rows}


@pytest.fixture(scope="module")
def choices(bodies) -> dict[str, dict]:
    return {name: body["choices"][0] for name, body in bodies.items()}


def test_a_bias_of_a_hundred_forces_its_token(choices):
    tokens = choices["forced"]["logprobs"]["tokens"]
    assert len(tokens) == 8 and len(set(tokens)) == 1
    assert set(choices["plain"]["logprobs"]["tokens"]) != set(tokens)


def test_a_stop_token_ends_the_row_and_stays_out_of_the_text(bodies, choices):
    assert bodies["stop-id"]["usage"]["completion_tokens"] == 1
    assert choices["stop-id"]["finish_reason"] == "stop"
    assert choices["stop-id"]["text"] == ""


def test_min_tokens_keeps_a_stop_token_off(bodies, choices):
    assert bodies["stop-id-later"]["usage"]["completion_tokens"] == 4
    assert choices["stop-id-later"]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["presence", "frequency", "repetition"])
def test_a_penalty_makes_repeats_rarer(choices, name):
    plain, penalised = (choices[key]["logprobs"]["tokens"] for key in ("plain", name))
    assert len(set(penalised)) > len(set(plain))


def test_scoring_gives_one_logprob_for_each_prompt_token_but_the_first(bodies, choices):
    logprobs = choices["score"]["logprobs"]
    assert choices["score"]["text"] == PROMPT == "".join(logprobs["tokens"])
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:])
    assert [PROMPT[i] for i in logprobs["text_offset"]] == [t[0] for t in logprobs["tokens"]]
    assert bodies["score"]["usage"]["completion_tokens"] == 0
    assert bodies["score"]["usage"]["prompt_tokens"] == len(logprobs["tokens"])


def test_token_ids_are_scored_as_they_are(bodies, choices):
    assert bodies["score-ids"]["usage"]["prompt_tokens"] == 3
    assert len(choices["score-ids"]["logprobs"]["token_logprobs"]) == 3


def test_an_echo_is_the_prompt_followed_by_the_answer(choices):
    alone = choices["short"]["text"]
    assert choices["echo"]["text"] == choices["echo-only"]["text"] == PROMPT + alone
    assert choices["echo-only"]["logprobs"] is None
    scored, both = choices["score"]["logprobs"], choices["echo"]["logprobs"]
    num_prompt = len(scored["tokens"])
    assert len(both["tokens"]) == num_prompt + 4
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert both[key][:num_prompt] == scored[key]
    assert both["text_offset"][num_prompt] == len(PROMPT)


def test_n_continuations_differ_and_the_first_is_that_of_n_1(bodies):
    three = bodies["three"]["choices"]
    assert [choice["index"] for choice in three] == [0, 1, 2]
    assert len({choice["text"] for choice in three}) == 3
    assert three[0]["text"] == bodies["seeded"]["choices"][0]["text"]


def test_a_chat_answer_lists_alternatives_likeliest_first(choices):
    content = choices["chat"]["logprobs"]["content"]
    assert content
    for entry in content:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        # greedy: the chosen token is the likeliest
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}


def test_the_newer_name_of_max_tokens_counts_too(bodies):
    assert bodies["named"]["usage"]["completion_tokens"] == 2


def test_without_max_tokens_a_row_fills_the_models_length(bodies, choices):
    assert bodies["open"]["usage"]["total_tokens"] == 128
    assert choices["open"]["finish_reason"] == "length"


def test_defaults_of_the_publisher_that_are_not_served_refuse_the_job(noria, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(noria.model, model)
    (model / "generation_config.json").write_text('{"eos_token_id": 2, "num_beams": 4}')
    source = write_lines(tmp_path / "in.jsonl", ROWS[:1])
    output = tmp_path / "out.jsonl"
    arguments = ("batch", "-i", source, "-o", output, "--model", model, "--dtype", "float32")
    assert "got num_beams = 4. Use --generation-config none" in noria.refuse(*arguments, expect=3)
    assert not output.exists()
    noria.run(*arguments, "--generation-config", "none")
