"""Keys of bodies: keys that change no answer are taken, and all others are refused at once."""

import pytest

from noria.runtime.errors import RowError
from noria.runtime.parameters.vllm_options import ANY
from noria.runtime.rows.body_keys import HINTS, OF_CHAT, OF_COMPLETIONS, unknown_among
from noria.runtime.rows.request_body import BodyParams, key_tables, read_params, read_sampling
from noria.runtime.structured.params import AllowedTokens

PLAIN = {"max_tokens": 3, "temperature": 0}


def read(is_chat: bool = True, **body) -> BodyParams:
    return read_params({**PLAIN, **body}, is_chat=is_chat, defaults={})


def refusal(is_chat: bool = True, **body) -> RowError:
    with pytest.raises(RowError) as caught:
        read(is_chat, **body)
    return caught.value


def test_hints_for_hosted_services_change_nothing():
    hints = {"service_tier": "flex", "prompt_cache_key": "x", "safety_identifier": "u",
             "verbosity": "low", "user": "u", "metadata": {"a": "b"}, "store": True}  # fmt: skip
    assert hints.keys() <= HINTS.keys()
    assert read(**hints) == read() and read(False, **hints) == read(False)


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("best_of", 1, 2),
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 1.2),
        ("spaces_between_special_tokens", True, False),
        ("detokenize", True, False),
        ("echo", False, True),
        ("modalities", ["text"], ["text", "audio"]),
        ("chat_template", None, "{{ messages[0].content }}"),
    ],
)
def test_a_default_that_is_written_out_changes_nothing_and_other_values_are_refused(
    key, default, other
):
    assert read(**{key: default}) == read()
    error = refusal(**{key: other})
    assert (error.code, error.param) == ("unknown_parameter", key)
    assert error.message.startswith(f"{key}: expected ") and f"got {other!r}" in error.message


def test_defaults_of_keys_that_change_answers_change_nothing():
    defaults = {"bad_words": [], "allowed_token_ids": None, "truncate_prompt_tokens": None}
    assert read(**defaults) == read() and read(False, **defaults) == read(False)
    assert read(add_generation_prompt=True, continue_final_message=False) == read()


def test_allowed_tokens_forbidden_words_and_the_length_of_the_prompt_are_read():
    found = read(bad_words=["red"], allowed_token_ids=[1.0, 2], truncate_prompt_tokens=3.0)
    assert found.params.form == AllowedTokens((1, 2), ("red",)) and found.max_prompt_tokens == 3
    assert read(False, truncate_prompt_tokens=-1).max_prompt_tokens == -1
    for value in (0, -2, 2.5, True, "3"):
        assert refusal(truncate_prompt_tokens=value).param == "truncate_prompt_tokens"
    for key, value in (("bad_words", "red"), ("bad_words", [""]), ("allowed_token_ids", [0.5])):
        assert refusal(**{key: value}).param == key
        error = refusal(**{key: [5] if key != "bad_words" else ["red"]}, guided_choice=["a"])
        assert error.message.startswith(f"{key}: expected none beside guided_choice")


def test_an_answer_begins_or_goes_on_but_not_both():
    found = read(add_generation_prompt=False, continue_final_message=True)
    assert (found.add_generation_prompt, found.continue_final_message) == (False, True)
    assert not read(add_generation_prompt=False).add_generation_prompt
    assert refusal(continue_final_message=True).param == "add_generation_prompt"
    assert refusal(False, continue_final_message=True).param == "continue_final_message"


def test_keys_that_change_answers_are_never_unknown():
    keys = ("use_beam_search", "chat_template", "reasoning_effort", "logits_processors", "suffix")
    keys += ("max_new_tokens", "do_sample", "stop_sequences", "repeat_penalty", "enable_thinking")
    keys += ("extra_body", "typical_p", "no_repeat_ngram_size", "mirostat", "system_prompt")
    assert not unknown_among(dict.fromkeys((*keys, "bad_words"), "x"), *key_tables(is_chat=True))
    assert {refusal(**{key: "x"}).param for key in keys} == set(keys)
    assert "Give max_tokens" in refusal(max_new_tokens=5).message
    assert read(typical_p=1.0, no_repeat_ngram_size=0, num_beams=1) == read()


def test_defaults_of_keys_that_need_another_key_change_nothing():
    defaults = {"logprobs": False, "top_logprobs": 0, "tool_choice": "none"}
    assert read(**defaults, parallel_tool_calls=True) == read()
    for key, value in (("top_logprobs", 1), ("tool_choice", "auto")):
        assert refusal(**{key: value}).code == "invalid_request"
    assert refusal(parallel_tool_calls=False).param == "parallel_tool_calls"


@pytest.mark.parametrize(("is_chat", "table"), [(True, OF_CHAT), (False, OF_COMPLETIONS)])
def test_every_harmless_value_of_the_tables_is_taken(is_chat, table):
    written = {
        key: accepted.values[0] if accepted.values else "any"
        for key, accepted in table.items()
        if accepted.values or accepted is ANY
    }
    assert len(written) > 30 and read(is_chat, **written) == read(is_chat)


def test_all_unknown_keys_are_named_in_one_error():
    error = refusal(max_token=5, tempratur=1, best_of=2, zeta=1)
    assert (error.code, error.param) == ("unknown_parameter", "max_token")
    assert error.message == (
        "'max_token' is not a known parameter. Did you mean 'max_tokens'? 'tempratur' is not a "
        "known parameter. Did you mean 'temperature'? best_of: expected 1, got 2. Use n. 'zeta' "
        "is not a known parameter. Remove it."
    )
    many = refusal(**{f"key {i}": i for i in range(100)})
    assert many.message.endswith("80 more are refused.")
    rule = {"answer": "x", "stop_whn": 3, "zeta": 1}
    assert all(repr(key) in refusal(n=3, noria=rule).message for key in ("stop_whn", "zeta"))


@pytest.mark.parametrize(
    ("key", "whole", "fraction"),
    [
        ("max_tokens", 3.0, 3.5),
        ("max_completion_tokens", 3.0, 3.5),
        ("min_tokens", 2.0, 1.5),
        ("n", 1.0, 1.5),
        ("top_k", 50.0, 50.5),
        ("seed", 42.0, 42.5),
        ("prompt_logprobs", 2.0, 2.5),
        ("stop_token_ids", [7.0], [7.5]),
    ],
)
def test_a_whole_number_with_a_point_is_an_integer(key, whole, fraction):
    integer = [7] if isinstance(whole, list) else int(whole)
    found = read(**{key: whole}).params
    assert repr(found) == repr(read(**{key: integer}).params)
    assert "expected an integer" in refusal(**{key: fraction}).message


def test_whole_counts_of_log_probabilities_rules_and_options_of_a_job_are_integers():
    assert repr(read(False, logprobs=4.0)) == repr(read(False, logprobs=4))
    assert repr(read(logprobs=True, top_logprobs=3.0)) == repr(read(logprobs=True, top_logprobs=3))
    assert refusal(False, logprobs=4.5).param == "logprobs"
    rule = {"answer": "x", "stop_when": 3.0, "probe_every": 8.0, "probes": 2.0}
    stopping = read(n=5.0, noria=rule).params.stopping
    assert "3.0" not in repr(stopping) and "8.0" not in repr(stopping)
    assert repr(read_sampling(["max_tokens=64.0"])) == "{'max_tokens': 64}"
