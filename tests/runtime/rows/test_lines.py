"""Lines to rows: every valid form, every invalid form with its code, and no exception."""

import io
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.runtime.errors import RowError
from noria.runtime.files import strict_json
from noria.runtime.files.strict_json import Line, dump_line, parse_object, read_lines
from noria.runtime.request import SampleRule
from noria.runtime.rows.lines import BadRow, BatchRow, RequestRules, hash_request, read_row
from noria.runtime.rows.scan import scan

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def read(record, row=0):
    content = record if isinstance(record, bytes) else json.dumps(record).encode()
    return read_row(Line(row + 1, 0, content), row)


def chat(**body):
    return envelope({**CHAT, **body}, "/v1/chat/completions")


def completion(**body):
    return envelope({"prompt": "hi", **body}, "/v1/completions")


def envelope(body, url):
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def accepted(record) -> BatchRow:
    row = read(record)
    assert isinstance(row, BatchRow), row
    return row


def refused(record) -> BadRow:
    row = read(record)
    assert isinstance(row, BadRow), row
    return row


def code_of(content: bytes) -> str:
    with pytest.raises(RowError) as caught:
        parse_object(content)
    return caught.value.code


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"1", b"null", b'"a"', b'{"a":1,}', b'{"a":NaN}', b'{"a":-Infinity}',
        b'{"a":1e999}', b'{"a":1,"a":2}', b'{"b":[{"a":1,"a":1}]}', b'{"a":"\\ud800"}',
        b'{"\\udfff":1}', b'{"a":"\0"}', b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", b"\xef\xbb\xbf{}", b"{} {}",
    ],
)  # fmt: skip
def test_what_is_not_strict_json_is_refused(content):
    assert code_of(content) == "invalid_json"


def test_invalid_utf8_has_its_own_code():
    assert code_of(b'{"a":"\xff"}') == "invalid_utf8"
    assert code_of(b'{"a":"\xed\xa0\x80"}') == "invalid_utf8"


def test_strict_json_takes_all_of_json():
    value = parse_object(b'{"a":"\\u0000\\ud83d\\ude00 \xe2\x80\xa8","b":[1.5,-2,true,null]}')
    assert value == {"a": "\0\U0001f600 \u2028", "b": [1.5, -2, True, None]}
    assert parse_object(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}")


def test_a_written_line_is_one_line_for_every_reader():
    text = "a\u2028b\u2029c\x85d\re\nf\x0bg\x1ch é"
    line = dump_line({"a": text}).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {"a": text}


def test_lines_survive_bom_crlf_blank_lines_and_a_missing_last_newline():
    content = b"\xef\xbb\xbf{1}\r\n\r\n  \n{2}\n{3}"
    seen = []
    lines = list(read_lines(io.BytesIO(content), observe=seen.append))
    assert [(line.number, line.content) for line in lines] == [
        (1, b"{1}"),
        (4, b"{2}"),
        (5, b"{3}"),
    ]
    assert b"".join(seen) == content
    assert content[lines[1].offset :].startswith(b"{2}")


