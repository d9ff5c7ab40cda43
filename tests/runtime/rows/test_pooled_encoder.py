"""Texts of requests for vectors become packed token ids, with the model's prompt before them."""

from dataclasses import replace

import pytest
import tokenizers
from tiny import TWO_LAYERS
from word_pieces import write_word_pieces

from noria.modelzoo.pooling_config import MEAN, Pooling, Projection
from noria.runtime.embedding.texts import cuts_of, unpack
from noria.runtime.errors import RowError
from noria.runtime.rows.pooled_body import read_pooled
from noria.runtime.rows.pooled_encoder import PooledEncoder
from noria.runtime.text.load_tokenizer import load_tokenizer

WATER, WHEEL, TURN, THE = 4, 5, 7, 8


@pytest.fixture
def encode(tmp_path):
    """Return the token ids of each text of a request, for a pooling."""
    write_word_pieces(tmp_path)
    tokenizer = load_tokenizer(tmp_path)

    def encoded(
        task: str, pooling: Pooling = MEAN, *, strict: bool = False, cuts: bool = False, **body
    ) -> list[tuple[int, ...]]:
        config = replace(TWO_LAYERS, pooling=pooling)
        encoder = PooledEncoder(tokenizer, lambda: config, is_strict=strict)
        (packed,) = encoder([read_pooled(task, body)])
        if isinstance(packed, RowError):
            raise packed
        if cuts:
            return [(sum(map(bool, cuts_of(packed))), sum(cuts_of(packed)))]
        return [text.ids for text in unpack(packed)]

    return encoded


def test_the_default_prompt_is_before_texts_and_not_before_token_ids(encode):
    prompted = Pooling(prompt="the ")
    assert encode("embed", input="water") == [(1, WATER, 2)]
    assert encode("embed", prompted, input="water") == [(1, THE, WATER, 2)]
    assert encode("embed", prompted, input=[WATER]) == [(WATER,)]
    scored = encode("score", prompted, text_1="water", text_2=["wheel", "turn"])
    assert scored == [(1, THE, token, 2) for token in (WATER, WHEEL, TURN)]


def test_a_classifier_reads_pairs(encode):
    classifier = Pooling(projections=(Projection(1),), labels=("good",))
    pairs = encode("score", classifier, text_1="water", text_2=["wheel", "turn"])
    assert pairs == [(1, WATER, 2, token, 2) for token in (WHEEL, TURN)]


def test_the_last_tokens_are_cut_on_request(encode):
    texts = {"input": ["water wheel turn the", "water"], "truncate_prompt_tokens": 4}
    assert encode("embed", **texts) == [(1, WATER, WHEEL, 2), (1, WATER, 2)]
    assert encode("embed", input=[[5, 6, 7], [5]], truncate_prompt_tokens=2) == [(5, 6), (5,)]
    body = {"input": list(range(90)), "truncate_prompt_tokens": -1}
    assert encode("embed", **body) == [tuple(range(90))[: TWO_LAYERS.max_position]]
    assert encode("embed", Pooling(max_tokens=7), **body) == [tuple(range(7))]
    assert len(encode("embed", Pooling(max_tokens=7), input=body["input"])[0]) == 90
    with pytest.raises(RowError, match="expected -1 or at most 7, the maximum length"):
        encode("embed", Pooling(max_tokens=7), input="water", truncate_prompt_tokens=8)


LIMITED = Pooling(prompt="the ", max_tokens=5)
LONG = "water wheel turn the"


def test_texts_are_cut_at_the_length_of_the_models_files_as_in_the_reference(encode, tmp_path):
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.enable_truncation(5)
    texts = [LONG, "water", f"wheel {LONG} {LONG}", "turn turn"]
    expected = [tuple(reference.encode(f"the {text}").ids) for text in texts]
    assert encode("embed", LIMITED, input=texts) == expected
    assert [len(ids) for ids in expected] == [5, 4, 5, 5]
    assert encode("embed", LIMITED, input=texts, cuts=True) == [(2, 2 + 7)]
    scored = encode("score", LIMITED, text_1=LONG, text_2=texts[1:])
    assert scored == expected
    # a request may ask for less, and decides alone
    assert encode("embed", LIMITED, input="water", truncate_prompt_tokens=3) == [(1, THE, 2)]


def test_texts_beyond_that_length_are_refused_on_request(encode):
    assert len(encode("embed", LIMITED, strict=True, input=["water", "wheel turn"])) == 2
    with pytest.raises(RowError, match=r"^input\[1\]: expected at most 5 tokens, .*, got 7"):
        encode("embed", LIMITED, strict=True, input=["water", LONG])
    with pytest.raises(RowError, match=r"^text_1: expected at most 5"):
        encode("score", LIMITED, strict=True, text_1=LONG, text_2="water")
    cut = encode("embed", LIMITED, strict=True, input=LONG, truncate_prompt_tokens=-1)
    assert cut == [(1, THE, WATER, WHEEL, 2)]


@pytest.mark.parametrize(
    ("task", "body", "place"),
    [
        ("embed", {"input": "water"}, "input"),
        ("classify", {"input": ["water", "wheel"]}, "input[0]"),
        ("score", {"text_1": "water", "text_2": ["wheel", "turn"]}, "text_1"),
        ("rerank", {"query": "water", "documents": "wheel"}, "query"),
    ],
)
def test_a_text_that_cannot_be_read_is_named_by_its_place_in_the_body(task, body, place):
    encode = PooledEncoder(None, lambda: replace(TWO_LAYERS, pooling=MEAN))
    (error,) = encode([read_pooled(task, body)])
    assert isinstance(error, RowError) and error.param == place
    assert error.message.startswith(f"{place}: this model has no tokenizer")
