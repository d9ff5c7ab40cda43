"""Bodies of requests that need vectors: every form is read, all else is refused by name."""

import pytest

from noria.runtime.errors import RowError
from noria.runtime.rows.body_keys import unknown_among
from noria.runtime.rows.pooled_body import (
    MAX_TEXTS,
    POOLED_KEYS,
    POOLED_OTHERS,
    POOLED_URLS,
    PooledRequest,
    read_pooled,
)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("a text", ("a text",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([3, 4], ((3, 4),)),
        ([[3, 4], [5]], ((3, 4), (5,))),
    ],
)
def test_inputs_have_four_forms(value, texts):
    body = {"input": value, "model": "m", "user": "u", "dimensions": None}
    assert read_pooled("embed", body) == PooledRequest("embed", texts)
    assert read_pooled("classify", body | {"dimensions": None}).texts == texts


def test_options_of_embeddings_are_read():
    body = {"input": "a", "encoding_format": "base64", "dimensions": 64}
    assert read_pooled("embed", body) == PooledRequest(
        "embed", ("a",), encoding_format="base64", dimensions=64
    )


def test_one_text_is_paired_with_all_others_or_each_with_its_own():
    one = read_pooled("score", {"text_1": "q", "text_2": ["a", "b"]})
    assert one.pairs == [("q", "a"), ("q", "b")]
    each = read_pooled("score", {"text_1": ["q", "r"], "text_2": ["a", "b"]})
    assert each.pairs == [("q", "a"), ("r", "b")]
    assert read_pooled("score", {"text_1": "q", "text_2": "a"}).pairs == [("q", "a")]


def test_documents_are_paired_with_the_query():
    body = {"query": "q", "documents": ["a", "b"], "top_n": 1, "use_activation": False}
    found = read_pooled("rerank", body)
    assert found.pairs == [("q", "a"), ("q", "b")]
    assert (found.top_n, found.use_activation) == (1, False)
    for all_of_them in (0, -1, 0.0):
        assert read_pooled("rerank", body | {"top_n": all_of_them}).top_n is None


def test_documents_may_be_objects_with_a_text_and_are_returned_anyway():
    body = {"query": "q", "documents": ["Bees make honey.", "Paris is the capital."]}
    expected = read_pooled("rerank", body)
    objects = [{"text": "Bees make honey."}, {"text": "Paris is the capital."}]
    assert read_pooled("rerank", body | {"documents": objects}) == expected
    assert read_pooled("rerank", body | {"return_documents": True}) == expected
    with pytest.raises(RowError, match="return_documents: expected true, got False"):
        read_pooled("rerank", body | {"return_documents": False})
    with pytest.raises(RowError, match=r"documents\[0\]: expected a string or {.text.: string}"):
        read_pooled("rerank", body | {"documents": [{"text": "a", "title": "b"}]})


def test_the_error_of_a_number_of_documents_names_the_numbers_that_mean_all():
    with pytest.raises(RowError, match="an integer of at least 1, or 0 or -1 for all, got -2"):
        read_pooled("rerank", {"query": "q", "documents": ["a"], "top_n": -2})


def test_whole_numbers_of_requests_for_vectors_are_integers():
    assert read_pooled("embed", {"input": "a", "dimensions": 64.0}).dimensions == 64
    assert read_pooled("embed", {"input": "a", "truncate_prompt_tokens": 3.0}).max_tokens == 3
    with pytest.raises(RowError, match=r"an integer of at least 1, got 3\.5"):
        read_pooled("embed", {"input": "a", "dimensions": 3.5})


def test_all_unknown_keys_of_a_request_for_vectors_are_named_at_once():
    with pytest.raises(RowError) as refusal:
        read_pooled("embed", {"input": "a", "dimension": 3, "zeta": 1, "normalize": True})
    assert all(repr(key) in str(refusal.value) for key in ("dimension", "zeta", "normalize"))
    hints = {"service_tier": "flex", "metadata": {}, "add_special_tokens": True}
    assert read_pooled("embed", {"input": "a", **hints}) == read_pooled("embed", {"input": "a"})


def test_the_texts_that_the_model_reads_have_places_in_the_body():
    assert read_pooled("embed", {"input": "a"}).places(1) == ["input"]
    assert read_pooled("classify", {"input": ["a", "b"]}).places(2) == ["input[0]", "input[1]"]
    pairs = read_pooled("score", {"text_1": "q", "text_2": ["a", "b"]})
    assert pairs.places(3) == ["text_1", "text_2[0]", "text_2[1]"]
    assert pairs.places(2) == ["text_2[0]", "text_2[1]"]
    one = read_pooled("rerank", {"query": "q", "documents": ["a"]})
    assert one.places(2) == ["query", "documents"] and one.places(1) == ["documents"]


@pytest.mark.parametrize("value", [["a", 3], [3, "a"], ["a", [3]], [3, [4]]])
def test_inputs_of_several_forms_are_refused_with_the_forms(value):
    with pytest.raises(RowError, match="expected a list of strings, of token ids or of lists"):
        read_pooled("embed", {"input": value})


def test_texts_are_cut_on_request():
    body = {"input": "a", "truncate_prompt_tokens": 3}
    assert read_pooled("embed", body).max_tokens == 3
    assert read_pooled("classify", body | {"truncate_prompt_tokens": -1}).max_tokens == -1
    assert read_pooled("embed", body | {"truncate_prompt_tokens": None}).max_tokens is None


WRONG = [
    *(
        ("embed", {"input": "a", "truncate_prompt_tokens": value}, "truncate_prompt_tokens")
        for value in (-2, 0, True, "3", 1.5)
    ),
    ("embed", {}, "input"),
    ("embed", {"input": []}, "input"),
    ("embed", {"input": [[]]}, "input"),
    ("embed", {"input": ["a", 3]}, "input"),
    ("embed", {"input": [1, True]}, "input"),
    ("embed", {"input": [1, -1]}, "input"),
    ("embed", {"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
    ("embed", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("embed", {"input": "a", "dimensions": 0}, "dimensions"),
    ("embed", {"input": "a", "dimensions": True}, "dimensions"),
    ("embed", {"input": "a", "dimension": 3}, "dimension"),
    ("score", {"text_1": "a"}, "text_2"),
    ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("score", {"text_1": "a", "text_2": [3]}, "text_2"),
    ("score", {"text_1": "a", "text_2": "b", "use_activation": 1}, "use_activation"),
    ("rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    ("rerank", {"query": "a", "documents": []}, "documents"),
    ("rerank", {"query": "a", "documents": ["b"], "top_n": -2}, "top_n"),
    ("rerank", {"query": "a", "documents": ["b"], "top_n": False}, "top_n"),
    ("classify", {"input": "a", "dimensions": 3}, "dimensions"),
]


@pytest.mark.parametrize(("task", "body", "param"), WRONG)
def test_wrong_bodies_are_refused_by_name(task, body, param):
    with pytest.raises(RowError) as refusal:
        read_pooled(task, body)
    assert refusal.value.param == param and param in refusal.value.message


def test_keys_that_noria_does_not_know_differ_from_those_it_does_not_support():
    body = {"input": "a", "zeta": 1, "normalize": True}
    assert unknown_among(body, POOLED_KEYS["embed"], POOLED_OTHERS) == ("zeta",)


def test_every_endpoint_has_a_task():
    assert set(POOLED_URLS.values()) == {"embed", "score", "rerank", "classify"}
