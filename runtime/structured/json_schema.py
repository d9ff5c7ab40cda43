"""Reads JSON Schemas (draft 2020-12, a subset) as languages of JSON texts.

Every text of the language is valid for the schema. The reverse does not hold: keys stand in the
published order, objects with published keys have no others, and `json_text` writes every value in
one way. Keywords outside the subset are refused with their place, as are recursive references,
which are not regular. Does not know about tokens or requests.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .json_scalars import count_of, literal_of, number_of, schema_error, string_of, values_of
from .json_text import (
    BOOLEAN,
    COLON,
    COMMA,
    STRING,
    any_value,
    json_map,
)
from .language import (
    Alternatives,
    Concatenation,
    Language,
    Literal,
    Members,
    Origin,
    Repetition,
    Separated,
    sequence,
)

DEPTH_OF_ANY = 2
"""Maximum number of arrays and objects inside each other where a schema allows any value."""
_MAX_DEPTH = 64
_MAX_SCHEMAS = 10_000
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
    *("writeOnly", "$schema", "$comment", "$defs", "definitions", "discriminator"),
}
_NUMBER_KEYS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KEYS_OF_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _NUMBER_KEYS,
    "number": _NUMBER_KEYS,
    "boolean": set(),
    "null": set(),
}
_ASSERTIONS = set().union(*_KEYS_OF_TYPE.values())
_WHOLE = {"$ref", "enum", "const", "anyOf", "oneOf", "allOf"}
"""Keywords that describe a value without the others."""


def read_schema(schema: Any) -> Language:
    """The language of a schema.

    Raises:
      SchemaError: The schema is wrong, or uses something outside the subset.
    """
    return _Reader(schema).read(schema, "", ())


class _Reader:
    """Reads a schema and those that it refers to."""

    def __init__(self, root: Any):
        self._root = root
        self._num_read, self._depth = 0, 0

    def read(self, schema: Any, at: str, open_refs: tuple[str, ...]) -> Language:
        """The language of a schema.

        Args:
          schema: The schema.
          at: Its JSON pointer.
          open_refs: The references that led to it.
        """
        self._num_read += 1
        if self._depth == _MAX_DEPTH or self._num_read > _MAX_SCHEMAS:
            expected = f"at most {_MAX_DEPTH} schemas inside each other, and {_MAX_SCHEMAS} in all"
            raise schema_error("", at, f"{expected}, those of references included")
        self._depth += 1
        language = self._read(schema, at, open_refs)
        self._depth -= 1
        return language

    def _read(self, schema: Any, at: str, open_refs: tuple[str, ...]) -> Language:
        if schema is True or schema == {}:
            return any_value(DEPTH_OF_ANY)
        if not isinstance(schema, dict):
            raise schema_error("", at, "a schema, which is an object or true", schema)
        self._check_keys(schema, at)
        keys = {key for key in schema if key not in _ANNOTATIONS and key[:2] != "x-"} - {"$id"}
        if whole := [key for key in schema if key in _WHOLE]:
            others = sorted(
                keys - {whole[0]} - ({"type"} if whole[0] in ("enum", "const") else set())
            )
            if others:
                raise schema_error(others[0], at, f"no other keyword beside {whole[0]}")
            return self._whole(whole[0], schema, at, open_refs)
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not types or any(not isinstance(t, str) or t not in _KEYS_OF_TYPE for t in types):
                expected = f"one of {', '.join(_KEYS_OF_TYPE)}, or a list of them"
                raise schema_error("type", at, expected, schema["type"])
        else:
            types = self._implied_types(keys, at)
            if not types:
                return any_value(DEPTH_OF_ANY)
        if "number" in types:
            types = [t for t in types if t != "integer"]
        options = [self._of_type(t, schema, at, open_refs) for t in dict.fromkeys(types)]
        return options[0] if len(options) == 1 else Alternatives(tuple(options), Origin("type", at))

    def _check_keys(self, schema: Mapping[str, Any], at: str) -> None:
        for key in schema:
            is_known = key in _ANNOTATIONS or key in _ASSERTIONS or key in _WHOLE or key == "type"
            if not (is_known or key.startswith("x-") or (key == "$id" and not at)):
                raise schema_error(key, at, "a schema without this keyword, which is not supported")

    def _implied_types(self, keys: set[str], at: str) -> list[str]:
        """The types of a schema without `type`, whose keywords say what it describes."""
        if not keys:
            return []
        kinds = [t for t, own in _KEYS_OF_TYPE.items() if own & keys and t != "integer"]
        if len(kinds) > 1:
            raise schema_error("type", at, "a type, as the keywords belong to several", None)
        return kinds

    def _whole(
        self, key: str, schema: Mapping[str, Any], at: str, open_refs: tuple[str, ...]
    ) -> Language:
        value = schema[key]
        if key == "$ref":
            return self._ref(value, at, open_refs)
        if key in ("enum", "const"):
            return values_of(key, schema, at)
        if not isinstance(value, list) or not value:
            raise schema_error(key, at, "a list of schemas that is not empty", value)
        if key == "allOf" and len(value) > 1:
            raise schema_error(key, at, "a single schema, as several are not supported", value)
        options = [self.read(s, f"{at}/{key}/{i}", open_refs) for i, s in enumerate(value)]
        if key == "oneOf":
            self._check_apart(value, at)
        return options[0] if len(options) == 1 else Alternatives(tuple(options), Origin(key, at))

    def _ref(self, ref: Any, at: str, open_refs: tuple[str, ...]) -> Language:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise schema_error("$ref", at, "a reference inside the schema, as #/$defs/name", ref)
        if ref in open_refs or ref == "#":
            raise schema_error("$ref", at, "no recursion, which is not regular", ref)
        return self.read(self._target(ref, at), ref[1:], (*open_refs, ref))

    def _target(self, ref: str, at: str) -> Any:
        target = self._root
        for part in ref.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name in map(str, range(len(target))):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise schema_error("$ref", at, "a reference to a part of the schema", ref)
        return target

    def _check_apart(self, options: Sequence[Any], at: str) -> None:
        """Refuse `oneOf` unless no value can be valid for two of its schemas, which were read."""
        schemas = []
        for option in options:
            while isinstance(option, dict) and "$ref" in option:
                option = self._target(option["$ref"], at)
            schemas.append(option)
        for i, left in enumerate(schemas):
            if not all(_are_apart(left, right) for right in schemas[:i]):
                expected = (
                    "schemas of different types, or objects with a required key of "
                    "different constants, or anyOf in its place"
                )
                raise schema_error("oneOf", at, expected)

    def _of_type(
        self, name: str, schema: Mapping[str, Any], at: str, open_refs: tuple[str, ...]
    ) -> Language:
        match name:
            case "object":
                return self._object(schema, at, open_refs)
            case "array":
                return self._array(schema, at, open_refs)
            case "string":
                return string_of(schema, at)
            case "integer" | "number":
                return number_of(name, schema, at)
            case "boolean":
                return BOOLEAN
        return Literal("null")

    def _object(self, schema: Mapping[str, Any], at: str, open_refs: tuple[str, ...]) -> Language:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise schema_error("properties", at, "an object of schemas", properties)
        required = schema.get("required", [])
        if not isinstance(required, list) or any(not isinstance(key, str) for key in required):
            raise schema_error("required", at, "a list of keys", required)
        if missing := [key for key in required if key not in properties]:
            raise schema_error("required", at, "keys that properties has", missing[0])
        others = schema.get("additionalProperties", True)
        least = count_of(schema, "minProperties", at) or 0
        most = count_of(schema, "maxProperties", at)
        if not properties and "additionalProperties" not in schema and "properties" in schema:
            others = False
        if not properties:
            return self._map(others, least, most, at, open_refs)
        if least > len(set(required)):
            expected = f"at most the number of required keys, {len(set(required))}"
            raise schema_error("minProperties", at, expected, least)
        if most is not None and most < len(properties):
            expected = f"at least the number of properties, {len(properties)}"
            raise schema_error("maxProperties", at, expected, most)
        members = []
        for key, value in properties.items():
            place = f"{at}/properties/{key.replace('~', '~0').replace('/', '~1')}"
            if value is False and key not in required:
                continue
            member = sequence(
                literal_of(key, "properties", at), COLON, self.read(value, place, open_refs)
            )
            members.append((member, key in required))
        return sequence("{", Members(tuple(members), COMMA), "}")

    def _map(
        self, others: Any, least: int, most: int | None, at: str, open_refs: tuple[str, ...]
    ) -> Language:
        """An object whose keys are not published."""
        if others is False or most == 0:
            if least:
                raise schema_error(
                    "minProperties", at, "0 beside additionalProperties false", least
                )
            return Literal("{}")
        if least > 1:
            raise schema_error("minProperties", at, "at most 1, as keys may repeat", least)
        value = self.read(others, f"{at}/additionalProperties", open_refs)
        if least == 0 and most is None:
            return json_map(value)
        item = sequence(STRING, COLON, value)
        return sequence("{", Separated(item, COMMA, least, most, Origin("maxProperties", at)), "}")

    def _array(self, schema: Mapping[str, Any], at: str, open_refs: tuple[str, ...]) -> Language:
        least = count_of(schema, "minItems", at) or 0
        most = count_of(schema, "maxItems", at)
        if most is not None and most < least:
            raise schema_error("maxItems", at, f"at least minItems, {least}", most)
        if schema.get("uniqueItems", False) is not False:
            raise schema_error("uniqueItems", at, "false, as equal items cannot be excluded")
        items = schema.get("items", True)
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise schema_error("prefixItems", at, "a list of schemas", first)
        origin = Origin("minItems" if most is None else "maxItems", at)
        if not first:
            if items is False:
                most = 0
            elif most != 0:
                item = self.read(items, f"{at}/items", open_refs)
                return sequence("[", Separated(item, COMMA, least, most, origin), "]")
            return Literal("[]")
        if most is not None and most < len(first):
            raise schema_error(
                "maxItems", at, f"at least the number of prefixItems, {len(first)}", most
            )
        parts: list[Language] = []
        for index, item in enumerate(first):
            parts += [COMMA] if index else []
            parts.append(self.read(item, f"{at}/prefixItems/{index}", open_refs))
        if items is not False and (
            least > len(first) or ("items" in schema and most != len(first))
        ):
            item = sequence(COMMA, self.read(items, f"{at}/items", open_refs))
            rest = None if most is None else most - len(first)
            parts.append(Repetition(item, max(0, least - len(first)), rest, origin))
        elif least > len(first):
            raise schema_error("minItems", at, f"at most {len(first)} beside items false", least)
        return Concatenation((Literal("["), *parts, Literal("]")))


def _are_apart(left: Any, right: Any) -> bool:
    """Whether no value is valid for both schemas, as their types or constants show."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return False
    types = [_types(schema) for schema in (left, right)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types != [{"object"}, {"object"}]:
        return False
    for key in set(left.get("required", [])) & set(right.get("required", [])):
        own, other = (_constants(s.get("properties", {}).get(key)) for s in (left, right))
        if own and other and not own & other:
            return True
    return False


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type")
    given = types if isinstance(types, list) else [types]
    # beside constants, types are not checked
    names = {name for name in given if isinstance(name, str)}
    return names | ({"integer"} if "number" in names else set())


def _constants(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return {json.dumps(value, sort_keys=True) for value in values}
