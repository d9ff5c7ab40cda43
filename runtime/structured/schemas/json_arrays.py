"""Reads the parts of JSON Schemas that describe arrays.

Does not know about references or tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..byte_automaton import both, compile_language
from ..language import (
    NOTHING,
    Alternatives,
    Compiled,
    Concatenation,
    Language,
    Literal,
    Members,
    Origin,
    Repetition,
    sequence,
)
from .json_scalars import count_of, errors_at, has_type, literal_of, schema_error
from .json_text import COMMA
from .schema_keywords import ASSERTIONS, CONSTANTS, check_keywords
from .schema_logic import Schema, canonical, values_in

ReadPart = Callable[[Schema, str], Language]
"""Reads a schema inside another one; the second argument is its JSON pointer."""


def array_of(schema: Mapping[str, Any], at: str, read: ReadPart) -> Language:
    """The arrays that a schema allows."""
    least = count_of(schema, "minItems") or 0
    most = count_of(schema, "maxItems")
    if most is not None and most < least:
        raise schema_error("maxItems", at, f"at least minItems, {least}", most)
    items, first = schema.get("items", True), schema.get("prefixItems", [])
    if isinstance(items, list):
        # tuples were written so before draft 2020-12
        items, first = schema.get("additionalItems", True), items
    if schema.get("uniqueItems", False) and (most is None or most > 1):
        return sequence("[", _different(items, first, at, least, most), "]")
    origin = Origin("minItems" if most is None else "maxItems", at)
    if first:
        is_open = least > len(first) or "items" in schema or "additionalItems" in schema
        rest = items if is_open else False
        return sequence("[", _tuple(first, rest, at, least, most, read, origin), "]")
    if items is False or most == 0:
        return NOTHING if least else Literal("[]")
    item = read(items, f"{at}/items")
    return sequence("[", Repetition(item, least, most, origin, COMMA), "]")


def _tuple(
    first: Sequence[Schema],
    rest: Schema,
    at: str,
    least: int,
    most: int | None,
    read: ReadPart,
    origin: Origin,
) -> Language:
    """Items that have schemas of their own, and further ones; without the brackets."""
    num_first = len(first)
    if most is not None and most < num_first:
        raise schema_error("maxItems", at, f"at least the number of prefixItems, {num_first}", most)
    if rest is False and least > num_first:
        raise schema_error("minItems", at, f"at most {num_first} beside items false", least)
    parts: list[Language] = []
    for index, item in enumerate(first):
        parts += [COMMA] if index else []
        parts.append(read(item, f"{at}/prefixItems/{index}"))
    if rest is not False and most != num_first:
        item = sequence(COMMA, read(rest, f"{at}/items"))
        num_rest = None if most is None else most - num_first
        parts.append(Repetition(item, max(0, least - num_first), num_rest, origin))
    return Concatenation(tuple(parts))


def _different(
    items: Schema, first: Sequence[Schema], at: str, least: int, most: int | None
) -> Language:
    """Different items of listed values, in the order of the list; without the brackets."""
    check_keywords(items, f"{at}/items")
    items = {} if isinstance(items, bool) else items
    keys = items.keys() & ASSERTIONS
    if not keys & {*CONSTANTS} or keys - {*CONSTANTS, "type"} or first:
        expected = "false, or items with an enum, as other equal items cannot be excluded"
        raise schema_error("uniqueItems", at, expected, True)
    values = [
        v for v in values_in(items) or [] if "type" not in items or has_type(v, items["type"])
    ]
    different = {}
    for value in values:
        different.setdefault(canonical(value), literal_of(value, "enum", f"{at}/items"))
    texts = tuple(different.values())
    in_order = Members(tuple((text, False) for text in texts), COMMA)
    if least == 0 and (most is None or most >= len(texts)):
        return in_order
    counted = Repetition(Alternatives(texts), least, most, Origin("minItems", at), COMMA)
    with errors_at(Origin("uniqueItems", at)):
        return Compiled(both(compile_language(in_order), compile_language(counted)))
