"""Texts of schemas are valid for an independent validator, keyword by keyword."""

import json
import random
import re
import warnings
from contextlib import suppress
from decimal import Decimal
from functools import cache

import jsonschema
import numpy as np
import pytest
from schemas import CASES, REFUSED

from noria.runtime.structured.byte_automaton import compile_language, steps_to
from noria.runtime.structured.language import DEAD, START, ByteAutomaton
from noria.runtime.structured.schemas.json_scalars import SchemaError
from noria.runtime.structured.schemas.json_schema import read_schema
from noria.runtime.structured.schemas.schema_apart import apart_options

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@cache
def automaton_of(number: int) -> ByteAutomaton:
    return compile_language(read_schema(CASES[number].schema, CASES[number].recursion).language)


def is_valid(text: str, schema: object) -> bool:
    """Whether an independent validator accepts a text."""
    try:
        value = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    except ValueError:
        return False
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    return validator.is_valid(value)


def random_text(automaton: ByteAutomaton, draw: random.Random, limit: int = 60) -> bytes:
    """A random accepted text: after `limit` bytes, each byte leads nearer to its end."""
    left_S = _steps_left(automaton)
    bytes_of_class = [
        np.flatnonzero(automaton.class_of_byte == c) for c in range(automaton.next_SC.shape[1])
    ]
    state, text = START, bytearray()
    while True:
        moves = [c for c, s in enumerate(automaton.next_SC[state]) if s != DEAD]
        if automaton.is_accepting_S[state] and (not moves or draw.random() < 0.2):
            return bytes(text)
        if len(text) > limit:
            if automaton.is_accepting_S[state]:
                return bytes(text)
            nearest = min(left_S[automaton.next_SC[state, c]] for c in moves)
            moves = [c for c in moves if left_S[automaton.next_SC[state, c]] == nearest]
        move = draw.choice(moves)
        text.append(draw.choice(bytes_of_class[move]))
        state = automaton.next_SC[state, move]


@cache
def _steps_left(automaton: ByteAutomaton) -> np.ndarray:
    left_S = np.where(automaton.is_accepting_S, 0.0, np.inf)
    while True:
        nearer_S = np.minimum(left_S, 1 + left_S[automaton.next_SC].min(axis=1))
        if (nearer_S == left_S).all():
            return left_S
        left_S = nearer_S


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_each_keyword_accepts_and_rejects_its_examples(number: int):
    case, automaton = CASES[number], automaton_of(number)
    for text in case.accepted:
        assert automaton.accepts(text.encode()), text
        assert is_valid(text, case.schema), text
    for text in case.rejected:
        assert not automaton.accepts(text.encode()), text


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_random_texts_of_a_schema_are_valid(number: int):
    case, draw = CASES[number], random.Random(number)
    for _ in range(40):
        text = random_text(automaton_of(number), draw).decode()
        assert is_valid(text, case.schema), text


@pytest.mark.parametrize(("schema", "where"), REFUSED, ids=[where for _, where in REFUSED])
def test_a_schema_outside_the_subset_is_refused_by_keyword_and_place(schema: object, where: str):
    with pytest.raises(SchemaError, match=f"^{re.escape(where)}: "):
        read_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"allOf": [{"enum": [1]}, {"const": 2}]},
        {"oneOf": [{"required": ["a"]}, {"required": ["a"]}]},
        {"allOf": [{"const": 1, "enum": [2, 3]}, {"type": "integer"}]},
    ],
)
def test_a_schema_without_a_value_has_an_empty_language(schema: object):
    assert compile_language(read_schema(schema).language).is_empty


def test_tuples_may_be_written_as_before_draft_2020():
    schema = {"items": [{"const": 1}, {"type": "null"}], "additionalItems": False}
    automaton = compile_language(read_schema(schema).language)
    assert automaton.accepts(b"[1, null]") and not automaton.accepts(b"[1, null, 2]")
    assert jsonschema.Draft7Validator(schema).is_valid([1, None])


def test_bounds_of_numbers_hold_at_random():
    draw = random.Random(0)
    for _ in range(60):
        places = draw.randint(0, 3)
        low, high = sorted(round(draw.uniform(-50, 50), places) for _ in range(2))
        keys = draw.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        if low == high:
            continue
        kind = draw.choice(["number", "integer"])
        schema = {"type": kind, keys[0]: low, keys[1]: high}
        schema.pop(draw.choice([*keys, "type", "none"]), None) if kind == "number" else None
        schema["type"] = kind
        try:
            automaton = compile_language(read_schema(schema).language)
        except SchemaError:
            assert kind == "integer" and high - low < 2
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(25):
            text = random_text(automaton, draw).decode()
            assert validator.is_valid(json.loads(text)), (schema, text)
        for _ in range(25):
            value = draw.uniform(-60, 60)
            text = str(round(value)) if kind == "integer" else f"{value:.{draw.randint(1, 2)}f}"
            if text.startswith("-0") and float(text) == 0:
                continue
            assert automaton.accepts(text.encode()) == validator.is_valid(json.loads(text)), text


_REFERRED = {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": 5}, {"type": "null"}]},
        {"oneOf": [{"type": "object", "required": 5}, {"type": "object"}]},
        {"oneOf": [{"type": "object", "required": [{}]}, {"type": "object"}]},
        {"oneOf": [{"type": "object", "properties": []}, {"type": "object"}]},
        {"oneOf": [{"type": [{}]}, {"type": "null"}]},
        {"oneOf": [{"enum": [1], "type": [{}, "integer"]}, {"enum": [1]}]},
        {**_REFERRED, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": f"#/$defs/{'9' * 5000}", "$defs": []},
    ],
)
def test_a_wrong_schema_inside_another_is_refused(schema):
    with pytest.raises(SchemaError):
        read_schema(schema)


