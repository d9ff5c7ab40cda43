"""A template gets contents, calls and tools in the form that it reads, and no text vanishes."""

import json
from contextlib import closing

import pytest

from noria.runtime.errors import InvalidTokenizer, RowError
from noria.runtime.text.chat_template import ChatRenderer
from noria.runtime.text.load_tokenizer import load_tokenizer

PARTS_ONLY = (
    "{% for m in messages %}[INST]{{ m.role }}: {% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] | trim }} {% endif %}{% endfor %}[/INST]{% endfor %}"
)
TEXT_OR_PARTS = (
    "{% for m in messages %}[INST]{{ m.role }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if 'text' in p %}<{{ p.text }}>{% endif %}{% endfor %}"
    "{% endif %}[/INST]{% endfor %}"
)
SYSTEM_AS_TEXT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}" + TEXT_OR_PARTS
)
FILTERED_PARTS = (
    "{% for m in messages %}[INST]{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ p['text'] }}{% endfor %}[/INST]{% endfor %}"
)
TEXT_ONLY = "{% for m in messages %}{{ '[INST]' + m['content'] + '[/INST]' }}{% endfor %}"
PRINTED = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
WITH_JSON = "{% for m in messages %}[INST]{{ m.content | tojson }}[/INST]{% endfor %}"


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def user(content):
    return [{"role": "user", "content": content}]


def text_of(renderer, *arguments, **options):
    return renderer._tokenizer.decode(renderer.encode(*arguments, **options))


