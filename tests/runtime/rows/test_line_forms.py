"""Lines of other services and lines that cannot be read: spellings, ids and messages."""

import io
import json

import pytest

from noria.runtime.files.strict_json import Line
from noria.runtime.rows.lines import BadRow, BatchRow, read_row
from noria.runtime.rows.scan import scan
from noria.runtime.stages.stage_rows import read_rows

BODY = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 2}


def read(content: bytes) -> BatchRow | BadRow:
    return read_row(Line(3, 0, content), 2)


def envelope(**changes) -> bytes:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    return json.dumps(line | changes).encode()


def accepted(content: bytes) -> BatchRow:
    row = read(content)
    assert isinstance(row, BatchRow), row
    return row


def refused(content: bytes) -> BadRow:
    row = read(content)
    assert isinstance(row, BadRow), row
    return row


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com/v1/chat/completions",
        "https://example.com/openai/v1/chat/completions?api-version=2",
        "/chat/completions",
        "/v1/chat/completions/",
    ],
)
def test_services_spell_one_endpoint_in_several_ways(url):
    row = accepted(envelope(url=url))
    assert row.kind == "chat" and row.request_hash == accepted(envelope()).request_hash


@pytest.mark.parametrize(
    "url", ["/v1/chat/completions/x", "/v1/responses", "https://a.b/", "", "/", None, 3, ["/v1"]]
)
def test_another_url_is_refused(url):
    assert refused(envelope(url=url)).error.code == "unsupported_url"


def test_a_pooled_endpoint_has_its_spellings_too():
    body = {"query": "a", "documents": ["b"]}
    for url in ("/v2/rerank", "/rerank", "https://a.b/v1/rerank/", "https://a.b/v2/rerank"):
        assert accepted(envelope(url=url, body=body)).kind == "pooled"
    assert accepted(envelope(url="/embeddings", body={"input": "a"})).kind == "pooled"


def test_a_method_may_be_in_small_letters():
    assert accepted(envelope(method="post")).request_hash == accepted(envelope()).request_hash


ANSWER = {"role": "assistant", "content": "Red."}
NULLS = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None}


def test_an_answer_as_the_client_of_openai_dumps_it_is_history():
    dumped = {**ANSWER, **NULLS, "annotations": [], "parsed": {"colour": "red"}}
    row = accepted(envelope(body={"messages": [*BODY["messages"], dumped]}))
    assert row.messages is not None and row.messages[1] == ANSWER
    served = {**ANSWER, **NULLS, "annotations": None, "tool_calls": [], "reasoning": None}
    row = accepted(envelope(body={"messages": [*BODY["messages"], served]}))
    assert row.messages is not None and row.messages[1] == ANSWER
    reasoned = {**ANSWER, "reasoning_content": "They want a colour."}
    row = accepted(envelope(body={"messages": [*BODY["messages"], reasoned]}))
    assert row.messages is not None and reasoned.items() <= row.messages[1].items()


def test_keys_of_messages_and_lines_that_are_unknown_are_named_at_once():
    messages = [{**ANSWER, "zeta": 1, "audio": {"id": "x"}}, {**ANSWER, "contents": "x"}]
    error = refused(envelope(body={"messages": messages})).error
    assert (error.code, error.param) == ("unknown_parameter", "messages[0].zeta")
    for place in ("messages[0]: 'zeta'", "messages[0]: 'audio'", "messages[1]: 'contents'"):
        assert place in error.message
    error = refused(envelope(priority=1, label="x")).error
    assert "'priority'" in error.message and "'label'" in error.message
    wrong = refused(envelope(body={"messages": [{**ANSWER, "reasoning": 3}]})).error
    assert "messages[0].reasoning: expected a string" in wrong.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"// a comment", "a comment. Remove it, as JSON has none."),
        (b"  # a comment", "a comment. Remove it"),
        (b'{"prompt":"a","max_tokens":2},', "a comma after it. Remove the comma."),
        (b'{"prompt":"a"}  , ', "a comma after it. Remove the comma."),
        (b'\x1e{"prompt":"b"}', r"a record separator (RFC 7464). Remove it, as tr -d '\036'"),
        (b"{'prompt': 'c'}", "Python's quotes. Write the object with json.dumps."),
        (b'{"prompt":"a"} {"prompt":"b"}', "more after it at character 15. Keep one, or write"),
        (b"{oops", "Expecting property name enclosed in double quotes at character 1."),
    ],
)
def test_a_line_in_a_notation_like_json_is_named(content, message):
    error = refused(content).error
    assert error.code == "invalid_json"
    assert error.message.startswith(("line 3: expected a JSON object, got ",
                                     "line 3: expected one JSON object, got "))  # fmt: skip
    assert message in error.message


@pytest.mark.parametrize(
    "content",
    [
        b'{"custom_id": "r1", "method": "POST"},',
        b'{"custom_id": "r1", "method": "PO',
        b'\x1e{"custom_id": "r1"}',
        b'  {"id":"r1","prompt":"a","temperature":NaN}',
        b'{"custom_id": "r1", "body": {"a": 1, "a": 2}}',
        b'{"custom_id": "r1", "prompt": "\xff"}',
        b'{"custom_id": "r\\u0031", oops}',
    ],
)
def test_a_line_that_cannot_be_read_keeps_the_id_at_its_beginning(content):
    row = refused(content)
    assert row.custom_id == "r1" and row.error.message.startswith("line 3: ")
    (row,) = read_rows(io.BytesIO(content))
    assert row.custom_id == "r1"


@pytest.mark.parametrize(
    "content",
    [
        b'{"custom_id": "", oops}',
        b'{"custom_id": "\\ud800", oops}',
        b'{"custom_id": "\xff", oops}',
        b'{"custom_id": "a\\x", oops}',
        b'{"custom_id": "unended',
        b'{"custom_id": "\0a", oops}',
        b'{"body": {"custom_id": "r1"}, oops}',
    ],
)
def test_an_id_that_cannot_be_read_is_none(content):
    assert refused(content).custom_id is None


def test_a_line_that_cannot_be_read_keeps_its_id_from_later_lines():
    lines = [b'{"id":"a","prompt":"x"},', b'{"id":"a","prompt":"x"}', b'{"id":"b","prompt":"x"}']
    summary = scan(io.BytesIO(b"\n".join(lines)), lambda rows: [[1]] * len(rows))
    codes = [row.bad and row.bad.error.code for row in summary.rows]
    assert codes == ["invalid_json", "duplicate_custom_id", None]
