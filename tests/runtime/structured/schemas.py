"""Schemas of each supported keyword, with texts that their automata accept and reject.

A rejected text is either invalid, or valid JSON in a form that the automata leave out.
"""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A schema and examples."""

    name: str
    schema: Any
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    recursion: int = 0


_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}
_TREE_FREE = {"$defs": {"p": _PERSON}, "type": "array", "items": {"$ref": "#/$defs/p"}}
_DISCRIMINATED = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
            "required": ["kind"],
        },
        {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
        {"type": "null"},
    ]
}

CASES = (
    Case("boolean", {"type": "boolean"}, ("true", "false"), ("null", "True", " true")),
    Case("null", {"type": "null"}, ("null",), ("none", "0")),
    Case("integer", {"type": "integer"}, ("0", "-7", "123456"), ("01", "1.5", "--1", "-", "1e3")),
    Case("number", {"type": "number"}, ("0", "-1.5", "2e10", "3.25E-7"), (".5", "1.", "+1", "NaN")),
    Case(
        "string",
        {"type": "string"},
        ('""', '"a b"', '"é中😀"', r'"a\"b\\\n"'),
        ('"', "a", r'"\x"', '"\n"', r'"\ud800"', "'a'"),
    ),
    Case("type list", {"type": ["string", "null"]}, ('"x"', "null"), ("1", "true")),
    Case("no type", {"minLength": 2}, ('"ab"',), ('"a"', "1")),
    Case("const", {"const": {"a": [1, "é"]}}, ('{"a": [1, "é"]}',), ('{"a": [1]}',)),
    Case("enum", {"enum": ["red", 3, None]}, ('"red"', "3", "null"), ("red", "4", '"blue"')),
    Case("enum and type", {"type": "string", "enum": ["a", 1]}, ('"a"',), ("1",)),
    Case("minLength", {"type": "string", "minLength": 2}, ('"ab"', r'"\n😀"'), ('"a"', '"😀"')),
    Case("maxLength", {"type": "string", "maxLength": 2}, ('""', '"éé"', r'"\"\""'), ('"abc"',)),
    Case(
        "both lengths", {"type": "string", "minLength": 1, "maxLength": 1}, ('"a"',), ('""', '"ab"')
    ),
    Case(
        "pattern",
        {"type": "string", "pattern": "^[a-c]+-\\d{2}$"},
        ('"ab-12"', '"c-00"'),
        ('"ab-1"', '"d-12"', '"xab-12"'),
    ),
    Case(
        "pattern anywhere",
        {"type": "string", "pattern": '"|\\\\'},
        (r'"a\"b"', r'"\\"'),
        ('"ab"', r'"\n"'),
    ),
    Case(
        "format and a length that is too large",
        {"type": "string", "format": "uri", "minLength": 1, "maxLength": 5000},
        ('"https://a.example/b"', f'"https://a.example/{"b" * 256}"'),
        ('""', f'"https://a.example/{"b" * 257}"'),
    ),
    Case(
        "pattern and lengths",
        {"type": "string", "pattern": "^a*b*$", "minLength": 2, "maxLength": 3},
        ('"aa"', '"aab"'),
        ('"a"', '"aabb"', '"ba"'),
    ),
    Case("date", {"type": "string", "format": "date"}, ('"2024-02-29"',), ('"2023-02-29"', '"x"')),
    Case(
        "date-time",
        {"type": "string", "format": "date-time"},
        ('"2024-01-31T23:59:59Z"', '"2024-01-31T00:00:00.5+02:00"'),
        ('"2024-01-31"', '"2024-01-31T24:00:00Z"'),
    ),
    Case(
        "time", {"type": "string", "format": "time"}, ('"23:59:59Z"',), ('"23:59"', '"24:00:00Z"')
    ),
    Case(
        "duration", {"type": "string", "format": "duration"}, ('"P3D"', '"PT5M"'), ('"P"', '"3D"')
    ),
    Case("email", {"type": "string", "format": "email"}, ('"a.b@c.org"',), ('"a"', '"a@b"')),
    Case(
        "ipv4", {"type": "string", "format": "ipv4"}, ('"127.0.0.1"',), ('"256.0.0.1"', '"1.2.3"')
    ),
    Case("ipv6", {"type": "string", "format": "ipv6"}, ('"1:2:3:4:5:6:7:8"',), ('"1:2"', '"x"')),
    Case(
        "uuid",
        {"type": "string", "format": "uuid"},
        ('"123e4567-e89b-12d3-a456-426614174000"',),
        ('"123e4567"',),
    ),
    Case("hostname", {"type": "string", "format": "hostname"}, ('"a.b-c"',), ('"-a"', '"a..b"')),
    Case(
        "uri", {"type": "string", "format": "uri"}, ('"https://a.org/b?c=d"',), ('"a b"', '"//x"')
    ),
    Case(
        "integer bounds",
        {"type": "integer", "minimum": -12, "maximum": 305},
        ("-12", "0", "9", "99", "305"),
        ("-13", "306", "-0", "1000", "00"),
    ),
    Case("minimum", {"type": "integer", "minimum": 18}, ("18", "99", "100"), ("17", "-20", "2")),
    Case("maximum", {"type": "integer", "maximum": -3}, ("-3", "-10"), ("-2", "0", "3")),
    Case(
        "exclusive bounds of integers",
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        ("1", "9"),
        ("0", "10"),
    ),
    Case(
        "fractional bounds",
        {"type": "integer", "minimum": 0.5, "maximum": 2.5},
        ("1", "2"),
        ("0", "3"),
    ),
    Case(
        "number bounds",
        {"type": "number", "minimum": 0, "maximum": 1},
        ("0", "1", "0.5", "1.0", "0.99"),
        ("1.1", "-0.1", "2", "-0"),
    ),
    Case(
        "exclusive bounds of numbers",
        {"type": "number", "exclusiveMinimum": -1.25, "exclusiveMaximum": 2.5},
        ("-1.2", "0", "2.49", "-0.5", "1.999"),
        ("-1.25", "2.5", "2.50", "-1.3", "3"),
    ),
    Case(
        "bounds below zero",
        {"type": "number", "minimum": -10.5, "exclusiveMaximum": -2},
        ("-10.5", "-2.01", "-9.999"),
        ("-2", "-2.0", "-10.51", "0", "5"),
    ),
    Case("multipleOf 1", {"type": "integer", "multipleOf": 1}, ("5",), ("5.5",)),
    Case("multipleOf 7", {"type": "integer", "multipleOf": 7}, ("0", "-21", "7007"), ("8", "07")),
    Case(
        "multipleOf 1000",
        {"type": "number", "multipleOf": 1000.0, "exclusiveMinimum": 1000, "maximum": 10**9},
        ("2000", "1000000000", "999999000"),
        ("1000", "2500", "1000001000", "-2000", "0"),
    ),
    Case(
        "multipleOf a fraction",
        {"type": "number", "multipleOf": 0.01, "minimum": 0, "exclusiveMaximum": 1},
        ("0", "0.5", "0.25", "0.99"),
        # 0.29 / 0.01 is no integer as doubles
        ("0.29", "1", "0.505", "0.50", "-0.01"),
    ),
    Case(
        "integers that are multiples of a fraction",
        {"type": "integer", "multipleOf": 1.5, "minimum": -3, "maximum": 6},
        ("-3", "0", "6"),
        ("1", "1.5", "4"),
    ),
    Case(
        "object",
        _PERSON,
        ('{"name": "a"}', '{"name":"a","age":3}', '{"name": "a", "age": 0}'),
        ("{}", '{"age": 3}', '{"age": 3, "name": "a"}', '{"name": 1}', '{ "name": "a"}'),
    ),
    Case(
        "optional keys",
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
        ("{}", '{"a": null}', '{"b": null}', '{"a": null, "b": null}'),
        ('{"b": null, "a": null}', '{"a": null,}', '{, "b": null}', '{"a": 1}'),
    ),
    Case(
        "additionalProperties false",
        {**_PERSON, "additionalProperties": False},
        ('{"name": ""}',),
        ('{"name": "", "x": 1}',),
    ),
    Case(
        "additionalProperties",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ("{}", '{"a": 1}', '{"a": 1, "b": 2}'),
        ('{"a": "x"}', '{"a" : 1}'),
    ),
    Case("empty properties", {"properties": {}}, ("{}",), ('{"a": 1}',)),
    Case("no keys", {"type": "object", "additionalProperties": False}, ("{}",), ('{"a": 1}',)),
    Case(
        "numbers of keys",
        {"additionalProperties": {"const": 1}, "minProperties": 1, "maxProperties": 2},
        ('{"a": 1}', '{"a": 1, "b": 1}'),
        ("{}", '{"a": 1, "b": 1, "c": 1}'),
    ),
    Case(
        "any object",
        {"type": "object"},
        ("{}", '{"a": {"b": [1, "x"]}}'),
        ("[]", '{"a": {"b": [[1]]}}', '{"a"}'),
    ),
    Case("any value", {}, ("1", '"x"', "[[true]]", '{"a": []}'), ("[[[1]]]", "x", "[1,]")),
    Case("true", True, ("null", "[]"), ("",)),
    Case(
        "array",
        {"type": "array", "items": {"type": "integer"}},
        ("[]", "[1]", "[1, 2]", "[1,2,3]"),
        ("[1 ,2]", '["a"]', "[,]", "[1,]", "[ ]"),
    ),
    Case(
        "bounds of arrays",
        {"type": "array", "items": {"enum": [0]}, "minItems": 2, "maxItems": 3},
        ("[0, 0]", "[0,0,0]"),
        ("[]", "[0]", "[0,0,0,0]"),
    ),
    Case(
        "minItems",
        {"type": "array", "items": {"const": 0}, "minItems": 2},
        ("[0,0,0,0]",),
        ("[0]",),
    ),
    Case("maxItems 0", {"type": "array", "maxItems": 0}, ("[]",), ("[1]",)),
    Case("items false", {"type": "array", "items": False}, ("[]",), ("[1]",)),
    Case(
        "prefixItems",
        {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False},
        ("[1, null]",),
        ("[1]", "[null, 1]", "[1, null, 2]"),
    ),
    Case(
        "prefixItems and items",
        {"prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2, "maxItems": 3},
        ("[1, 2]", "[1,2,2]"),
        ("[1]", "[1,2,2,2]"),
    ),
    Case(
        "uniqueItems false", {"type": "array", "uniqueItems": False, "maxItems": 0}, ("[]",), ("1",)
    ),
    Case("$ref", _TREE_FREE, ("[]", '[{"name": "x"}, {"name": ""}]'), ('["x"]',)),
    Case(
        "$ref escapes",
        {"$defs": {"a/b~c": {"const": 1}}, "$ref": "#/$defs/a~1b~0c"},
        ("1",),
        ("2",),
    ),
    Case("anyOf", {"anyOf": [{"type": "integer"}, {"const": "x"}]}, ("5", '"x"'), ('"y"', "5.5")),
    Case(
        "oneOf",
        _DISCRIMINATED,
        ('{"kind": "cat", "lives": 9}', '{"kind": "dog"}', "null"),
        ('{"kind": "dog", "lives": 9}', '{"kind": "cow"}'),
    ),
    Case("allOf", {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"const": 1}}}, ("1",), ("2",)),
    Case(
        "annotations",
        {"title": "T", "description": "d", "default": 1, "examples": [], "x-y": 0, "const": 1},
        ("1",),
        ("2",),
    ),
    Case(
        "key with quotes",
        {"properties": {'a"\n': {"const": 1}}, "required": ['a"\n']},
        (r'{"a\"\n": 1}',),
        ('{"a": 1}',),
    ),
)

_TREE = {
    "type": "object",
    "properties": {"value": {"const": 1}, "left": {"$ref": "#"}},
    "required": ["value"],
}
_LIST = {
    "$defs": {"list": {"anyOf": [{"type": "null"}, {"prefixItems": [{"$ref": "#/$defs/list"}]}]}},
    "$ref": "#/$defs/list",
}
_NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

CASES += (
    Case(
        "recursion that is cut",
        _TREE,
        ('{"value": 1}', '{"value": 1, "left": {"value": 1}}'),
        ('{"value": 1, "left": {"value": 1, "left": {"value": 1}}}', '{"left": {"value": 1}}'),
        recursion=1,
    ),
    Case("no recursion", _TREE, ('{"value": 1}',), ('{"value": 1, "left": {"value": 1}}',)),
    Case("recursion of a definition", _LIST, ("null", "[null]", "[[null]]"), ("[]",), recursion=2),
    Case(
        "allOf",
        {
            "$defs": {"named": _NAMED},
            "allOf": [
                {"$ref": "#/$defs/named"},
                {"properties": {"age": {"minimum": 0}, "name": {"maxLength": 2}}},
                {"properties": {"age": {"type": "integer", "maximum": 9}}, "required": ["age"]},
            ],
        },
        ('{"name": "ab", "age": 3}',),
        ('{"name": "abc", "age": 3}', '{"name": "ab"}', '{"name": "ab", "age": 10}'),
    ),
    Case(
        "allOf with other keys",
        {
            "allOf": [
                {"properties": {"a": {"const": 1}}, "additionalProperties": {"minimum": 5}},
                {"properties": {"b": {"type": "integer"}}, "required": ["a"]},
            ]
        },
        ('{"a": 1}', '{"a": 1, "b": 5}'),
        ('{"a": 1, "b": 4}', '{"b": 5}'),
    ),
    Case(
        "$ref beside keywords",
        {"$defs": {"named": _NAMED}, "$ref": "#/$defs/named", "properties": {"x": {"const": 1}}},
        ('{"name": "a", "x": 1}',),
        ('{"x": 1}',),
    ),
    Case(
        "anyOf beside keywords",
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ('{"a": null}', '{"b": null}', '{"a": null, "b": null}'),
        ("{}",),
    ),
    Case(
        "anyOf twice",
        {
            "allOf": [
                {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 3}]},
            ]
        },
        ("null", "3"),
        ("2", '"a"'),
    ),
    Case(
        "oneOf of required keys",
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ('{"a": null}', '{"b": null}'),
        ("{}", '{"a": null, "b": null}'),
    ),
    Case(
        "oneOf with an optional key of different constants",
        {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"const": 1}}},
                {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}},
            ]
        },
        ('{"kind": "a"}', '{"kind": "a", "x": 1}', '{"kind": "c"}'),
        ("{}", '{"x": 1}', '{"kind": "d"}'),
    ),
    Case(
        "oneOf with a key that one schema requires",
        {
            "$defs": {"name": {"properties": {"v": {"type": "string"}}, "required": ["v"]}},
            "oneOf": [
                {"$ref": "#/$defs/name"},
                {"type": "object", "properties": {"v": {"type": "integer"}, "w": {"const": 0}}},
            ],
        },
        ('{"v": "a"}', '{"v": 2}', '{"w": 0}', "{}"),
        ('{"v": null}', "1", '"a"'),
    ),
    Case(
        "oneOf with keys that the other schemas do not have",
        {
            "oneOf": [
                {
                    "properties": {"name": {"const": 1}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
                {"properties": {"phase": {"const": 1}}, "additionalProperties": False},
            ]
        },
        ('{"name": 1}', '{"phase": 1}', "{}"),
        ('{"name": 1, "phase": 1}', "null", "1"),
    ),
    Case(
        "oneOf of arrays",
        {
            "oneOf": [
                {"type": "array", "items": {"const": "a"}, "minItems": 1},
                {"type": "array", "items": {"type": "null"}},
                {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
            ]
        },
        ('["a", "a"]', "[]", "[null]", "null", "true"),
        ('["a", null]', "[1]"),
    ),
    Case(
        "oneOf of constants",
        {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
        ('"a"', '"c"'),
        ('"d"',),
    ),
    Case("enum in allOf", {"allOf": [{"enum": [1, 2, 3]}, {"enum": [3, 1]}]}, ("1", "3"), ("2",)),
    Case(
        "uniqueItems",
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        ('["a"]', '["a", "c"]', '["a","b","c"]'),
        ("[]", '["b", "a"]', '["a", "a"]'),
    ),
    Case(
        "uniqueItems and maxItems",
        {"items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 2},
        ("[]", "[1, 3]"),
        ("[1, 2, 3]", "[2, 2]"),
    ),
    Case(
        "uniqueItems of one type",
        {
            "uniqueItems": True,
            "items": {"type": ["string", "integer"], "enum": [1, "a", 1.0, None]},
        },
        ('[1, "a"]', "[]"),
        ("[1, 1.0]", "[null]"),
    ),
    Case(
        "oneOf of required keys beside null",
        {
            "type": ["object", "null"],
            "properties": {"a": {"const": 1}, "b": {"const": 1}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ('{"a": 1}',),
        ("null", "{}"),
    ),
    Case(
        "one unique item",
        {"items": {"const": 1}, "uniqueItems": True, "maxItems": 1},
        ("[1]",),
        (),
    ),
    Case(
        "patternProperties",
        {"patternProperties": {"^x-[a-z]+$": {"type": "integer"}}},
        ("{}", '{"x-a": 1, "x-b": 2}'),
        ('{"a": 1}', '{"x-a": null}'),
    ),
    Case(
        "patternProperties beside properties",
        {
            "properties": {"ab": {"minimum": 3}, "c": True},
            "patternProperties": {"a": {"maximum": 5}},
        },
        ('{"ab": 4, "c": null}',),
        ('{"ab": 2}', '{"ab": 6}'),
    ),
    Case(
        "propertyNames",
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"const": 1}},
        ('{"ab": 1}',),
        ('{"abc": 1}',),
    ),
    Case(
        "required key without a schema",
        {"properties": {}, "required": ["b"]},
        ('{"b": 1}',),
        ("{}",),
    ),
    Case(
        "items of false keys",
        {"properties": {"a": False, "b": {"const": 1}}},
        ('{"b": 1}',),
        ('{"a": 1}',),
    ),
    Case(
        "unknown keywords",
        {"type": "null", "enumNames": ["x"], "format": "color"},
        ("null",),
        ("1",),
    ),
    Case(
        "json-pointer",
        {"type": "string", "format": "json-pointer"},
        ('"/a/~1"', '""'),
        ('"a"', '"/~2"'),
    ),
    Case(
        "uri-reference", {"type": "string", "format": "uri-reference"}, ('"/a?b"', '""'), ('"a b"',)
    ),
    Case(
        "relative-json-pointer",
        {"type": "string", "format": "relative-json-pointer"},
        ('"0#"', '"12/a/~1"'),
        ('"/a"', '"01"'),
    ),
    Case(
        "regex",
        {"type": "string", "format": "regex"},
        (r'"^a+\\d*.?$"', '""'),
        ('"*a"', '"a**"', '"(a"'),
    ),
    Case(
        "identifier without references below it",
        {"type": "array", "items": {"$id": "#/items", "type": "null"}, "maxItems": 1},
        ("[]", "[null]"),
        ("null",),
    ),
)

REFUSED = (
    ({"properties": {"a": {"not": {}}}}, "not at /properties/a"),
    ({"items": {"$id": "http://x", "items": {"$ref": "#"}}}, "$id at /items"),
    ({"type": "array", "items": {"uniqueItems": True}}, "uniqueItems at /items"),
    ({"uniqueItems": True, "items": {"enum": ["a"], "minLength": 2}}, "uniqueItems at /"),
    ({"uniqueItems": True, "items": {"enum": ["a"], "not": {}}}, "not at /items"),
    ({"uniqueItems": True, "items": {"enum": 5}}, "enum at /items"),
    (
        {"allOf": [{"patternProperties": {"a": {}}}, {"additionalProperties": {"type": "null"}}]},
        "patternProperties at /",
    ),
    ({"allOf": [{"prefixItems": [{}], "items": {}}, {"items": {}}]}, "prefixItems at /"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf at /"),
    ({"properties": {"a": {}}, "patternProperties": {"a{99999}": {}}}, "patternProperties at /"),
    ({"type": "array", "contains": {}}, "contains at /"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf at /"),
    ({"type": "number", "multipleOf": 1e-4, "minimum": 0, "maximum": 1}, "multipleOf at /"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf at /"),
    ({"type": "integer", "multipleOf": -2}, "multipleOf at /"),
    ({"oneOf": [{"properties": {"a": {"const": 1}}}, {"type": "string"}]}, "oneOf at /"),
    (
        {"oneOf": [{"type": "array", "items": {"const": v}} for v in "ab"]},
        "oneOf at /",
    ),
    (
        {
            "oneOf": [
                {
                    "type": "object",
                    "required": ["a"],
                    "properties": {"a": {"const": 1}, "b": {"const": 1}},
                },
                {"type": "object", "patternProperties": {"a": {}}, "additionalProperties": False},
            ]
        },
        "oneOf at /",
    ),
    ({"patternProperties": []}, "patternProperties at /"),
    ({"if": {}, "then": {}}, "if at /"),
    ({"type": "int"}, "type at /"),
    ({"type": []}, "type at /"),
    ({"enum": []}, "enum at /"),
    ({"enum": ["\ud800"]}, "enum at /"),
    ({"type": "string", "enum": [1]}, "enum at /"),
    ({"type": "string", "format": "uri-template"}, "format at /"),
    ({"patternProperties": {"a": {}, "b": {}}}, "patternProperties at /"),
    ({"patternProperties": {"(": {}}, "required": ["a"]}, "patternProperties at /"),
    ({"propertyNames": {"maxLength": 3}, "properties": {"a": {}}}, "propertyNames at /"),
    ({"type": "string", "pattern": "(?<=a)"}, "pattern at /"),
    ({"type": "string", "pattern": "(a"}, "pattern at /"),
    ({"type": "string", "pattern": 1}, "pattern at /"),
    ({"type": "string", "minLength": -1}, "minLength at /"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength at /"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "maximum at /"),
    ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "maximum at /"),
    ({"type": "integer", "minimum": True}, "minimum at /"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems at /"),
    ({"properties": {"a": {}}, "required": "b"}, "required at /"),
    ({"properties": {"a/b": {"type": "x"}}}, "type at /properties/a~1b"),
    ({"properties": {"a": {}}, "minProperties": 1}, "minProperties at /"),
    ({"properties": []}, "properties at /"),
    ({"$ref": "http://a"}, "$ref at /"),
    ({"$ref": "#/$defs/x"}, "$ref at /"),
    ({"enum": ["a"], "minLength": 1}, "minLength at /"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "pattern at /"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf at /"),
    ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf at /"),
    ({"allOf": []}, "allOf at /"),
    ({"allOf": [{}, {"not": {}}]}, "not at /"),
    ({"minLength": 1, "minItems": 1}, "type at /"),
    ([], "schema at /"),
    ({"items": {"items": 3}}, "items at /items"),
    ({"additionalProperties": {"const": 1}, "minProperties": 2}, "minProperties at /"),
)
"""Schemas outside the subset, with the keyword and the place that their errors name."""
