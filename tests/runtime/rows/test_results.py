"""Output lines are the OpenAI Batch shapes, key for key."""

import json
import math
import time

import pytest

from noria.runtime.errors import RowError
from noria.runtime.files.strict_json import Line
from noria.runtime.request import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SampleCounts,
    TokenLogprob,
)
from noria.runtime.rows.lines import BadRow, BatchRow, read_row
from noria.runtime.rows.results import OutputLines, row_metrics


class Tokens:
    def token_text(self, token_id):
        return chr(token_id)

    def token_bytes(self, token_id):
        return bytes([token_id])


LINES = OutputLines(model_name="served", fingerprint="f", tokens=Tokens())


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1711475054.7)


def row_of(**body) -> BatchRow:
    row = read_row(Line(1, 0, json.dumps({"id": "r1", **body}).encode()), 0)
    assert isinstance(row, BatchRow)
    return row


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def scored(token, logprob, *top):
    return TokenLogprob(ord(token), logprob, tuple((ord(t), p) for t, p in top))


def output(text="ok", reason="stop", logprobs=None, prompt="hi", prompt_logprobs=None):
    completion = CompletionOutput(0, text, list(text.encode()), reason, logprobs=logprobs)
    return RequestOutput("r1", prompt, [104, 105], [completion], prompt_logprobs)


def test_a_chat_answer_has_the_standard_shape():
    line = LINES.result(row_of(**CHAT), output())
    body = line["response"]["body"]
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert line["id"].startswith("batch_req_") and body.pop("id").startswith("chatcmpl-")
    assert line["custom_id"] == "r1" and line["error"] is None
    assert list(line["response"]) == ["status_code", "request_id", "body"]
    assert line["response"]["status_code"] == 200
    assert body == {
        "object": "chat.completion",
        "created": 1711475054,
        "model": "served",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ok"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }


def test_a_text_answer_has_the_standard_shape_and_the_row_own_model():
    body = LINES.result(row_of(prompt="hi", model="m"), output(reason="length"))["response"]["body"]
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["model"] == "m"
    assert body["choices"] == [
        {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "length"}
    ]


def test_chat_logprobs_carry_text_bytes_and_alternatives():
    entry = scored("o", -0.25, ("o", -0.25), ("x", -math.inf), ("y", -2.0))
    row = row_of(**CHAT, logprobs=True, top_logprobs=2)
    body = LINES.result(row, output("o", logprobs=[entry]))["response"]["body"]
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "o",
                "logprob": -0.25,
                "bytes": [111],
                "top_logprobs": [
                    {"token": "o", "logprob": -0.25, "bytes": [111]},
                    {"token": "x", "logprob": -9999.0, "bytes": [120]},
                ],
            }
        ]
    }


def test_text_logprobs_are_four_parallel_lists():
    entries = [scored("o", -1.0, ("a", -0.5)), scored("k", -2.0, ("k", -2.0))]
    body = LINES.result(row_of(prompt="hi", logprobs=1), output(logprobs=entries))["response"]
    assert body["body"]["choices"][0]["logprobs"] == {
        "tokens": ["o", "k"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"a": -0.5, "o": -1.0}, {"k": -2.0}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("has_outputs", [True, False])
def test_a_scored_prompt_starts_with_a_null_and_has_no_completion(has_outputs):
    row = row_of(prompt=[104, 105], echo=True, max_tokens=0, logprobs=0)
    result = output("", None, prompt=None, prompt_logprobs=[None, scored("i", -0.0)])
    if not has_outputs:
        result.outputs = []
    body = LINES.result(row, result)["response"]["body"]
    choice = body["choices"][0]
    assert choice["text"] == "hi" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert choice["logprobs"]["token_logprobs"] == [None, 0.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"i": 0.0}]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


def test_a_row_with_a_rule_says_of_each_choice_how_its_sample_ended():
    row = row_of(prompt="hi", n=4, noria={"answer": "([a-z])", "stop_when": 2})
    counts = SampleCounts(total=4, stopped=2, output_tokens=9, tokens_left=70)
    completions = [
        CompletionOutput(1, "ok", [1, 2], "stop", answer="o", votes=2),
        CompletionOutput(3, "k", [1], "stop", stopped_early="agreement"),
    ]
    result = RequestOutput("r1", "hi", [104, 105], completions, samples=counts)
    body = LINES.result(row, result)["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["noria"] for choice in body["choices"]] == [
        {"sample": 1, "samples": 4, "answer": "o", "votes": 2, "stopped_early": None},
        {"sample": 3, "samples": 4, "answer": None, "votes": 0, "stopped_early": "agreement"},
    ]
    # samples that are not returned were generated too
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
    metrics = row_metrics(row, result)
    assert metrics["output_tokens"] == 9
    assert (metrics["stopped_samples"], metrics["tokens_left"]) == (2, 70)


