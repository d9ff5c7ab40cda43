"""The forms of answers that bodies ask for, and the errors of wrong ones."""

import json
from json import dumps

import pytest

from noria.runtime.files.strict_json import Line
from noria.runtime.rows.lines import BadRow, BatchRow, read_row


def read(record):
    return read_row(Line(1, 0, json.dumps(record).encode()), 0)


def chat(**body):
    return {"messages": [{"role": "user", "content": "hi"}], **body}


def completion(**body):
    return {"prompt": "hi", **body}


def accepted(record) -> BatchRow:
    row = read(record)
    assert isinstance(row, BatchRow), row
    return row


def refused(record) -> BadRow:
    row = read(record)
    assert isinstance(row, BadRow), row
    return row


DEEP: dict = {"type": "object"}
for _ in range(25):
    DEEP = {"properties": {"a": DEEP}}

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}

TOOL = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("response_format", {"type": "json_object"}, "json_object", True),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            "json",
            dumps(SCHEMA, separators=(",", ":")),
        ),
        ("structured_outputs", {"json": SCHEMA}, "json", dumps(SCHEMA, separators=(",", ":"))),
        (
            "structured_outputs",
            {"regex": "a+", "choice": None, "disable_any_whitespace": False},
            "regex",
            "a+",
        ),
        ("guided_json", dumps(DEEP), "json", dumps(DEEP, separators=(",", ":"))),
        ("guided_regex", "[0-9]", "regex", "[0-9]"),
        ("guided_choice", ["yes", "no"], "choice", ("yes", "no")),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_a_row_asks_for_a_form_in_the_usual_ways(make, key, value, field, expected):
    form = accepted(make(**{key: value})).params.structured_outputs
    assert form is not None and getattr(form, field) == expected
    given = [getattr(form, name) for name in ("json", "json_object", "regex", "choice")]
    assert given.count(None) == 3


def test_a_row_may_ask_for_text():
    row = accepted(chat(response_format={"type": "text"}))
    assert row.params.structured_outputs is None


def test_the_order_of_keys_makes_another_form():
    schemas = [SCHEMA, {**SCHEMA, "properties": {"a": {}, "b": {}}}, SCHEMA]
    one, other, same = (
        accepted(chat(guided_json=s)).params.structured_outputs.fingerprint for s in schemas
    )
    assert one == same != other
    hashes = [accepted(chat(guided_json=s)).request_hash for s in schemas]
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": "text"}, "response_format", "expected an object with the type"),
        ({"response_format": {}}, "response_format", "expected an object with the type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "the keys type"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema: expected an object with a schema, got none",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format",
            "the keys name, description, schema, strict, got 'x'",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": "yes"},
                }
            },
            "response_format",
            "strict: expected bool, got 'yes'",
        ),
        ({"structured_outputs": []}, "structured_outputs", "expected an object"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, json_object, regex"),
        ({"structured_outputs": {"grammar": 1}}, "structured_outputs", "expected rules as text"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs",
            "not supported here",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs",
            "disable_any_whitespace is not supported here",
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "min_tokens": 2},
            "min_tokens",
            "none beside tool_choice, which decides",
        ),
        (
            {"guided_regex": "a", "max_tokens": 0, "prompt_logprobs": 0},
            "guided_regex",
            "guided_regex: expected none",
        ),
        ({"structured_outputs": {"json": {}, "regex": "x"}}, "structured_outputs", "one of json"),
        ({"guided_json": "{"}, "guided_json", "guided_json: expected a JSON Schema"),
        ({"guided_json": '"text"'}, "guided_json", "object, true or false), got 'text'"),
        ({"guided_json": [1]}, "guided_json", "object, true or false), got [1]"),
        ({"guided_regex": 1}, "guided_regex", "guided_regex: expected a pattern, got 1"),
        ({"guided_choice": []}, "guided_choice", "expected a list of texts"),
        ({"guided_choice": "yes"}, "guided_choice", "expected a list of texts"),
        ({"guided_choice": [""]}, "guided_choice", "expected a list of texts"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "none beside guided_json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "none beside guided_regex"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "none beside guided_regex"),
    ],
)
def test_a_wrong_form_is_refused_by_key(body, param, message):
    error = refused(chat(**body)).error
    assert (error.param, message in error.message) == (param, True), error.message
    assert f"{param}.{param}" not in error.message
