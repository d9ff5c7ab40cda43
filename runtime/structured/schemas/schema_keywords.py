"""The keywords of JSON Schema: what they hold, and which are supported.

Does not know about their meaning, languages or tokens.
"""

from collections.abc import Callable
from typing import Any

from .json_scalars import schema_error

_NUMBER_KEYS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
KEYS_OF_TYPE: dict[str, set[str]] = {
    "object": {
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        *("patternProperties", "propertyNames"),
    },
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "additionalItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _NUMBER_KEYS,
    "number": _NUMBER_KEYS,
    "boolean": set(),
    "null": set(),
}
COMBINATIONS = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords that hold other schemas of the same value."""
CONSTANTS = ("enum", "const")
ASSERTIONS = {*COMBINATIONS, *CONSTANTS, "type"}.union(*KEYS_OF_TYPE.values())
_UNSUPPORTED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor"),
    *("$recursiveRef", "$recursiveAnchor"),
}


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(holds: Callable[[Any], bool], *, or_empty: bool) -> Callable[[Any], bool]:
    def holds_for_all(value: Any) -> bool:
        is_long_enough = isinstance(value, list) and (or_empty or len(value) > 0)
        return is_long_enough and all(map(holds, value))

    return holds_for_all


def _is_map_of_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(n, str) and n in KEYS_OF_TYPE for n in names)


_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"one of {', '.join(KEYS_OF_TYPE)}, or a list of them", _is_type),
    "enum": (
        "a list of values that is not empty",
        _is_list_of(lambda value: True, or_empty=False),
    ),
    "$ref": ("a reference, which is a string", _is_text),
    "required": ("a list of keys", _is_list_of(_is_text, or_empty=True)),
    "uniqueItems": ("true or false", lambda value: isinstance(value, bool)),
    "items": (
        "a schema, or a list of schemas",
        lambda value: _is_schema(value) or _is_list_of(_is_schema, or_empty=True)(value),
    ),
    **dict.fromkeys(
        ("properties", "patternProperties"), ("an object of schemas", _is_map_of_schemas)
    ),
    **dict.fromkeys(
        ("anyOf", "oneOf", "allOf"),
        ("a list of schemas that is not empty", _is_list_of(_is_schema, or_empty=False)),
    ),
    "prefixItems": ("a list of schemas", _is_list_of(_is_schema, or_empty=True)),
    **dict.fromkeys(
        ("additionalProperties", "propertyNames", "additionalItems"), ("a schema", _is_schema)
    ),
    **dict.fromkeys(("pattern", "format"), ("a string", _is_text)),
    **dict.fromkeys(_NUMBER_KEYS, ("a number", _is_number)),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        ("a number from 0 up", _is_count),
    ),
}


def check_keywords(schema: Any, at: str) -> None:
    """Check that a schema has supported keywords only, and that they hold what they should.

    Keywords that JSON Schema does not define are annotations, as its specification says (JSON
    Schema Core 2020-12, section 6.5).

    Args:
      schema: The schema.
      at: Its JSON pointer.

    Raises:
      SchemaError: A keyword is not supported, or holds something else; the message names the first.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise schema_error("", at, "a schema, which is an object, true or false", schema)
    for key, value in schema.items():
        # an identifier inside a schema changes the meaning of the references below it
        if key in _UNSUPPORTED or (key == "$id" and at and _refers(schema)):
            raise schema_error(key, at, "a schema without this keyword, which is not supported")
        if key in _VALUES:
            expected, holds = _VALUES[key]
            if not holds(value):
                raise schema_error(key, at, expected, value)


def _refers(value: Any) -> bool:
    """Whether there is a reference anywhere in a value."""
    if isinstance(value, dict):
        return "$ref" in value or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def implied_types(schema: dict[str, Any], at: str) -> list[str]:
    """The types of a schema without `type`, whose keywords say what it describes.

    Raises:
      SchemaError: The keywords belong to several types.
    """
    kinds = [t for t, own in KEYS_OF_TYPE.items() if own & schema.keys() and t != "integer"]
    if len(kinds) > 1:
        raise schema_error("type", at, "a type, as the keywords belong to several", None)
    return kinds
