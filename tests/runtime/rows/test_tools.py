"""Tools of chat rows: their forms, the calls in answers, and the errors of wrong ones."""

import json
import time

import pytest

from noria.runtime.files.strict_json import Line
from noria.runtime.request import CompletionOutput, RequestOutput
from noria.runtime.rows.lines import BadRow, BatchRow, read_row
from noria.runtime.rows.results import OutputLines
from noria.runtime.rows.tools import ToolCall
from noria.runtime.structured.byte_automaton import compile_language
from noria.runtime.structured.form_compiler import read_form

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "$defs": {"unit": {"enum": ["C", "F"]}},
            "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city"],
        },
        "strict": True,
    },
}
TEXT = {"type": "string"}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
LINES = OutputLines(model_name="m", fingerprint="f")


def read(**body):
    record = {"id": "r", "messages": [{"role": "user", "content": "hi"}], **body}
    return read_row(Line(1, 0, json.dumps(record).encode()), 0)


def accepted(**body) -> BatchRow:
    row = read(tools=[WEATHER, NOW], **body)
    assert isinstance(row, BatchRow), row
    return row


def accepts(row: BatchRow, text: str) -> bool:
    assert row.params.structured_outputs is not None
    return compile_language(read_form(row.params.structured_outputs).language).accepts(
        text.encode()
    )


def choice_of(row: BatchRow, text: str, reason: str = "stop") -> dict:
    completion = CompletionOutput(0, text, [1], reason)
    line = LINES.result(row, RequestOutput("r", None, [1], [completion]))
    (choice,) = line["response"]["body"]["choices"]
    return choice


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_model_that_may_choose_has_no_form(choice):
    row = accepted(tool_choice=choice)
    assert row.params.structured_outputs is None and row.tools is not None
    assert row.tools.tools == (WEATHER, NOW)


def test_a_named_tool_has_the_form_of_its_arguments():
    row = accepted(tool_choice=NAMED)
    assert accepts(row, '{"city": "Rome", "unit": "C"}') and accepts(row, '{"city": ""}')
    assert not accepts(row, '{"unit": "C"}') and not accepts(row, '{"city": "Rome", "unit": "K"}')
    row = accepted(tool_choice={"type": "function", "function": {"name": "now"}})
    assert accepts(row, "{}") and not accepts(row, '{"a": 1}')


def test_required_tools_have_the_form_of_a_list_of_calls():
    row = accepted(tool_choice="required")
    weather = '{"name": "weather", "parameters": {"city": "Rome", "unit": "F"}}'
    now = '{"name": "now", "parameters": {}}'
    for text in (f"[{weather}]", f"[{now}]", f"[{now}, {weather}]"):
        assert accepts(row, text)
    for text in ("[]", weather, '[{"name": "other", "parameters": {}}]', f"[{now[:-1]}]"):
        assert not accepts(row, text)
    row = accepted(tool_choice="required", parallel_tool_calls=False)
    assert accepts(row, f"[{now}]") and not accepts(row, f"[{now}, {weather}]")


def test_forced_calls_stand_in_the_output_line():
    choice = choice_of(accepted(tool_choice=NAMED), '{"city": "Rome"}')
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert choice["message"]["content"] is None and choice["finish_reason"] == "stop"
    text = '[{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city": "é"}}]'
    choice = choice_of(accepted(tool_choice="required"), text)
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ["{}", '{"city": "é"}']
    assert calls[0]["id"] != calls[1]["id"] and choice["finish_reason"] == "tool_calls"
    assert choice == choice_of(accepted(tool_choice="required"), text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
            '</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
            "Let me see.",
            [ToolCall("weather", '{"city": "Rome"}'), ToolCall("now", "{}")],
        ),
        ('{"name": "now", "parameters": {}}', None, [ToolCall("now", "{}")]),
        ('[{"name": "now", "arguments": {}}]', None, [ToolCall("now", "{}")]),
        ("It rains.", "It rains.", []),
        ('{"name": "Rome"}', '{"name": "Rome"}', []),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ("<tool_call>{a}</tool_call>", "<tool_call>{a}</tool_call>", []),
        ('{"name": "now", "arguments": {"": NaN}}', '{"name": "now", "arguments": {"": NaN}}', []),
        ("[1]", "[1]", []),
        ("[]", "[]", []),
        ("", "", []),
    ],
)
def test_free_calls_are_found_in_the_usual_notations(text, content, calls):
    row = accepted()
    assert row.tools is not None and row.tools.read(text) == (content, calls)
    choice = choice_of(row, text)
    assert choice["message"]["content"] == content
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert ("tool_calls" in choice["message"]) == bool(calls)


