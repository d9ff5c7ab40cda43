"""Files of pipelines: what a stage asks, and what is refused with its stage and key."""

import json
from contextlib import ExitStack

import pytest

from noria.runtime.errors import ConfigError
from noria.runtime.stages.pipeline_file import read_pipeline
from noria.runtime.stages.stage_renderer import open_renderers

GOOD = """
[[stages]]
name = "draft"
max_tokens = 8
n = 2
messages = [{ role = "system", content = "Be brief." }, { role = "user", content = "{{ row.q }}" }]

[[stages]]
name = "judge"
temperature = 0
stop = ["\\n"]
prompt = "{{ draft.answer }} {{ draft.answers | length }}"
"""
NO_KEYS = "expected 1 to 32 tables"


def read(tmp_path, text: str):
    path = tmp_path / "stages.toml"
    path.write_text(text)
    return read_pipeline(path)


def test_stages_have_templates_and_the_keys_of_a_request(tmp_path):
    draft, judge = read(tmp_path, GOOD).stages
    assert (draft.url, draft.max_tokens) == ("/v1/chat/completions", 8)
    assert draft.templates == {
        "messages[0].content": "Be brief.",
        "messages[1].content": "{{ row.q }}",
    }
    assert draft.body(["a", "b"]) == {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        "max_tokens": 8,
        "n": 2,
    }
    assert (judge.url, judge.max_tokens) == ("/v1/completions", None)
    assert judge.body(["p"]) == {"prompt": "p", "temperature": 0, "stop": ["\n"]}


def test_the_order_of_keys_in_a_schema_makes_another_pipeline(tmp_path):
    text = "[[stages]]\nname = 'a'\nguided_json = {{ properties = {{ {}, {} }} }}"
    keys = "a = { type = 'null' }", "b = { type = 'null' }"
    one, other = (read(tmp_path, text.format(*order)).text for order in (keys, keys[::-1]))
    assert one != other and one == read(tmp_path, f"# a note\n{text.format(*keys)}").text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", NO_KEYS),
        ("stages = 3", NO_KEYS),
        ("stages = []", NO_KEYS),
        ("model = 'm'\n[[stages]]\nname = 'a'", NO_KEYS),
        ("[[stages]]\nprompt = 'x'", "stage 1: name: .*got none"),
        ("[[stages]]\nname = 'row'", "stage 1: name: .*got 'row'"),
        ("[[stages]]\nname = 'first-draft'", "stage 1: name"),
        ("[[stages]]\nname = 'a'\n[[stages]]\nname = 'a'", "stage 2: name: .*a name of its own"),
        ("[[stages]]\nname = 'a'\nmax_token = 3", "stage a: .*Did you mean 'max_tokens'"),
        ("[[stages]]\nname = 'a'\nprompt = 'x'\ntop_logprobs = 3", "stage a: 'top_logprobs'"),
        ("[[stages]]\nname = 'a'\nprompt = 'x'\nn = 0", "stage a: n: expected"),
        ("[[stages]]\nname = 'a'\nprompt = [1]", "stage a: prompt: expected a text"),
        ("[[stages]]\nname = 'a'\nprompt = 'x'\nmessages = []", "none beside messages"),
        ("[[stages]]\nname = 'a'\nmessages = []", "stage a: messages: expected a list"),
        (
            "[[stages]]\nname = 'a'\nmessages = [{role = 'user', content = 'x', name = 'y'}]",
            r"stage a: messages\[0\]: expected",
        ),
        (
            "[[stages]]\nname = 'a'\nmessages = [{role = 'human', content = 'x'}]",
            r"stage a: messages\[0\].role: expected one of system",
        ),
        ("[[stages]]\nname = 'a'\nmax_prompt_tokens = 0", "max_prompt_tokens: expected a number"),
        ("[[stages]]\nname = 'a'\nuser = 1979-05-27", "without dates"),
    ],
)
def test_a_wrong_file_is_refused_with_its_stage_and_key(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


DRAFT = "[[stages]]\nname = 'draft'\nprompt = 'x'\n"
READER = "[[stages]]\nname = 'judge'\nprompt = '{{ draft.answer }}'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[stages]]\nname = 'a'\nprompt = '{% if %}'", "stage a: prompt: .*TemplateSyntaxError"),
        ("[[stages]]\nname = 'a'\nprompt = '{{ rows.q }}'", "that reads row only, got 'rows'"),
        (READER + DRAFT, "stage judge: prompt: .*got 'draft'"),
        (DRAFT + READER, "stage draft: max_tokens: .*as judge reads the answers, got none"),
        (DRAFT + "max_tokens = 9\necho = true\n" + READER, "stage draft: echo: .*got True"),
    ],
)
def test_a_wrong_template_is_refused_before_anything_runs(tmp_path, text, message):
    pipeline = read(tmp_path, text)
    with ExitStack() as opened, pytest.raises(ConfigError, match=message):
        open_renderers(pipeline, opened)


