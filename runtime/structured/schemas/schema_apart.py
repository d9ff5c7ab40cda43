"""Whether two JSON Schemas have a value in common, for `oneOf`.

Does not know about languages or tokens. Guarantees: schemas that are said to be apart have no value
in common; others may have one.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from .json_scalars import has_type
from .schema_keywords import ASSERTIONS, implied_types
from .schema_logic import Schema, canonical, values_in

Resolve = Callable[[Schema], Schema]
"""Follows the reference of a schema; a schema without one is itself."""
_MAX_DEPTH = 8
_MAX_COMPARISONS = 3_000
"""Maximum number of comparisons for one `oneOf`; options that need more are not told apart."""


def apart_options(options: Sequence[Schema], resolve: Resolve, at: str) -> list[Schema] | None:
    """Schemas in the place of those of a `oneOf`, of which no two have a value in common.

    An option whose keywords describe objects gets the type. Where only optional keys tell two
    options apart, each requires a key whose values are not valid for the other.

    Args:
      options: The schemas.
      resolve: Follows references.
      at: The JSON pointer that errors name.

    Returns:
      A schema for each option, which holds values of this option alone; None if some options
      cannot be told apart.
    """
    comparer = _Comparer(resolve)
    targets = [resolve(option) for option in options]
    added: list[dict[str, Any]] = [{} for _ in options]
    for number, target in enumerate(targets):
        if isinstance(target, dict) and _describes_objects(target, at):
            added[number]["type"] = "object"
            targets[number] = {**target, "type": "object"}
    for i, j in combinations(range(len(options)), 2):
        # every value of another type is valid for a schema of objects without the type
        is_open = bool(added[i].get("type") or added[j].get("type"))
        if is_open and not all(map(_is_of_objects, (targets[i], targets[j]))):
            return None
        if comparer.are_apart(targets[i], targets[j]):
            continue
        for one, other in ((i, j), (j, i)):
            if (key := comparer.telling_key(targets[one], targets[other])) is None:
                return None
            required = added[one].setdefault("required", [])
            required += [] if key in required else [key]
    return [
        {"allOf": [option, own]} if own else option
        for option, own in zip(options, added, strict=True)
    ]


class _Comparer:
    """Tells schemas apart, in a bounded number of comparisons."""

    def __init__(self, resolve: Resolve):
        self._resolve = resolve
        self._remaining = _MAX_COMPARISONS

    def are_apart(self, left: Schema, right: Schema, depth: int = 0) -> bool:
        """Whether no value is valid for both schemas, as types, constants, keys or items show."""
        if depth > _MAX_DEPTH or self._remaining == 0:
            return False
        self._remaining -= 1

        def apart(one: Schema, other: Schema) -> bool:
            return self.are_apart(one, other, depth + 1)

        left, right = self._resolve(left), self._resolve(right)
        if left is False or right is False:
            return True
        if not (isinstance(left, dict) and isinstance(right, dict)):
            return False
        for one, other in ((left, right), (right, left)):
            for key in ("anyOf", "oneOf"):
                if key in one and all(apart(option, other) for option in one[key]):
                    return True
            if any(apart(part, other) for part in one.get("allOf", [])):
                return True
            if (values := values_in(one)) is not None and _none_fits(values, other):
                return True
        types = [_types(schema) for schema in (left, right)]
        if types[0] and types[1] and not types[0] & types[1]:
            return True
        if _is_of_objects(left) and _is_of_objects(right):
            # a key that one of them requires is in every value of both
            required = dict.fromkeys([*left.get("required", []), *right.get("required", [])])
            return any(apart(_of_key(left, key), _of_key(right, key)) for key in required)
        if types == [{"array"}, {"array"}] and max(s.get("minItems", 0) for s in (left, right)) > 0:
            return apart(_of_items(left), _of_items(right))
        return False

    def telling_key(self, schema: Schema, other: Schema) -> str | None:
        """A key whose values in one schema of objects are never valid for this key in the other."""
        if not (_is_of_objects(schema) and _is_of_objects(other)):
            return None
        for key, value in schema.get("properties", {}).items():
            if value is not False and self.are_apart(value, _of_key(other, key)):
                return key
        return None


def _describes_objects(schema: Mapping[str, Any], at: str) -> bool:
    """Whether a schema without a type has keywords of objects alone."""
    known = {key: value for key, value in schema.items() if key in ASSERTIONS}
    return "type" not in schema and implied_types(known, at) == ["object"]


def _is_of_objects(schema: Schema) -> bool:
    return isinstance(schema, dict) and _types(schema) == {"object"}


def _none_fits(values: Sequence[Any], schema: Mapping[str, Any]) -> bool:
    """Whether no listed value is valid for a schema, as its type or its constants show."""
    others = values_in(schema)
    constants = None if others is None else set(map(canonical, others))
    return not any(
        (constants is None or canonical(value) in constants)
        and ("type" not in schema or has_type(value, schema["type"]))
        for value in values
    )


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type")
    given = types if isinstance(types, list) else [types]
    names = {name for name in given if isinstance(name, str)}
    return names | ({"integer"} if "number" in names else set())


def _of_key(schema: Mapping[str, Any], key: str) -> Schema:
    """A schema of the values that a key may have."""
    if key in (properties := schema.get("properties", {})):
        return properties[key]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _of_items(schema: Mapping[str, Any]) -> Schema:
    """A schema of the items of an array that are all alike."""
    items = schema.get("items", True)
    return True if "prefixItems" in schema or isinstance(items, list) else items
