"""Text comes in whole characters, and stop strings end it at the right character and token."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.runtime.errors import RowError
from noria.runtime.request import SamplingParams
from noria.runtime.text.detokenizer import Detokenizer, TextCollector
from noria.runtime.text.tokenizer import Tokenizer

TEXT = "One two, three.\n\nUser: four 🙂 five"


def pushed(tokenizer: Tokenizer, parts: list[list[int]], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(part) for part in parts), detokenizer.finish()]


# half of the ids are low: all these vocabularies have special and byte tokens there
IDS = st.lists(st.one_of(st.integers(0, 1100), st.integers(0, 140_000)), max_size=12)


@pytest.mark.parametrize("name", ["deepseek", "smollm2", "mistral_v3"])
def test_pushes_of_any_ids_add_up_to_the_decoding(request, name):
    tokenizer = request.getfixturevalue(name)

    @settings(max_examples=150, deadline=None, database=None)
    @given(st.lists(IDS, max_size=5), st.booleans())
    def check(parts, skip):
        whole = tokenizer.decode([i for part in parts for i in part], skip_special_tokens=skip)
        texts = pushed(tokenizer, parts, skip)
        assert "".join(texts) == whole
        single = pushed(tokenizer, [[i] for part in parts for i in part], skip)
        assert "".join(single) == whole

    check()


@pytest.mark.parametrize("name", ["deepseek", "smollm2", "mistral_v3"])
@pytest.mark.parametrize("text", ["🙂🏽‍🚀 ok 🦥", "日本𠜎語", "e\u0301 ½", "Ω"])
def test_a_character_is_held_back_until_it_is_whole(request, name, text):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, special_tokens=False)
    texts = pushed(tokenizer, [[token] for token in ids], True)
    assert "".join(texts) == text
    assert not any("\ufffd" in part for part in texts)
    assert texts[-1] == ""


@pytest.mark.parametrize("name", ["smollm2", "mistral_v3"])
def test_a_character_cut_off_at_the_end_shows_as_one_replacement(request, name):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode("a🦥", special_tokens=False)
    texts = pushed(tokenizer, [[token] for token in ids[:-1]], True)
    assert "".join(texts) == "a\ufffd" and texts[-1] == "\ufffd"


def test_leading_space_goes_once_and_stays_where_text_continues(mistral):
    ids = mistral.encode("hello world", special_tokens=False)
    assert "".join(pushed(mistral, [[i] for i in ids], True)) == "hello world"
    continued = Detokenizer(mistral, True, continues_text=True)
    assert continued.push(ids) == " hello world"


def test_special_tokens_show_only_when_asked_for(smollm2):
    ids = [1, 4093, 2]
    assert "".join(pushed(smollm2, [ids], False)) == "<|im_start|>user<|im_end|>"
    assert "".join(pushed(smollm2, [ids], True)) == "user"


def test_cost_of_a_push_does_not_grow_with_the_text(smollm2):
    detokenizer = Detokenizer(smollm2, True)
    start = time.process_time()
    for _ in range(100_000):
        detokenizer.push((504,))
    assert time.process_time() - start < 5


def collected(tokenizer, ids, sizes=None, **params) -> TextCollector:
    collector = TextCollector(tokenizer, SamplingParams(**params))
    position = 0
    while position < len(ids):
        size = sizes() if sizes else len(ids)
        collector.push(ids[position : position + size])
        position += size
    collector.finish()
    return collector


@pytest.mark.parametrize("stop", ["two", "ee.\n\nUs", "\n\n", ": fo", "🙂", " five", "One"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens_cuts_the_text(smollm2, mistral, stop, include):
    for tokenizer in (smollm2, mistral):
        ids = tokenizer.encode(TEXT, special_tokens=False)
        whole = collected(tokenizer, ids).text
        collector = collected(tokenizer, ids, stop=[stop], include_stop_str_in_output=include)
        end = whole.index(stop) + (len(stop) if include else 0)
        assert collector.text == whole[:end]
        assert collector.stop_reason == stop


@pytest.mark.parametrize("stop", ["ee.\n\nUs", "🙂", "never"])
def test_kept_tokens_end_with_the_one_that_completes_the_stop_string(smollm2, stop):
    ids = smollm2.encode(TEXT, special_tokens=False)
    collector = collected(smollm2, ids, stop=[stop])
    fewest = next(
        (n for n in range(len(ids)) if stop in smollm2.decode(ids[:n], skip_special_tokens=True)),
        len(ids),
    )
    assert collector.num_tokens_kept == fewest
    assert collector.num_tokens_past_stop == len(ids) - fewest


@pytest.mark.parametrize("stop", ["<|im_end|>", "im_end", "|>U", "three<"])
def test_stop_string_is_found_in_special_tokens_only_where_they_show(smollm2, stop):
    text = "One two, three<|im_end|>User"
    ids = smollm2.encode(text, special_tokens=True)
    assert smollm2.special_ids & set(ids)
    shown = collected(smollm2, ids, stop=[stop], skip_special_tokens=False)
    assert (shown.text, shown.stop_reason) == (text[: text.index(stop)], stop)
    hidden = collected(smollm2, ids, stop=[stop])
    assert (hidden.text, hidden.stop_reason) == ("One two, threeUser", None)


def test_stop_string_that_ends_the_prompt_is_looked_for_in_the_answer_alone(smollm2):
    answer = smollm2.encode(" wheel turns by water", special_tokens=False)
    collector = collected(smollm2, answer, stop=["the water", "water"])
    assert (collector.text, collector.stop_reason) == (" wheel turns by ", "water")
    assert collected(smollm2, answer, stop=["the water wheel"]).stop_reason is None


def test_result_does_not_depend_on_how_ids_arrive(smollm2):
    ids = smollm2.encode(TEXT, special_tokens=False)
    draw = random.Random(0)
    for stop in (["ee.\n\nUs"], ["🙂 f"], ["never"], []):
        expected = vars_of(collected(smollm2, ids, stop=stop))
        for _ in range(20):
            result = collected(smollm2, ids, lambda: draw.randrange(1, 5), stop=stop)
            assert vars_of(result) == expected


def test_a_stop_string_that_never_comes_changes_nothing(smollm2):
    ids = smollm2.encode(TEXT, special_tokens=False)
    assert vars_of(collected(smollm2, ids, stop=["never"])) == vars_of(collected(smollm2, ids))


def vars_of(collector: TextCollector) -> tuple:
    return (
        collector.text,
        collector.stop_reason,
        collector.num_tokens_kept,
        collector.num_tokens_past_stop,
    )


def test_first_stop_string_in_the_text_wins(smollm2):
    ids = smollm2.encode(TEXT, special_tokens=False)
    collector = collected(smollm2, ids, stop=["four", ".", "three"])
    assert (collector.text, collector.stop_reason) == ("One two, ", "three")


def test_stop_string_within_min_tokens_is_passed_over(smollm2):
    ids = smollm2.encode("stop and stop again", special_tokens=False)
    first, second = (n for n, token in enumerate(ids, 1) if "stop" in smollm2.token_text(token))
    assert collected(smollm2, ids, stop=["stop"], min_tokens=first - 1).num_tokens_kept == first
    assert collected(smollm2, ids, stop=["stop"], min_tokens=first).num_tokens_kept == second
    collector = collected(smollm2, ids, stop=["stop"], min_tokens=second)
    assert collector.stop_reason is None and collector.text == "stop and stop again"


def test_stop_token_shows_only_when_asked_for(smollm2):
    for include, text in ((False, "The"), (True, "The<|im_end|>")):
        params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
        collector = TextCollector(smollm2, params)
        assert not collector.push([504, 2], ends_with_stop_token=True)
        assert collector.finish() == text and collector.num_tokens_kept == 2


def test_character_cut_off_at_the_end_shows_as_one_replacement(smollm2):
    ids = smollm2.encode("a🦥", special_tokens=False)[:-1]
    collector = TextCollector(smollm2, SamplingParams())
    collector.push(ids)
    assert collector.text == "a"
    assert collector.finish() == "a\ufffd"


def test_text_continues_its_prompt_with_the_space_between(mistral):
    prompt, answer = mistral.encode("The sky", special_tokens=False), "is blue"
    ids = mistral.encode(answer, special_tokens=False)
    text = collected(mistral, ids).text
    joined = mistral.decode(prompt, skip_special_tokens=True) + text
    assert joined == mistral.decode(prompt + ids, skip_special_tokens=True) == "The sky is blue"


def test_without_a_tokenizer_tokens_are_counted_and_stop_strings_refused():
    collector = TextCollector(None, SamplingParams())
    assert not collector.push([1, 2, 3])
    assert collector.finish() == "" and collector.num_tokens_kept == 3
    with pytest.raises(RowError, match="stop: expected no stop strings") as caught:
        TextCollector(None, SamplingParams(stop="x"))
    assert caught.value.param == "stop"
