"""Stop strings end a text at the right character and the right token."""

import random

import pytest

from noria.runtime.errors import RowError
from noria.runtime.request import SamplingParams
from noria.runtime.text.detokenizer import TextCollector

TEXT = "One two, three.\n\nUser: four 🙂 five"


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
