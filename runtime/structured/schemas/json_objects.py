"""Reads the parts of JSON Schemas that describe objects.

Does not know about references or tokens.
"""

from collections.abc import Mapping
from typing import Any

from ..byte_automaton import compile_language
from ..language import NOTHING, Language, Literal, Members, Origin, Repetition, sequence
from ..pattern import read_pattern
from .json_arrays import ReadPart
from .json_scalars import count_of, errors_at, literal_of, schema_error
from .json_text import COLON, COMMA, json_map
from .schema_logic import Schema


def object_of(schema: Mapping[str, Any], at: str, read: ReadPart) -> Language:
    """The objects that a schema allows."""
    required = schema.get("required", [])
    others = schema.get("additionalProperties", True)
    patterns = schema.get("patternProperties", {})
    published = dict(schema.get("properties", {}))
    for key in required:
        is_other = not _fitting(key, patterns, at)
        published.setdefault(key, others if is_other else True)
    if not published:
        is_closed = "properties" in schema and "additionalProperties" not in schema
        others = False if is_closed else others
        return _map(schema, others, patterns, at, read)
    least = count_of(schema, "minProperties") or 0
    most = count_of(schema, "maxProperties")
    if least > len(set(required)):
        expected = f"at most the number of required keys, {len(set(required))}"
        raise schema_error("minProperties", at, expected, least)
    if most is not None and most < len(published):
        expected = f"at least the number of properties, {len(published)}"
        raise schema_error("maxProperties", at, expected, most)
    if "propertyNames" in schema:
        raise schema_error("propertyNames", at, "objects without properties beside it")
    members = []
    for key, value in published.items():
        place = f"{at}/properties/{key.replace('~', '~0').replace('/', '~1')}"
        if value is False and key not in required:
            continue
        if fitting := _fitting(key, patterns, at):
            value = {"allOf": [value, *fitting]}
        member = sequence(literal_of(key, "properties", at), COLON, read(value, place))
        members.append((member, key in required))
    return sequence("{", Members(tuple(members), COMMA), "}")


def _fitting(key: str, patterns: Mapping[str, Schema], at: str) -> list[Schema]:
    """The schemas of `patternProperties` that hold for a key."""
    return [schema for pattern, schema in patterns.items() if _matches(pattern, key, at)]


def _matches(pattern: str, key: str, at: str) -> bool:
    with errors_at(origin := Origin("patternProperties", at)):
        language = read_pattern(pattern, is_search=True, origin=origin)
        return compile_language(language).accepts(key.encode(errors="surrogatepass"))


def _map(
    schema: Mapping[str, Any],
    others: Schema,
    patterns: Mapping[str, Schema],
    at: str,
    read: ReadPart,
) -> Language:
    """An object of a schema without `properties`."""
    least = count_of(schema, "minProperties") or 0
    most = count_of(schema, "maxProperties")
    if least > 1:
        raise schema_error("minProperties", at, "at most 1, as keys may repeat", least)
    names = [{"type": "string"}, schema.get("propertyNames", True)]
    place = f"{at}/additionalProperties"
    if patterns:
        if len(patterns) > 1:
            expected = "one pattern beside no properties, as a key may fit several"
            raise schema_error("patternProperties", at, expected)
        ((pattern, others),) = patterns.items()
        place = f"{at}/patternProperties"
        names.append({"pattern": pattern})
    if others is False or most == 0:
        return NOTHING if least else Literal("{}")
    key, value = read({"allOf": names}, f"{at}/propertyNames"), read(others, place)
    if least == 0 and most is None:
        return json_map(value, key)
    item = sequence(key, COLON, value)
    return sequence("{", Repetition(item, least, most, Origin("maxProperties", at), COMMA), "}")
