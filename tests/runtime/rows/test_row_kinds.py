"""Rows that a model cannot answer are refused before they run."""

import json
from dataclasses import replace

import pytest
from tiny import TWO_LAYERS

from noria.modelzoo.pooling_config import MEAN, Pooling, Projection
from noria.runtime.files.strict_json import Line
from noria.runtime.rows.lines import BatchRow, read_row
from noria.runtime.rows.row_kinds import refusal

ONE_CLASS = Pooling(projections=(Projection(1),), labels=("good",))
TWO_CLASSES = Pooling(projections=(Projection(2),), labels=("good", "bad"))
PAIR = {"text_1": "a", "text_2": "b"}


def refused(pooling: Pooling, url: str, body: dict) -> str | None:
    """Return the message of the refusal of a row."""
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    row = read_row(Line(1, 0, json.dumps(line).encode()), 0)
    assert isinstance(row, BatchRow)
    config = replace(TWO_LAYERS, pooling=pooling, has_head=False)
    error = refusal(row, config, ())
    return error and error.message


@pytest.mark.parametrize(
    ("pooling", "url", "body", "message"),
    [
        (ONE_CLASS, "/v1/embeddings", {"input": "a"}, "url: expected a model of embeddings"),
        (MEAN, "/v1/classify", {"input": "a"}, "url: expected a classifier for /v1/classify"),
        (TWO_CLASSES, "/v1/score", PAIR, "url: expected a model with one class for scores, got 2"),
        (
            MEAN,
            "/v1/embeddings",
            {"input": "a", "dimensions": TWO_LAYERS.embed + 1},
            f"dimensions: expected at most {TWO_LAYERS.embed}, the features of a vector",
        ),
    ],
)
def test_a_request_for_what_the_model_does_not_have_is_refused(pooling, url, body, message):
    assert (refused(pooling, url, body) or "").startswith(message)


@pytest.mark.parametrize(
    ("pooling", "asked"),
    [
        (MEAN, "Ask for /v1/embeddings."),
        (ONE_CLASS, "Ask for /v1/classify or /v1/score."),
        (TWO_CLASSES, "Ask for /v1/classify."),
    ],
)
def test_a_refused_row_for_tokens_names_the_requests_that_the_model_answers(pooling, asked):
    assert (refused(pooling, "/v1/completions", {"prompt": "a"}) or "").endswith(asked)


def test_all_other_requests_run():
    for pooling, url, body in (
        (MEAN, "/v1/embeddings", {"input": "a", "dimensions": TWO_LAYERS.embed}),
        (MEAN, "/v1/score", PAIR),
        (ONE_CLASS, "/v1/score", PAIR),
        (ONE_CLASS, "/v1/classify", {"input": "a"}),
        (TWO_CLASSES, "/v1/classify", {"input": "a"}),
    ):
        assert refused(pooling, url, body) is None