def test_times_of_a_row_are_those_of_its_longest_answer():
    result = output("seven__")
    result.outputs.append(CompletionOutput(1, "ok", [1, 2], "stop"))
    result.metrics = RequestMetrics(arrival=2.0, first_token=5.0, finished=17.0)
    metrics = row_metrics(row_of(prompt="hi", n=2), result)
    assert metrics["time_to_first_token"] == 3.0
    assert metrics["latency"] == 15.0
    assert metrics["inter_token_latency"] == 2.0
    assert metrics["output_tokens_per_second"] == 0.5


@pytest.mark.parametrize(
    ("text", "first_token", "expected"),
    [
        ("", None, {"latency"}),
        ("o", 4.0, {"latency", "time_to_first_token"}),
        ("ok", 9.0, {"latency", "time_to_first_token", "inter_token_latency"}),
    ],
    ids=["no token", "one token", "one call"],
)
def test_a_row_has_only_the_times_that_it_can_have(text, first_token, expected):
    result = output(text)
    result.metrics = RequestMetrics(arrival=2.0, first_token=first_token, finished=9.0)
    metrics = row_metrics(row_of(prompt="hi"), result)
    assert metrics.keys() - {"prompt_tokens", "output_tokens"} == expected


def test_echo_puts_the_prompt_before_the_completion_in_text_and_logprobs():
    row = row_of(prompt="hi", echo=True, max_tokens=2, logprobs=0)
    entries = [scored("o", -1.0), scored("k", -2.0)]
    result = output(logprobs=entries, prompt_logprobs=[None, scored("i", -3.0)])
    choice = LINES.result(row, result)["response"]["body"]["choices"][0]
    assert choice["text"] == "hiok"
    assert choice["logprobs"]["tokens"] == list("hiok")
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -1.0, -2.0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_prompt_logprobs_are_objects_by_token_id():
    row = row_of(prompt="hi", prompt_logprobs=1)
    entries = [None, scored("i", -3.0, ("a", -1.0), ("i", -3.0))]
    choice = LINES.result(row, output(prompt_logprobs=entries))["response"]["body"]["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "97": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
            "105": {"logprob": -3.0, "rank": 2, "decoded_token": "i"},
        },
    ]


def test_a_refused_request_is_a_400_and_our_own_failure_a_500():
    error = RowError("context_length_exceeded", "too long", "prompt")
    line = LINES.error(row_of(prompt="hi"), error)
    assert line["response"]["status_code"] == 400 and line["error"] is None
    assert line["response"]["body"] == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    }
    line = LINES.error(row_of(prompt="hi"), RowError("nonfinite_logits", "NaN"))
    assert line["response"]["status_code"] == 500


def test_a_line_that_was_never_a_request_has_no_response():
    bad = BadRow(4, 9, 100, None, "0", RowError("invalid_json", "line 9: broken"))
    line = LINES.error(bad, bad.error)
    assert line["custom_id"] is None and line["response"] is None
    assert line["error"] == {"code": "invalid_json", "message": "line 9: broken"}


def test_ids_depend_on_row_request_and_configuration_alone(monkeypatch):
    row = row_of(prompt="hi")
    again = OutputLines(model_name="served", fingerprint="f")
    other = OutputLines(model_name="served", fingerprint="g")
    first = LINES.result(row, output())["id"]
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert first == again.result(row, output())["id"]
    assert LINES.result(row, output())["id"] != other.result(row, output())["id"]
    changed = row_of(prompt="ho")
    assert LINES.result(row, output())["id"] != LINES.result(changed, output())["id"]


def test_nan_is_an_error_of_its_row_and_never_written():
    with pytest.raises(RowError, match="NaN"):
        LINES.result(row_of(prompt="hi", logprobs=0), output(logprobs=[scored("o", math.nan)]))
