"""The form of a job is that of the answers of all rows that say nothing about theirs."""

import json

import pytest

from noria.runtime.errors import ConfigError
from noria.runtime.files.strict_json import Line
from noria.runtime.rows.lines import BadRow, BatchRow, RequestRules, read_row
from noria.runtime.rows.structured_body import read_form_file
from noria.runtime.stages.pipeline_file import read_pipeline
from noria.runtime.structured.params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
FORM = StructuredOutputsParams(choice=["yes", "no"])


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("a.json", json.dumps(SCHEMA), {"structured_outputs": {"json": SCHEMA}}),
        ("a.json", "{}", {"structured_outputs": {"json": {}}}),
        ("a.json", '{"guided_choice": ["a"]}', {"guided_choice": ["a"]}),
        ("a.json", '{"response_format": {"type": "json_object"}}', None),
        ("a.gbnf", 'root ::= "a"\n', {"guided_grammar": 'root ::= "a"\n'}),
    ],
)
def test_a_file_has_a_schema_a_key_of_rows_or_a_grammar(tmp_path, name, text, form):
    (tmp_path / name).write_text(text)
    assert read_form_file(tmp_path / name) == (form or json.loads(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a file that can be read"),
        ("{", "expected a JSON Schema, an object with one of response_format"),
        ("[1]", r"structured_outputs.json: expected a JSON Schema"),
        ('{"guided_choice": ["a"], "title": "x"}', "got the keys guided_choice, title"),
        ('{"guided_choice": []}', "guided_choice: expected a list of texts"),
        ('{"response_format": {"type": "text"}}', "got the form text"),
    ],
)
def test_a_file_without_a_form_is_refused(tmp_path, text, message):
    path = tmp_path / "form.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"--form .*form.json: .*{message}"):
        read_form_file(path)


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, FORM),
        ({"response_format": None}, FORM),
        ({"guided_regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ({"response_format": {"type": "text"}}, None),
        ({"max_tokens": 0, "echo": True, "logprobs": 0}, None),
    ],
)
def test_a_row_has_the_form_of_the_job_unless_it_has_its_own(body, form):
    content = json.dumps({"id": "a", "prompt": "x", **body}).encode()
    row = read_row(Line(1, 0, content), 0, RequestRules({"structured_outputs": FORM}))
    assert isinstance(row, BatchRow), row
    assert row.params.structured_outputs == form
    # the form is part of the request that a journal knows
    other = read_row(Line(1, 0, content), 0)
    assert (row.request_hash == other.request_hash) == (form is not FORM)


def test_a_row_without_an_answer_has_no_form():
    line = Line(1, 0, b'{"input": "x"}')
    assert isinstance(read_row(line, 0), BatchRow)
    row = read_row(line, 0, RequestRules({"structured_outputs": FORM}))
    assert isinstance(row, BadRow) and "a chat or a completion beside --form" in row.error.message


def test_the_form_of_a_job_is_that_of_the_last_stage(tmp_path):
    path = tmp_path / "stages.toml"
    stage = '[[stages]]\nname = "{}"\nprompt = "x"\nmax_tokens = 4\n'
    path.write_text(stage.format("a") + stage.format("b"))
    pipeline = read_pipeline(path, {"guided_choice": ["y"]})
    assert [dict(s.fields) for s in pipeline.stages] == [
        {"max_tokens": 4},
        {"max_tokens": 4, "guided_choice": ["y"]},
    ]
    assert "guided_choice" in pipeline.text
    path.write_text(path.read_text() + 'guided_regex = "z"\n')
    with pytest.raises(ConfigError, match="stage b: guided_regex: expected none beside --form"):
        read_pipeline(path, {"guided_choice": ["y"]})
