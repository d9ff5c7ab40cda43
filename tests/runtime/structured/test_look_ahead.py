"""Look-ahead in patterns allows the texts that Python's `re` finds, and none that it refuses."""

import itertools
import json
import re

import pytest

from noria.runtime.structured.byte_automaton import compile_language
from noria.runtime.structured.pattern import PatternError, read_pattern
from noria.runtime.structured.schemas.json_schema import read_schema

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""The pattern that Pydantic writes for a Decimal."""
DECIMALS = [
    DECIMAL,
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,2}|(?=[\d.]{1,4}0*$)\d{0,2}\.\d{0,1}0*$)",
]
"""The patterns of decimals with a number of digits, of decimal places, and of both."""
PATTERNS = [
    "^(?=.*b)(?=.*1).{2,3}$",
    "^(?!a|b1)[ab1]+$",
    "^(?=[ab]+$)(?!.*bb)",
    "^a(?!b)|^1(?=1$)",
    "^a(?=b(?!1)).*$",
    "a(?!b)",
    "(?!.*a)b",
    r"^(?!\d)[ab1]{2}$",
    r"^(?![^ab])..$",
    "^(?!)a|^(?!a$)a+$",
    "^(?=a)(?!ab)(?!a1)a.",
    "^(?:a{0,2}|(?=[ab]{1,3}1*$)b*a?1*$)",
    "^a(b$|(1(?!1)|(?=b).*1$))",
    "^b?(?P<x>a|1$)",
    r"a(\(|[(]|1)?$",
]
TEXTS = ["".join(text) for n in range(5) for text in itertools.product("ab1", repeat=n)]


NUMBERS = ["".join(text) for n in range(7) for text in itertools.product("-.01", repeat=n)]


def accepts(pattern, text, *, is_search=True):
    return compile_language(read_pattern(pattern, is_search=is_search)).accepts(text.encode())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("is_search", [True, False])
def test_look_ahead_allows_what_python_finds(pattern, is_search):
    find = re.search if is_search else re.fullmatch
    automaton = compile_language(read_pattern(pattern, is_search=is_search))
    found = [text for text in TEXTS if find(pattern, text)]
    assert [text for text in TEXTS if automaton.accepts(text.encode())] == found


@pytest.mark.parametrize("pattern", DECIMALS)
def test_decimals_are_what_python_finds(pattern):
    automaton = compile_language(read_pattern(pattern, is_search=True))
    found = [text for text in NUMBERS if re.search(pattern, text)]
    assert [text for text in NUMBERS if automaton.accepts(text.encode())] == found


@pytest.mark.parametrize("text", ["", "+", "-.", "..", "1.2.3", "12a", " 1"])
def test_texts_that_are_no_decimals_are_refused(text):
    assert not accepts(DECIMAL, text)
    schema = {"type": "object", "properties": {"price": {"type": "string", "pattern": DECIMAL}}}
    automaton = compile_language(read_schema(schema | {"required": ["price"]}).language)
    assert not automaton.accepts(json.dumps({"price": text}).encode())
    assert automaton.accepts(b'{"price": "-01.50"}')


@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        # JavaScript and Python disagree about the first three
        (r"^(?!\d)", "٣", "a"),
        ("^(?!a$)a", "a\n", "ab"),
        ("^(?!a.)a", "a\r", "a\n"),
        (r"^(?![^\D])", "1", "a"),
        (r"^(?![^\d])", "a", "1"),
    ],
)
def test_a_text_that_either_language_refuses_is_refused(pattern, text, other):
    assert not accepts(pattern, text)
    assert accepts(pattern, other)


@pytest.mark.parametrize("length", [{"maxLength": 6}, {"minLength": 3, "maxLength": 300}])
def test_look_ahead_goes_with_lengths(length):
    schema = {"type": "string", "pattern": "^(?!a)[ab]*$", **length}
    automaton = compile_language(read_schema(schema).language)
    assert automaton.accepts(b'"baaa"') and not automaton.accepts(b'"abbb"')
    assert not automaton.accepts(f'"b{"a" * length["maxLength"]}"'.encode())


def test_a_long_pattern_with_look_ahead_is_shortened_to_its_length():
    schema = {"type": "string", "pattern": "^(?!a)([ab]{1,9}c)*$", "maxLength": 1000}
    automaton = compile_language(read_schema(schema).language)
    assert automaton.accepts(f'"{"bbbbbbbbbc" * 32}"'.encode())
    assert not automaton.accepts(f'"{"bbbbbbbbbc" * 150}"'.encode())
    assert not automaton.accepts(b'"ac"')


def test_look_ahead_reads_characters_and_not_their_escapes():
    automaton = compile_language(read_schema({"type": "string", "pattern": "^(?!\\\\)"}).language)
    assert automaton.accepts(b'"a"') and automaton.accepts(b'"\\n"')
    assert not automaton.accepts(b'"\\\\"')


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("((?!a)b)*", "look-ahead outside of groups that are followed"),
        ("(?<=a)b", "a group without look-behind"),
        ("(?<!a)b", "a group without look-behind"),
        ("(?=a)*b", "without a quantifier"),
        ("a(?=^b)", "at an end of the pattern only"),
        ("(?!a", "a look-ahead that ends with a parenthesis"),
        ("(?=a)" * 60, "at most 50 groups"),
    ],
)
def test_other_look_around_is_refused_with_its_place(pattern, message):
    with pytest.raises(PatternError, match=message):
        read_pattern(pattern)
