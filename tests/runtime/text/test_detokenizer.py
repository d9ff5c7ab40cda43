"""Text comes in whole characters, and its parts together equal the decoding of all ids."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.runtime.text.detokenizer import Detokenizer
from noria.runtime.text.tokenizer import Tokenizer


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