def test_no_schema_raises_another_error():
    draw = random.Random(0)
    words = ["object", "array", "string", "a", "#/$defs/a", "#/$defs/b", "#/oneOf/0"]
    keys = ["type", "required", "properties", "enum", "const", "oneOf", "anyOf", "$ref", "items"]

    def value(depth: int) -> object:
        kind = draw.randrange(6 if depth else 4)
        if kind > 3:
            items = [value(depth - 1) for _ in range(draw.randrange(3))]
            return items if kind == 4 else {draw.choice(words): item for item in items}
        return schema(depth - 1) if kind == 3 and depth else draw.choice([*words, 5, None, True])

    def schema(depth: int) -> dict[str, object]:
        chosen = draw.sample(keys, draw.randrange(1, 3))
        return {key: value(depth) for key in chosen}

    for _ in range(3000):
        options = [schema(2), schema(1)]
        defs = {"a": schema(1), "b": {"$ref": draw.choice(words)}}
        with suppress(SchemaError):
            read_schema({"oneOf": options, "$defs": defs})


def test_a_move_of_many_classes_is_one_step():
    next_SC = np.array([[DEAD] * 130, [2] * 130, [DEAD] * 130])
    with warnings.catch_warnings(action="error"):
        steps_S = steps_to(np.array([False, False, True]), next_SC)
    assert steps_S.tolist() == [np.inf, 1, 0]


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.50000000000001), (9, 9.9999999999999)])
def test_no_answer_is_rounded_to_an_excluded_bound(low, high):
    """Answers next to bounds of 14 digits have one digit more."""
    schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    automaton = compile_language(read_schema(schema).language)
    validator = jsonschema.Draft202012Validator(schema)
    for bound, sign in ((low, 1), (high, -1)):
        step, accepted = Decimal("1e-12"), 0
        for exponent in (0, 1, 2, 3, 4):
            text = f"{Decimal(repr(bound)) + sign * step.scaleb(-exponent):f}"
            if automaton.accepts(text.encode()):
                accepted += 1
                assert validator.is_valid(json.loads(text)), text
        assert accepted >= 2


@pytest.mark.parametrize(
    ("bounds", "most"),
    [
        ({"exclusiveMinimum": 0.3, "exclusiveMaximum": 0.30000000000000004}, 14),
        ({"minimum": 9, "exclusiveMaximum": 9.99999999999999}, 14),
        ({"minimum": 1e-320}, 20),
        ({"maximum": -1.5e-30}, 20),
    ],
)
def test_bounds_of_too_many_digits_are_refused(bounds, most):
    with pytest.raises(
        SchemaError, match=f"at /properties/a: expected a bound of at most {most} digits"
    ):
        read_schema({"properties": {"a": {"type": "number", **bounds}}, "required": ["a"]})


@pytest.mark.parametrize("keys", [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
@pytest.mark.parametrize("name", ["integer", "number"])
def test_a_bound_beyond_the_digits_of_answers_allows_all_of_them(name, keys):
    """Such bounds are written for whole numbers that are exact in a double, of 16 digits."""
    low, high = keys
    schema = {"type": name, low: -(2**53) + 1, high: 2**53 - 1}
    automaton = compile_language(read_schema(schema).language)
    for text in ("0", "-999999999999999", "999999999999999"):
        assert automaton.accepts(text.encode()), text
    assert not automaton.accepts(b"1e300") and not automaton.accepts(b"9007199254740992")
    with pytest.raises(SchemaError, match=f"{low} .*a number of at most 15 digits"):
        read_schema({"type": name, low: 2**53 - 1})


def test_an_included_bound_may_have_all_digits_of_a_double():
    schema = {"type": "number", "minimum": 0.1, "maximum": 0.30000000000000004}
    automaton = compile_language(read_schema(schema).language)
    assert automaton.accepts(b"0.30000000000000004")
    assert not automaton.accepts(b"0.30000000000000005")


def test_options_that_forbid_each_others_keys_are_both_answers():
    options = [
        {"type": "object", "properties": {"a": {"const": 1}, "b": False}},
        {"type": "object", "properties": {"a": False, "b": {"const": 2}}},
    ]
    schema = {"type": "object", "oneOf": options}
    automaton = compile_language(read_schema(schema).language)
    validator = jsonschema.Draft202012Validator(schema)
    for text, expected in [('{"a": 1}', True), ('{"b": 2}', True), ("{}", False)]:
        assert automaton.accepts(text.encode()) == validator.is_valid(json.loads(text)) == expected


def test_fifty_options_with_tags_are_told_apart():
    tags = [{"properties": {"tag": {"const": i}}, "required": ["tag"]} for i in range(50)]
    options = [{"type": "object", **tag} for tag in tags]
    assert apart_options(options, lambda schema: schema, "") == options


def test_options_with_many_deep_parts_are_compared_up_to_a_bound():
    names = [f"key{i}" for i in range(10)]
    part = {"type": "object", "required": names}
    part["properties"] = dict.fromkeys(names, part)
    resolved = []

    def resolve(schema):
        resolved.append(schema)
        assert len(resolved) < 10_000, "the comparisons are not bounded"
        return schema

    assert apart_options([part, part], resolve, "") is None