def test_many_calls_are_read_in_a_time_that_grows_with_their_number():
    row, num_calls = accepted(), 60_000
    text = ", ".join(['{"name": "now", "arguments": {"city": "Rome"}}'] * num_calls)
    start = time.process_time()
    assert row.tools is not None
    assert row.tools.read(f"[{text}]") == (None, [ToolCall("now", '{"city": "Rome"}')] * num_calls)
    assert time.process_time() - start < 4


def test_arguments_stay_as_they_were_generated():
    shown = ['{"a":0.1234567890123456789 , "b": 1E2}', "{ }", r'{"c": "\u00e9 \ud800", "d": [{}]}']
    calls = [f'{{"name": "now" ,"parameters":{text}, "x": []}}' for text in shown]
    texts = [f"[ {calls[0]},{calls[1]} , {calls[2]} ]\n"]
    texts.append("".join(f"<tool_call>{call}</tool_call>" for call in calls))
    for choice in ("auto", "required"):
        row = accepted(tool_choice=choice)
        for text in texts:
            assert row.tools is not None
            assert row.tools.read(text) == (None, [ToolCall("now", given) for given in shown])


def test_only_the_first_free_call_is_kept_without_parallel_calls():
    text = '[{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {}}]'
    row = accepted(parallel_tool_calls=False)
    assert row.tools is not None and row.tools.read(text) == (None, [ToolCall("now", "{}")])


def test_the_order_of_keys_in_tools_makes_another_request():
    function = NOW["function"] | {"description": "The time."}
    turned = {"description": "The time."} | NOW["function"]
    hashes = []
    for shown in (function, turned, function):
        row = read(tools=[{"type": "function", "function": shown}])
        assert isinstance(row, BatchRow)
        hashes.append(row.request_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    assert accepted().request_hash == accepted().request_hash


def test_an_answer_that_was_cut_or_may_have_no_calls_stays_text():
    call = '{"name": "now", "parameters": {}}'
    assert "tool_calls" not in choice_of(accepted(), call, "length")["message"]
    assert choice_of(accepted(tool_choice="none"), call)["message"]["content"] == call


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": []}, "tools", "a list of tools that is not empty"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0]: expected an object with the type"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools",
            "function.name: expected 1 to",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]},
            "tools",
            "name, description, parameters, strict, got 'x'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools",
            "parameters: expected a JSON Schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": TEXT}}]},
            "tools",
            "parameters.type: expected object, as",
        ),
        ({"tools": [NOW, NOW]}, "tools", "tools of different names"),
        ({"tool_choice": "auto"}, "tool_choice", "expected tools beside it"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "none, auto, required, or an obj"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice", "the name of one of the tools"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": []}}},
            "tool_choice",
            "the name of one of the tools",
        ),
        ({"tools": [NOW], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        (
            {"tools": [NOW], "tool_choice": "required", "guided_regex": "a"},
            "tool_choice",
            "none or auto beside a form of answers",
        ),
    ],
)
def test_wrong_tools_are_refused_by_key(body, param, message):
    row = read(**body)
    assert isinstance(row, BadRow)
    assert (row.error.param, message in row.error.message) == (param, True), row.error.message
