"""Combines JSON Schemas: one schema for the values of two.

Does not know about references, languages or tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from .json_scalars import schema_error
from .schema_keywords import ASSERTIONS

Schema = Any
"""A JSON Schema: an object, true or false."""
_TIGHTEST: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), min),
    **dict.fromkeys(("minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), min),
}
_SCHEMAS = ("items", "additionalProperties", "propertyNames")
"""Keywords whose value is a schema."""
_CHOICES = ("anyOf", "oneOf")
_REST_OF_ITEMS = ("items", "additionalItems")
_COMBINED_BEFORE = ("type", "properties", "required", "enum", "const", "allOf")


def conjunction(schemas: Sequence[Schema], at: str) -> Schema:
    """A schema of the values that are valid for all of some schemas.

    Args:
      schemas: The schemas, with the keywords that decide values only, and without `$ref`.
      at: The JSON pointer that errors name.

    Raises:
      SchemaError: They have keywords that cannot be combined.
    """
    return reduce(lambda left, right: _both(left, right, at), schemas, True)


def _both(left: Schema, right: Schema, at: str) -> Schema:
    if left is False or right is False:
        return False
    if left is True or right is True:
        return right if left is True else left
    _check_combined(left, right, at)
    combined: dict[str, Any] = {**right, **left}
    if "type" in left and "type" in right:
        combined["type"] = _common_types(left["type"], right["type"])
        if not combined["type"]:
            return False
    if any("properties" in schema or "required" in schema for schema in (left, right)):
        combined |= _both_properties(left, right)
    if values := [v for v in map(values_in, (left, right)) if v is not None]:
        combined.pop("const", None)
        combined["enum"] = [v for v in values[0] if is_in(v, values[-1])]
        if not combined["enum"]:
            return False
    combined["allOf"] = [*left.get("allOf", []), *right.get("allOf", [])]
    for key in left.keys() & right.keys():
        one, other = left[key], right[key]
        if key in _TIGHTEST:
            combined[key] = _TIGHTEST[key](one, other)
        elif key in _SCHEMAS and one != other:
            combined[key] = {"allOf": [one, other]}
        elif key in _CHOICES:
            combined["allOf"].append({key: other})
        elif key == "uniqueItems":
            combined[key] = one or other
        elif key not in _COMBINED_BEFORE and one != other:
            raise schema_error(key, at, "one value where several schemas hold", [one, other])
    if not combined["allOf"]:
        del combined["allOf"]
    return combined


def _check_combined(left: Mapping[str, Any], right: Mapping[str, Any], at: str) -> None:
    """Refuse keywords of one schema that change the meaning of keywords of the other."""
    one, other = left.get("patternProperties"), right.get("patternProperties")
    if one != other and ("additionalProperties" in left or "additionalProperties" in right):
        expected = "no additionalProperties where schemas with other patterns hold, too"
        raise schema_error("patternProperties", at, expected)
    tuples = [s["items"] if isinstance(s.get("items"), list) else None for s in (left, right)]
    first = [s.get("prefixItems", x) for s, x in zip((left, right), tuples, strict=True)]
    if first[0] != first[1] and any(key in s for s in (left, right) for key in _REST_OF_ITEMS):
        raise schema_error("prefixItems", at, "no items where schemas with other tuples hold, too")


def _common_types(left: Any, right: Any) -> list[Any]:
    lists = [types if isinstance(types, list) else [types] for types in (left, right)]
    one, other = ([*t, *(["integer"] if "number" in t else [])] for t in lists)
    common = [name for name in one if name in other]
    return [name for name in common if not (name == "integer" and "number" in common)]


def _both_properties(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of two schemas of objects, each with the schemas that both have for it.

    A schema that does not name a key has its `additionalProperties` for it.
    """
    keys = dict.fromkeys([*left.get("properties", {}), *right.get("properties", {})])
    properties = {}
    for key in keys:
        own = [
            schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
            for schema in (left, right)
        ]
        kept = [False] if False in own else [s for s in own if s is not True and s != {}]
        properties[key] = kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True
    required = dict.fromkeys([*left.get("required", []), *right.get("required", [])])
    return {"properties": properties, "required": list(required)}


def values_in(schema: Schema) -> list[Any] | None:
    """The values that a schema lists; None for a schema without a list."""
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum")
    if "const" not in schema:
        return values
    return [v for v in [schema["const"]] if values is None or is_in(v, values)]


def is_in(value: Any, values: Sequence[Any]) -> bool:
    """Whether a value equals one of others, as JSON Schema compares them."""
    return canonical(value) in set(map(canonical, values))


def canonical(value: Any) -> str:
    """A text that is the same for equal values: `1` and `1.0` are, `1` and `true` are not."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    return value


def exactly_one_required(options: Sequence[Schema]) -> list[Schema] | None:
    """Schemas that have no value in common, in the place of options that only require keys.

    Each of them forbids a key that each other option requires. An option that requires all keys of
    another one holds no value, and is left out. None for other options.
    """
    required = [
        option["required"]
        for option in options
        if isinstance(option, dict) and option.keys() & ASSERTIONS == {"required"}
    ]
    if len(required) < len(options):
        return None
    found = []
    for own in required:
        missing = [[k for k in other if k not in own] for other in required if other is not own]
        if all(missing):
            forbidden = {keys[0]: False for keys in missing}
            # other types are valid for all options
            found.append({"type": "object", "required": own, "properties": forbidden})
    return found