def test_a_line_over_the_limit_is_skipped_without_being_held(monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_LINE_BYTES", 10)
    content = b"a" * 10 + b"\r\n" + b"b" * 11 + b"\n" + b"c" * 50 + b"\nd\n"
    lines = list(read_lines(io.BytesIO(content)))
    assert [line.content for line in lines] == [b"a" * 10, None, None, b"d"]
    assert [line.offset for line in lines] == [0, 12, 24, 75]


def test_a_line_of_ten_megabytes_is_a_row():
    row = accepted({"prompt": "x" * 10_000_000})
    assert row.prompt is not None and len(row.prompt) == 10_000_000


def test_both_spellings_of_a_request_have_one_hash_whatever_the_key_order():
    simple = accepted({"temperature": 0, "prompt": "hi"})
    assert simple.custom_id == "row-0"
    assert simple.request_hash == accepted(completion(temperature=0)).request_hash
    assert simple.request_hash == hash_request(
        "/v1/completions", {"prompt": "hi", "temperature": 0}
    )
    assert simple.request_hash != accepted(completion(temperature=1)).request_hash


def test_every_supported_key_reaches_the_sampling_parameters():
    values = {
        "n": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
        "temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3, "ignore_eos": True,
        "min_tokens": 2, "skip_special_tokens": False, "include_stop_str_in_output": True,
        "max_tokens": 9, "prompt_logprobs": 2,
    }  # fmt: skip
    row = accepted(
        chat(**values, stop="x", stop_token_ids=[7], logit_bias={"5": -1.5}, user="u",
             metadata={"k": "v"}, store=False, stream=False, response_format={"type": "text"},
             chat_template_kwargs={"enable_thinking": False}, model="m", tools=None)
    )  # fmt: skip
    for name, value in values.items():
        assert getattr(row.params, name) == value
    assert row.params.stop == ("x",) and row.params.stop_token_ids == (7,)
    assert row.params.logit_bias == {5: -1.5}
    assert row.model == "m" and row.chat_template_kwargs == {"enable_thinking": False}


def test_max_completion_tokens_wins_and_errors_name_the_key_that_was_written():
    assert accepted(chat(max_tokens=5, max_completion_tokens=7)).params.max_tokens == 7
    assert accepted(chat()).params.max_tokens is None
    error = refused(chat(max_completion_tokens=10**12)).error
    assert error.param == "max_completion_tokens" and "max_completion_tokens" in error.message


def test_logprobs_mean_a_switch_in_chat_and_a_number_in_completions():
    assert accepted(chat(logprobs=True, top_logprobs=3)).params.logprobs == 3
    assert accepted(chat(logprobs=True)).params.logprobs == 0
    assert accepted(chat(logprobs=False)).params.logprobs is None
    assert accepted(completion(logprobs=4)).params.logprobs == 4
    assert refused(chat(top_logprobs=3)).error.code == "invalid_request"
    assert refused(chat(logprobs=3)).error.code == "invalid_request"
    assert refused(completion(logprobs=True)).error.code == "invalid_request"


def test_scoring_is_echo_with_no_new_tokens():
    row = accepted(completion(prompt=[1, 2], echo=True, max_tokens=0, logprobs=1))
    assert row.kind == "score" and row.prompt_token_ids == [1, 2]
    assert (row.params.max_tokens, row.params.prompt_logprobs, row.params.logprobs) == (0, 1, None)
    row = accepted(completion(echo=True, max_tokens=4, logprobs=2))
    assert row.kind == "completion"
    assert row.params.prompt_logprobs == row.params.logprobs == 2
    assert accepted(completion(echo=True, max_tokens=4)).params.prompt_logprobs is None


def test_defaults_fill_only_what_a_request_leaves_out():
    line = Line(1, 0, b'{"prompt": "x", "top_k": 3}')
    row = read_row(line, 0, RequestRules({"temperature": 0.2, "top_k": 20}))
    assert isinstance(row, BatchRow)
    assert (row.params.temperature, row.params.top_k) == (0.2, 3)


def test_text_parts_are_for_the_template_and_other_parts_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert accepted(chat(messages=messages)).messages == messages
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    error = refused(chat(messages=[{"role": "user", "content": picture}])).error
    assert "image_url" in error.message


def test_messages_with_tool_calls_are_for_the_template():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    asked, answered = accepted(chat(messages=turns)).messages
    assert asked["tool_calls"][0]["function"]["arguments"] == '{"x": 1}' and "refusal" not in asked
    assert answered == turns[1]


def user(content):
    return [{"role": "user", "content": content}]


BAD_ROWS = [
    ("not json", b"{oops", "invalid_json"),
    ("not utf-8", b'{"prompt":"\xff"}', "invalid_utf8"),
    ("duplicate keys", b'{"prompt":"a","prompt":"b"}', "invalid_json"),
    ("lone surrogate", b'{"prompt":"\\ud800"}', "invalid_json"),
    ("deep", b'{"prompt":' + b"[" * 100_000, "invalid_json"),
    ("NaN", b'{"prompt":"a","temperature":NaN}', "invalid_json"),
    ("overflow", b'{"prompt":"a","temperature":1e999}', "invalid_json"),
    ("no id", {k: v for k, v in completion().items() if k != "custom_id"}, "missing_custom_id"),
    ("empty id", {**completion(), "custom_id": ""}, "missing_custom_id"),
    ("number id", {**completion(), "custom_id": 5}, "missing_custom_id"),
    ("two ids", {"id": "a", "custom_id": "b", "prompt": "x"}, "missing_custom_id"),
    ("GET", {**completion(), "method": "GET"}, "invalid_request"),
    ("no method", {k: v for k, v in completion().items() if k != "method"}, "invalid_request"),
    ("unknown url", {**completion(), "url": "/v1/responses"}, "unsupported_url"),
    ("no body", {**completion(), "body": None}, "invalid_request"),
    ("extra in envelope", {**completion(), "priority": 1}, "unknown_parameter"),
    ("nothing to do", {"custom_id": "x"}, "invalid_line"),
    ("prompt and messages", {"prompt": "x", **CHAT}, "invalid_line"),
    ("stream", chat(stream=True), "invalid_request"),
    ("no messages", chat(messages=[]), "invalid_request"),
    ("null messages", chat(messages=None), "invalid_request"),
    ("message is text", chat(messages=["hi"]), "invalid_request"),
    ("no role", chat(messages=[{"content": "x"}]), "invalid_request"),
    ("wrong role", chat(messages=[{"role": "robot", "content": "x"}]), "invalid_request"),
    ("role is a list", chat(messages=[{"role": [], "content": "x"}]), "invalid_request"),
    ("null content", chat(messages=user(None)), "invalid_request"),
    ("number content", chat(messages=user(3)), "invalid_request"),
    ("no parts", chat(messages=user([])), "invalid_request"),
    ("part is text", chat(messages=user(["x"])), "invalid_request"),
    ("wrong name", chat(messages=[{**user("x")[0], "name": 3}]), "invalid_request"),
    ("wrong key", chat(messages=[{**user("x")[0], "contents": "x"}]), "unknown_parameter"),
    ("no content", chat(messages=[{"role": "user", "tool_calls": []}]), "invalid_request"),
    ("empty prompt", completion(prompt=""), "empty_prompt"),
    ("no tokens", completion(prompt=[]), "empty_prompt"),
    ("null prompt", completion(prompt=None), "invalid_request"),
    ("prompt is an object", completion(prompt={}), "invalid_request"),
    ("list of prompts", completion(prompt=["a", "b"]), "invalid_request"),
    ("list of lists", completion(prompt=[[1]]), "invalid_request"),
    ("negative token", completion(prompt=[1, -1]), "invalid_token_id"),
    ("enormous token", completion(prompt=[2**70]), "invalid_token_id"),
    ("float token", completion(prompt=[1.0]), "invalid_token_id"),
    ("bool token", completion(prompt=[True]), "invalid_token_id"),
    ("temperature", completion(temperature=-0.1), "invalid_request"),
    ("text temperature", completion(temperature="0.5"), "invalid_request"),
    ("bool n", completion(n=True), "invalid_request"),
    ("n 0", completion(n=0), "invalid_request"),
    ("n 10^6", completion(n=10**6), "invalid_request"),
    ("top_p 0", completion(top_p=0), "invalid_request"),
    ("top_p 1.1", completion(top_p=1.1), "invalid_request"),
    ("top_k -2", completion(top_k=-2), "invalid_request"),
    ("min_p", completion(min_p=1.5), "invalid_request"),
    ("max_tokens 0", completion(max_tokens=0), "invalid_request"),
    ("max_tokens -1", completion(max_tokens=-1), "invalid_request"),
    ("max_tokens 10^12", completion(max_tokens=10**12), "invalid_request"),
    ("max_tokens 1.5", completion(max_tokens=1.5), "invalid_request"),
    ("max_tokens false", completion(max_tokens=False), "invalid_request"),
    ("int over 2^63", completion(max_tokens=2**64), "invalid_request"),
    ("seed 2^64", completion(seed=2**64), "invalid_request"),
    ("logprobs", completion(logprobs=21), "invalid_request"),
    ("top_logprobs", chat(logprobs=True, top_logprobs=21), "invalid_request"),
    ("prompt_logprobs", completion(prompt_logprobs=-1), "invalid_request"),
    ("empty stop", completion(stop=""), "invalid_request"),
    ("many stops", completion(stop=["x"] * 10**5), "invalid_request"),
    ("number stop", completion(stop=5), "invalid_request"),
    ("mixed stops", completion(stop=["a", 1]), "invalid_request"),
    ("stop ids", completion(stop_token_ids=5), "invalid_request"),
    ("stop ids text", completion(stop_token_ids=["5"]), "invalid_request"),
    ("logit_bias list", completion(logit_bias=[1]), "invalid_request"),
    ("logit_bias key", completion(logit_bias={"a": 1}), "invalid_request"),
    ("logit_bias sign", completion(logit_bias={"-5": 1}), "invalid_request"),
    ("logit_bias range", completion(logit_bias={"5": 101}), "invalid_request"),
    ("logit_bias twice", completion(logit_bias={"5": 1, "05": 1}), "invalid_request"),
    ("echo text", completion(echo="yes"), "invalid_request"),
    ("echo in chat", chat(echo=True), "unknown_parameter"),
    ("score without logprobs", completion(echo=True, max_tokens=0), "invalid_request"),
    ("model", completion(model=5), "invalid_request"),
    ("template kwargs", chat(chat_template_kwargs=[]), "invalid_request"),
    ("template kwargs elsewhere", completion(chat_template_kwargs={}), "unknown_parameter"),
    ("typo", completion(max_token=5), "unknown_parameter"),
    ("best_of", completion(best_of=2), "unknown_parameter"),
    ("suffix", completion(suffix="x"), "unknown_parameter"),
    ("tools", chat(tools=[]), "invalid_request"),
    ("tools of a completion", completion(tools=[]), "unknown_parameter"),
    ("functions", chat(functions=[]), "unknown_parameter"),
    ("temperature 1e-21", completion(temperature=1e-21), "invalid_request"),
    ("temperature 1e21", completion(temperature=1e21), "invalid_request"),
    ("top_p 1e-21", completion(top_p=1e-21), "invalid_request"),
    ("repetition_penalty 1e-11", completion(repetition_penalty=1e-11), "invalid_request"),
    ("repetition_penalty 1e11", completion(repetition_penalty=1e11), "invalid_request"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "code"), [case[1:] for case in BAD_ROWS],
                         ids=[case[0] for case in BAD_ROWS])  # fmt: skip
def test_a_bad_row_has_the_code_of_its_fault(record, code):
    assert refused(record).error.code == code


def test_a_typo_is_answered_with_the_key_that_was_meant():
    error = refused(completion(max_token=5)).error
    assert error.param == "max_token" and "Did you mean 'max_tokens'?" in error.message


RULE = {"answer": r"answer is (\d+)", "stop_when": 3, "probe_every": 16, "probes": 2,
        "keep": "majority"}  # fmt: skip


@pytest.mark.parametrize("make", [chat, completion])
def test_a_rule_for_samples_reaches_the_sampling_parameters(make):
    assert accepted(make(n=5, noria=RULE)).params.stopping == SampleRule(**RULE)
    assert accepted(make(n=5, noria=None)).params.stopping is None
    alone = {"answer": "x", "probe_every": 16, "probes": 2, "stop_when": None}
    assert accepted(make(n=1, noria=alone)).params.stopping == SampleRule(**alone)
    assert accepted(make(n=2, noria={"keep": "best"})).params.stopping == SampleRule(keep="best")


@pytest.mark.parametrize(
    ("rule", "body", "param", "message"),
    [
        ([], {}, "noria", "noria: expected an object, got []."),
        ({}, {}, "noria.answer", "noria.answer: expected a regular expression, got none."),
        ({"stop_whn": 3}, {}, "noria.stop_whn", "noria: 'stop_whn' is not a known parameter. Did "
         "you mean 'stop_when'?"),
        ({"answer": 5}, {}, "noria.answer", "noria.answer: expected a regular expression, got 5."),
        ({"answer": "("}, {}, "noria.answer", "noria.answer: expected a regular expression of "
         "Python's re, got '(' (missing )"),
        ({"answer": "(a+)+b"}, {}, "noria.answer", "Bound its repeats as in"),
        ({"answer": "(a)(b)"}, {}, "noria.answer", "at most one group, got 2"),
        ({"stop_when": 1}, {}, "noria.stop_when", "expected an integer from 2 to 128, got 1."),
        ({"stop_when": 4}, {}, "noria.stop_when", "noria.stop_when: expected at most n (3), got 4"),
        ({"stop_when": True}, {}, "noria.stop_when", "expected an integer, got True."),
        ({"probes": 2}, {}, "noria.probe_every", "expected an integer beside probes, got none."),
        ({"probe_every": 8}, {}, "noria.probes", "expected an integer beside probe_every, got"),
        ({"probe_every": 0, "probes": 1}, {}, "noria.probe_every", "an integer from 1 to"),
        ({"keep": "first"}, {}, "noria.keep", "expected one of all, majority, best, got 'first'."),
        ({"answer": None, "keep": "majority"}, {}, "noria.answer", "got none."),
        ({}, {"n": 1, "noria": {"answer": "x"}}, "noria", "noria: expected n of at least 2, as a "
         "single sample has nothing to agree with, got n = 1. Raise n"),
        ({}, {"max_tokens": 0, "noria": {"answer": "x"}, "prompt_logprobs": 0}, "noria",
         "noria: expected no scored prompt beside it, got one. Score the prompt in a row of its"),
        ({}, {"prompt_logprobs": 1, "noria": {"answer": "x"}}, "noria", "no scored prompt"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_refused_by_key(rule, body, param, message):
    if rule and isinstance(rule, dict):
        rule = {"answer": "x", **rule}
    error = refused(completion(**{"n": 3, "noria": rule, **body})).error
    assert error.param == param, error.message
    assert message in error.message
    is_unknown = "not a known" in message
    assert error.code == ("unknown_parameter" if is_unknown else "invalid_request")


def test_an_echoed_prompt_with_logprobs_is_refused_beside_a_rule():
    rule = {"n": 2, "noria": {"answer": "x"}, "echo": True}
    assert accepted(completion(**rule)).params.stopping is not None
    assert refused(completion(**rule, logprobs=1)).error.param == "noria"


HUGE = {f"key {i}": {"type": "string", "enum": ["x" * 100] * 10} for i in range(1000)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("structural_tag", {"structures": []}),
        ("json_schema", "{" * 100_000),
        ("grammar", "root ::= root"),
        ("regex", "["),
        ("ebnf", "root ::= "),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_a_form_that_is_not_supported_is_refused_with_the_remedy(make, key, value):
    error = refused(make(**{key: value})).error
    assert (error.code, error.param) == ("unknown_parameter", key)
    assert f"{key!r} is not supported here" in error.message
    assert "Give response_format" in error.message and len(error.message) < 200


@pytest.mark.parametrize("key", ["tools", "tool_choice", "parallel_tool_calls", "functions"])
def test_a_row_that_brings_no_tools_of_the_standard_is_refused_with_the_remedy(key):
    error = refused(chat(**{key: [HUGE]})).error
    assert error.param == key and len(error.message) < 300
    error = refused(completion(**{key: [HUGE]})).error
    assert error.param == key and "is not supported here" in error.message


@pytest.mark.parametrize(
    "record",
    [
        completion(**{"x" * 10**6: 1}),
        {**completion(), "x" * 10**6: 1},
        chat(messages=[{"role": "user", "content": ["x" * 10**6]}]),
        completion(temperature="x" * 10**6),
        completion(stop=["x", ["y" * 10**6]]),
        chat(messages=[{"role": ["x" * 10**6], "content": "x"}]),
    ],
    ids=["key", "key of the line", "part of a message", "number", "stop", "role"],
)
def test_an_error_shows_the_beginning_of_a_long_value(record):
    error = refused(record).error
    assert len(error.message) < 300 and len(error.param or "") < 150


def test_a_line_that_cannot_be_read_is_named_by_its_number():
    row = read(b"{", row=6)
    assert isinstance(row, BadRow) and row.custom_id is None
    assert row.error.message.startswith("line 7: ")


def test_a_simple_line_may_have_a_number_for_its_id():
    for number in (7, 0, -3, 2**63):
        assert accepted({"id": number, "prompt": "x"}).custom_id == str(number)
    lines = [b'{"id":7,"prompt":"x"}', b'{"id":"7","prompt":"x"}']
    summary = scan(io.BytesIO(b"\n".join(lines)), lambda rows: [[1]] * len(rows))
    assert [row.bad and row.bad.error.code for row in summary.rows] == [
        None,
        "duplicate_custom_id",
    ]
    for value in (True, 7.0, [7], ""):
        error = refused({"id": value, "prompt": "x"}).error
        assert "id: expected a string that is not empty, or an integer, got" in error.message


def test_the_first_of_several_rows_with_one_id_counts_even_when_it_is_bad():
    lines = [b'{"id":"a","prompt":""}', b'{"id":"a","prompt":"x"}', b'{"prompt":"y"}',
             b'{"id":"row-2","prompt":"z"}']  # fmt: skip
    summary = scan(io.BytesIO(b"\n".join(lines)), lambda rows: [[1]] * len(rows))
    codes = [row.bad and row.bad.error.code for row in summary.rows]
    assert codes == ["empty_prompt", "duplicate_custom_id", None, "duplicate_custom_id"]
    assert len(summary.requirements) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
known_keys = st.sampled_from(
    ["prompt", "messages", "n", "stop", "logit_bias", "logprobs", "top_logprobs", "echo", "seed",
     "max_tokens", "stop_token_ids", "temperature", "chat_template_kwargs", "response_format",
     "metadata", "model", "stream", "min_tokens", "prompt_logprobs", "custom_id", "id", "body",
     "noria"]
)  # fmt: skip
bodies = st.dictionaries(known_keys | st.text(), json_values, max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.binary() | bodies.map(lambda b: json.dumps(b).encode()))
def test_no_bytes_raise_anything_but_a_row_error(content):
    row = read(content)
    assert isinstance(row, BatchRow | BadRow)
    assert row.custom_id is None or row.custom_id.encode("utf-8")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([chat, completion]), bodies)
def test_no_body_raises_anything_but_a_row_error(make, body):
    row = read(make(**body))
    if isinstance(row, BatchRow):
        assert math.isfinite(row.params.temperature)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_parsing_gives_what_can_be_written_again_or_a_row_error(content):
    try:
        value = parse_object(content)
    except RowError as error:
        assert error.code in ("invalid_json", "invalid_utf8")
    else:
        assert parse_object(dump_line(value)) == value


def test_unknown_keys_of_a_body_are_ignored_if_that_is_asked_for():
    def read(ignores_unknown: bool = True, **body):
        content = json.dumps({"id": "a", "prompt": "x", **body}).encode()
        return read_row(Line(1, 0, content), 0, RequestRules(ignores_unknown=ignores_unknown))

    row = read(label=3, temprature=1, n=2)
    assert isinstance(row, BatchRow)
    assert row.ignored == ("label", "temprature") and row.params.n == 2
    # a key that noria knows and cannot follow would change the answer
    for key in ("functions", "structural_tag"):
        assert isinstance(read(**{key: 1}), BadRow)
    assert isinstance(read(ignores_unknown=False, label=3), BadRow)