def test_templates_see_the_row_and_answers_and_fail_by_name(tmp_path):
    row = {"q": "hi", "items": "its key", "none": None}
    contexts = [{"row": row, "draft": {"answer": "a", "answers": ["a", "b"]}}]
    for source, expected in {
        "{{ row.q }} {{ row.items }} {{ row['q'] | upper }}": "hi its key HI",
        "{% for a in draft.answers %}\n{{ loop.index }}{{ a }}\n{% endfor %}\nend": "1a\n2b\nend",
        "{{ row | tojson }}": '{"q": "hi", "items": "its key", "none": null}',
        "{{ row.other | default('-') }}": "-",
        "{{ row.other }}": "has no attribute 'other'",
        "{{ row.values }}": "has no attribute 'values'",
        "{{ row.none }}": "expected a text or a number to write, got null",
        "{{ draft.answers }}": 'got ["a", "b"]',
    }.items():
        draft = DRAFT + "max_tokens = 4\n"
        text = f"{draft}[[stages]]\nname = 'judge'\nprompt = '''{source}'''\n"
        pipeline = read(tmp_path, text)
        with ExitStack() as opened:
            (request,) = open_renderers(pipeline, opened)[1].render(contexts)
        if isinstance(request, tuple):
            assert request == ("/v1/completions", {"prompt": expected})
        else:
            assert request.code == "template_error" and request.param == "prompt"
            assert request.message.startswith("stage judge, prompt: ")
            assert expected in request.message


FIELDS = {
    "{{ (draft.answer | from_json).mood }}": "good",
    "{% set d = draft.answer | from_json %}{{ d.score + 1 }} {{ d.items[1].n }}": "4.5 2",
    "{{ (draft.answer | from_json).tags | join('+') }}": "a+b",
    "{% if (draft.answer | from_json).score > 3 %}high{% endif %}": "high",
    "{{ (draft.answer | from_json).is_new | tojson }}": "true",
    "{{ (draft.answer | from_json).other | default('-') }}": "-",
    "{% for a in draft.answers %}{{ (a | from_json).mood }}{% endfor %}": "from_json: expected a "
    'text in JSON, got "Good."',
    "{{ (draft.answer | from_json).other }}": "has no attribute 'other'",
    "{{ (draft.answer | from_json).tags }}": 'got ["a", "b"]',
    "{{ (draft.answers[1] | from_json).mood }}": "expected a text in JSON",
    "{{ (row | from_json).mood }}": "expected a text in JSON, got {}",
    "{{ ('[NaN]' | from_json)[0] }}": "expected a text in JSON",
}


def rendered(tmp_path, source, answers, **options):
    text = f'{DRAFT}max_tokens = 4\n[[stages]]\nname = \'judge\'\nprompt = """{source}"""\n'
    contexts = [{"row": {}, "draft": {"answer": answers[0], "answers": answers}}]
    with ExitStack() as opened:
        (request,) = open_renderers(read(tmp_path, text), opened)[1].render(contexts, **options)
    return request


@pytest.mark.parametrize("source", FIELDS)
def test_templates_show_fields_of_answers_in_json(tmp_path, source):
    answer = {"mood": "good", "score": 3.5, "tags": ["a", "b"], "is_new": True}
    answer["items"] = [{"n": 1}, {"n": 2}]
    request = rendered(tmp_path, source, [json.dumps(answer), "Good."])
    if isinstance(request, tuple):
        assert request == ("/v1/completions", {"prompt": FIELDS[source]})
    else:
        assert (request.code, request.param) == ("template_error", "prompt")
        assert FIELDS[source] in request.message


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ (draft.answer | from_json).a.b[0] }}", "?"),
        ("{{ 'x' + (draft.answer | from_json).a + 'y' }}", "x?y"),
        ("{% for t in (draft.answer | from_json).tags %}<{{ t.name }}>{% endfor %}", "<?>"),
        ("{{ ((draft.answer | from_json).a * 2 - 1) | round(1) }}", "?"),
        ("{% if (draft.answer | from_json).a > 3 %}high{% else %}low{% endif %}", "low"),
        ("{{ (draft.answer | from_json).a | tojson }}", '"?"'),
        ("""{{ ('{"a": 1}' | from_json).a }}""", "1"),
    ],
)
def test_a_placeholder_stands_for_all_fields_of_an_answer(tmp_path, source, shown):
    assert rendered(tmp_path, source, ["?"], is_measured=True) == (
        "/v1/completions",
        {"prompt": shown},
    )
    if "draft" in source:
        assert not isinstance(rendered(tmp_path, source, ["?"]), tuple)
