"""Limits on rows and templates: a value at a limit is accepted, and one more is refused."""

import io
import itertools
from datetime import datetime

import pytest

from noria.compile.graphs.signatures import MAX_BIASES, MAX_STOP_IDS
from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime import request
from noria.runtime.engine.actions import ScheduledRequest
from noria.runtime.engine.scheduler import Scheduler
from noria.runtime.errors import RowError
from noria.runtime.files import strict_json
from noria.runtime.files.strict_json import MAX_DEPTH, MAX_INTEGER_DIGITS, parse_object, read_lines
from noria.runtime.request import SamplingParams
from noria.runtime.text.template_process import TemplateFailure, TemplateLimits, TemplateProcess


@pytest.mark.parametrize(
    ("limit", "make"),
    [
        (request.MAX_N, lambda n: {"n": n}),
        (request.MAX_LOGPROBS, lambda n: {"logprobs": n}),
        (request.MAX_LOGPROBS, lambda n: {"prompt_logprobs": n}),
        (request.MAX_STOP_STRINGS, lambda n: {"stop": ["x"] * n}),
        (request.MAX_STOP_TOKEN_IDS, lambda n: {"stop_token_ids": range(n)}),
        (request.MAX_LOGIT_BIAS, lambda n: {"logit_bias": dict.fromkeys(range(n), 1.0)}),
        (2**31 - 1, lambda n: {"max_tokens": n}),
        (2**63 - 1, lambda n: {"seed": n}),
    ],
    ids=["n", "logprobs", "prompt logprobs", "stop", "stop ids", "bias", "max_tokens", "seed"],
)
def test_a_row_asks_for_no_more_than_the_limit(limit, make):
    SamplingParams(**make(limit))
    with pytest.raises(RowError, match=rf": expected .*{limit}"):
        SamplingParams(**make(limit + 1))


def test_what_a_row_may_ask_for_fits_the_arrays_of_the_graphs():
    assert request.MAX_LOGIT_BIAS <= MAX_BIASES and request.MAX_STOP_TOKEN_IDS <= MAX_STOP_IDS


def test_a_line_is_no_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_LINE_BYTES", 10)
    content = b"a" * 10 + b"\n" + b"b" * 11 + b"\n"
    lines = read_lines(io.BytesIO(content))
    assert [line.content for line in lines] == [b"a" * 10, None]


def test_json_is_no_deeper_and_its_integers_no_longer_than_the_limits():
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    parse_object(nested(MAX_DEPTH))
    with pytest.raises(RowError, match=f"at most {MAX_DEPTH} levels"):
        parse_object(nested(MAX_DEPTH + 1))
    parse_object(b'{"a":%s}' % (b"9" * MAX_INTEGER_DIGITS))
    with pytest.raises(RowError, match=f"at most {MAX_INTEGER_DIGITS} digits"):
        parse_object(b'{"a":%s}' % (b"9" * (MAX_INTEGER_DIGITS + 1)))


def test_a_template_writes_no_more_than_the_limit():
    limits = TemplateLimits(max_characters=1000)
    process = TemplateProcess("{{ 'a' * n }}", limits, datetime.now())
    try:
        text, failure = process.render([{"n": 1000}, {"n": 1001}])
    finally:
        process.close()
    assert text == "a" * 1000
    assert isinstance(failure, TemplateFailure) and "more than 1000 characters" in str(failure)


@pytest.mark.parametrize(
    ("prefill", "limit"),
    [(((8, 4), (32, 2)), 2 * (6 + 4)), (((64, 2, 8),), 2 * (2 + 4))],
    ids=["whole prompts", "chunks"],
)
def test_no_more_rows_wait_than_full_calls_can_be_chosen_from(prefill, limit):
    grid = BucketGrid(max_length=64, prefill=prefill, decode_slots=4)
    scheduler = Scheduler(grid)
    for number in itertools.count():
        if not scheduler.wants_more:
            break
        scheduler.submit(ScheduledRequest(number, 5, 13, 1, False))
    assert number == limit