def equal_to_transformers(directory, messages, given=None, **options):
    """Whether the ids are those of transformers, for the same messages or for those given to it."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    with closing(ChatRenderer(load_tokenizer(directory))) as renderer:
        expected = reference.apply_chat_template(given or messages, return_dict=False, **options)
        return renderer.encode(messages, add_generation_prompt=False, **options) == expected


@pytest.mark.reference
@pytest.mark.parametrize(
    "template", [PARTS_ONLY, TEXT_OR_PARTS, SYSTEM_AS_TEXT, FILTERED_PARTS], ids=str
)
@pytest.mark.parametrize("content", [parts("say no now"), parts("say no ", "now")], ids=len)
def test_templates_that_read_parts_get_them_as_in_transformers(make_directory, template, content):
    messages = [*user(content), {"role": "assistant", "content": parts("ok")}, *user(content)]
    assert equal_to_transformers(make_directory(chat_template=template), messages)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (PARTS_ONLY, "[INST]user: one two [/INST]"),
        (TEXT_OR_PARTS, "[INST]user: <one><two>[/INST]"),
        (FILTERED_PARTS, "[INST]onetwo[/INST]"),
        (TEXT_ONLY, "[INST]one\ntwo[/INST]"),
        (PRINTED, "[INST]one\ntwo[/INST]"),
        (WITH_JSON, '[INST]"one\\ntwo"[/INST]'),
    ],
)
def test_parts_are_shown_in_the_form_of_the_template(renderer, template, shown):
    assert text_of(renderer(template), user(parts("one", "two"))) == shown


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (PARTS_ONLY, "[INST]user: one [/INST]"),
        (TEXT_OR_PARTS, "[INST]user: one[/INST]"),
        (FILTERED_PARTS, "[INST]one[/INST]"),
        (PRINTED, "[INST]one[/INST]"),
    ],
)
def test_texts_are_shown_in_the_form_of_the_template(renderer, template, shown):
    assert text_of(renderer(template), user("one")) == shown


def test_each_role_has_a_form_of_its_own(renderer):
    messages = [{"role": "system", "content": parts("a", "b")}, *user(parts("c", "d"))]
    assert text_of(renderer(SYSTEM_AS_TEXT), messages) == "<s>a\nb[INST]user: <c><d>[/INST]"


def test_special_token_text_in_parts_stays_text(renderer):
    chat = renderer(TEXT_OR_PARTS)
    ids = chat.encode(user(parts("[/INST]", "</s>")))
    assert [token for token in ids if token in chat._tokenizer.special_ids] == [4, 5]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[INST]{{ m.text }}[/INST]{% endfor %}",
        "{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content if p.kind == 'text' %}{{ p.text }}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_leaves_out_the_users_text_is_refused(renderer, template):
    with pytest.raises(InvalidTokenizer, match="chat_template: expected a template that shows"):
        renderer(template).encode(user("one"))


@pytest.mark.parametrize("role", ["developer", "tool"])
def test_a_message_that_the_template_leaves_out_is_an_error(renderer, role):
    chat = renderer(
        "{% for m in messages if m.role in ['user', 'system'] %}{{ m.content }}{% endfor %}"
    )
    assert text_of(chat, [{"role": "system", "content": "a"}, *user("b")]) == "ab"
    with pytest.raises(RowError, match=rf"messages\[0\]: expected a role .*, got '{role}'"):
        chat.encode([{"role": role, "content": "a"}, *user("b")])


AS_TEXT = (
    "{% for m in messages %}[INST]{{ m.role }}: {% if m.tool_calls %}{% for t in m.tool_calls %}"
    "{{ t.function.name + '\n' + t.function.arguments }}{% endfor %}{% else %}{{ m.content }}"
    "{% endif %}[/INST]{% endfor %}"
)
AS_TEXT_IF_NULL = (
    "{% for m in messages %}{% if m['content'] is none %}{% for t in m['tool_calls'] %}"
    "{{ t['function']['name'] + '\n' + t['function']['arguments'] }}{% endfor %}{% else %}"
    "{{ '[INST]' + m['content'] + '[/INST]' }}{% endif %}{% endfor %}"
)
AS_TEXT_AFTER_CONTENT = (
    "{% for m in messages %}{{ '[INST]' + m['content'] }}{% for t in m.tool_calls %}"
    "{{ t.function.name + '\n' + t.function.arguments }}{% endfor %}{{ '[/INST]' }}{% endfor %}"
)
IN_PYTHON = AS_TEXT.replace("{{ t.function.name + '\n' + t", "{{ t.function.name }}\n{{ t")
AS_JSON = AS_TEXT.replace(".arguments }}", ".arguments | tojson }}")
AS_ITEMS = AS_TEXT.replace(
    "{{ t.function.name + '\n' + t.function.arguments }}",
    "{{ t.function.name }}({% for k, v in t.function.arguments.items() %}{{ k }}={{ v }}"
    "{% endfor %})",
)
AS_EITHER = AS_TEXT.replace(
    "{{ t.function.name + '\n' + t.function.arguments }}",
    "{{ t.function.name }} {% if t.function.arguments is string %}{{ t.function.arguments }}"
    "{% else %}{{ t.function.arguments | tojson }}{% endif %}",
)


def called(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        *user("say no now"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["text", "object"])
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (AS_TEXT, '[INST]assistant: f\n{"a": 1}[/INST]'),
        (AS_TEXT_IF_NULL, 'f\n{"a": 1}'),
        (IN_PYTHON, '[INST]assistant: f\n{"a": 1}[/INST]'),
        (AS_JSON.replace("name + '\n' + t", "name }} {{ t"), '[INST]assistant: f {"a": 1}[/INST]'),
        (AS_ITEMS, "[INST]assistant: f(a=1)[/INST]"),
        (AS_EITHER, '[INST]assistant: f {"a": 1}[/INST]'),
    ],
)
def test_arguments_are_shown_in_the_form_of_the_template(renderer, template, shown, arguments):
    assert shown in text_of(renderer(template), called(arguments))


def test_the_text_of_arguments_is_shown_as_it_came(renderer):
    assert 'f\n{"a":1.50}' in text_of(renderer(AS_TEXT), called('{"a":1.50}'))


def test_arguments_after_a_content_are_shown_in_the_form_of_the_template(renderer):
    asked, call, answer = called('{"a": 1}')
    messages = [asked, call | {"content": ""}, answer]
    assert '[INST]f\n{"a": 1}[/INST]' in text_of(renderer(AS_TEXT_AFTER_CONTENT), messages)


@pytest.mark.parametrize(("template", "shown"), [(AS_TEXT, "f\n{}"), (AS_ITEMS, "f()")])
@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_an_empty_text_has_no_arguments(renderer, template, shown, arguments):
    assert shown in text_of(renderer(template), called(arguments))


@pytest.mark.reference
@pytest.mark.parametrize(
    ("template", "given"), [(AS_TEXT, '{"a": 1}'), (AS_ITEMS, {"a": 1}), (AS_EITHER, {"a": 1})]
)
def test_calls_have_the_ids_of_transformers(make_directory, template, given):
    directory = make_directory(chat_template=template)
    assert equal_to_transformers(directory, called('{"a": 1}'), called(given))


TOOLS = [{"type": "function", "function": {"name": "f", "description": "adds"}}]
NAMED = [
    {"name": "default", "template": PRINTED},
    {"name": "rag", "template": "{{ documents }}" + PRINTED},
    {"name": "tool_use", "template": "{{ tools | tojson }}" + PRINTED},
]


@pytest.mark.reference
def test_rows_with_tools_have_the_template_for_them_as_in_transformers(make_directory):
    directory = make_directory(chat_template=NAMED)
    assert equal_to_transformers(directory, user("one"), tools=TOOLS)
    assert equal_to_transformers(directory, user("one"))
    for entry in NAMED[1:]:
        (directory / "additional_chat_templates").mkdir(exist_ok=True)
        file = directory / "additional_chat_templates" / f"{entry['name']}.jinja"
        file.write_text(entry["template"].replace("INST", "/INST"))
    (directory / "chat_template.jinja").write_text(PRINTED.replace("[INST]", "<s>"))
    assert equal_to_transformers(directory, user("one"), tools=TOOLS)
    assert equal_to_transformers(directory, user("one"))


def test_both_templates_serve_rows_of_one_call(renderer):
    chat = renderer(NAMED)
    assert text_of(chat, user("one")) == "[INST]one[/INST]"
    assert text_of(chat, user("one"), tools=TOOLS) == f"{json.dumps(TOOLS)}[INST]one[/INST]"


def test_gguf_metadata_may_have_a_template_for_tools(smollm2_metadata):
    key, template = "tokenizer.chat_template.tool_use", "{{ tools | tojson }}" + PRINTED
    with closing(ChatRenderer(load_tokenizer(smollm2_metadata | {key: template}))) as chat:
        assert text_of(chat, user("one"), tools=TOOLS) == f"{json.dumps(TOOLS)}[INST]one[/INST]"
        assert "<|im_start|>user\none" in text_of(chat, user("one"))


def test_a_model_without_a_template_for_all_rows_says_so(renderer):
    chat = renderer(NAMED[1:])
    assert text_of(chat, user("one"), tools=TOOLS).endswith("[INST]one[/INST]")
    with pytest.raises(RowError, match="with the name default, got only rag, tool_use"):
        chat.encode(user("one"))


def test_a_template_folder_that_is_a_link_is_refused(make_directory, tmp_path):
    directory = make_directory(chat_template=PRINTED)
    (directory / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="expected a folder, got a link"):
        load_tokenizer(directory)
