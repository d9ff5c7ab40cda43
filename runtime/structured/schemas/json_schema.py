"""Reads JSON Schemas (draft 2020-12, a subset) as languages of JSON texts.

Every text of the language is valid for the schema. The reverse does not hold: keys have the order
of `properties`, objects with `properties` have no other keys, a recursive reference is followed a
bounded number of times, and `json_text` writes every value in one way. Keywords outside the subset
are refused with their place. Does not know about tokens or requests.
"""

from collections.abc import Sequence
from typing import Any

from ..language import NOTHING, Alternatives, Language, Literal, Origin, ReadLanguage, TooManyParts
from .json_arrays import array_of
from .json_objects import object_of
from .json_scalars import SchemaError, number_of, schema_error, values_of
from .json_strings import string_of
from .json_text import BOOLEAN, any_value
from .schema_apart import apart_options
from .schema_keywords import ASSERTIONS, COMBINATIONS, CONSTANTS, check_keywords, implied_types
from .schema_logic import Schema, conjunction, exactly_one_required

DEPTH_OF_ANY = 2
"""Maximum number of arrays and objects inside each other where a schema allows any value."""
_MAX_DEPTH = 64
_MAX_SCHEMAS = 10_000
_Refs = tuple[str, ...]
"""The references that led to a schema, in order."""


def read_schema(schema: Any, recursion: int = 0) -> ReadLanguage:
    """Read a schema.

    Args:
      schema: The schema.
      recursion: The maximum number of times that a reference leads to itself. A value that needs
        more is not in the language.

    Raises:
      SchemaError: The schema is wrong, or uses something outside the subset.
      TooManyParts: It has too many parts.
    """
    reader = SchemaReader(schema, recursion)
    language = reader.read(schema, "", ("#",))
    return ReadLanguage(language, reader.is_recursive)


class SchemaReader:
    """Reads the parts of a schema, and those that references lead to."""

    def __init__(self, root: Any, recursion: int):
        self._root, self._recursion = root, recursion
        self._num_read, self._depth = 0, 0
        self.is_recursive = False

    def read(self, schema: Schema, at: str, refs: _Refs) -> Language:
        """The language of a schema.

        Args:
          schema: The schema.
          at: Its JSON pointer.
          refs: The references that led to it.
        """
        self._num_read += 1
        if self._depth == _MAX_DEPTH or self._num_read > _MAX_SCHEMAS:
            raise TooManyParts
        self._depth += 1
        language = self._read(schema, at, refs)
        self._depth -= 1
        return language

    def _read(self, schema: Schema, at: str, refs: _Refs) -> Language:
        check_keywords(schema, at)
        if schema is False:
            return NOTHING
        keys = {} if schema is True else {k: v for k, v in schema.items() if k in ASSERTIONS}
        if combination := next((key for key in COMBINATIONS if key in keys), None):
            rest = {key: value for key, value in keys.items() if key != combination}
            return self._combined(combination, keys[combination], rest, at, refs)
        if constant := next((key for key in CONSTANTS if key in keys), None):
            if others := sorted({*keys} - {constant, "type"}):
                raise schema_error(others[0], at, f"no other keyword beside {constant}")
            return values_of(constant, keys, at)
        types = keys.get("type") or implied_types(keys, at)
        types = types if isinstance(types, list) else [types]
        if not types:
            return any_value(DEPTH_OF_ANY)
        if "number" in types:
            types = [name for name in types if name != "integer"]
        options = [self._of_type(name, keys, at, refs) for name in dict.fromkeys(types)]
        return options[0] if len(options) == 1 else Alternatives(tuple(options), Origin("type", at))

    def _of_type(self, name: str, schema: dict[str, Any], at: str, refs: _Refs) -> Language:
        match name:
            case "object":
                return object_of(schema, at, lambda part, place: self.read(part, place, refs))
            case "array":
                return array_of(schema, at, lambda part, place: self.read(part, place, refs))
            case "string":
                return string_of(schema, at)
            case "integer" | "number":
                return number_of(name, schema, at)
            case "boolean":
                return BOOLEAN
        return Literal("null")

    def _combined(
        self, key: str, value: Any, rest: dict[str, Any], at: str, refs: _Refs
    ) -> Language:
        """The values that both a keyword with schemas inside and the rest of its schema allow."""
        others = [rest] if rest else []
        if key == "$ref" and not rest:
            target = self._target(value, at)
            if self._is_cut(value, refs):
                return NOTHING
            return self.read(target, value[1:], (*refs, value))
        if key in ("$ref", "allOf"):
            parts = [{"$ref": value}] if key == "$ref" else value
            if len(parts) == 1 and not rest:
                return self.read(parts[0], f"{at}/{key}/0", refs)
            return self._all([*parts, *others], at, refs)
        for option in value:
            check_keywords(option, at)
        value = self._one_of(value, at) if key == "oneOf" else value
        options = [
            self._all([option, rest], at, refs)
            if rest
            else self.read(option, f"{at}/{key}/{number}", refs)
            for number, option in enumerate(value)
        ]
        return options[0] if len(options) == 1 else Alternatives(tuple(options), Origin(key, at))

    def _all(self, schemas: Sequence[Schema], at: str, refs: _Refs) -> Language:
        """The values that are valid for all of some schemas."""
        waiting, found = list(schemas), []
        while waiting:
            schema = waiting.pop(0)
            check_keywords(schema, at)
            if isinstance(schema, dict):
                schema = {key: value for key, value in schema.items() if key in ASSERTIONS}
                if (ref := schema.pop("$ref", None)) is not None:
                    target = self._target(ref, at)
                    if self._is_cut(ref, refs):
                        return NOTHING
                    refs = (*refs, ref)
                    waiting[:0] = [target, schema]
                    continue
            found.append(schema)
        return self.read(conjunction(found, at), at, refs)

    def _is_cut(self, ref: str, refs: _Refs) -> bool:
        """Whether a reference would lead to itself too often."""
        is_cut = refs.count(ref) > self._recursion
        self.is_recursive |= is_cut
        return is_cut

    def _target(self, ref: str, at: str) -> Any:
        if not (ref == "#" or ref.startswith("#/")):
            raise schema_error("$ref", at, "a reference inside the schema, as #/$defs/name", ref)
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

    def _one_of(self, options: Sequence[Schema], at: str) -> Sequence[Schema]:
        """Schemas in the place of those of `oneOf`, of which no two have a value in common."""
        for option in options:
            check_keywords(self._resolved(option, at), at)

        def resolve(schema: Schema) -> Schema:
            try:
                target = self._resolved(schema, at)
                check_keywords(target, at)
            except SchemaError:
                # refused with its own place where it is read
                return True
            return target

        if (required := exactly_one_required(options)) is not None:
            return required
        if (apart := apart_options(options, resolve, at)) is None:
            expected = (
                "schemas of different types, or objects with a key of different types or "
                "constants, or anyOf in its place"
            )
            raise schema_error("oneOf", at, expected)
        return apart

    def _resolved(self, schema: Schema, at: str) -> Schema:
        """The schema that a reference leads to; a schema without one is itself."""
        for _ in range(_MAX_DEPTH):
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                break
            schema = self._target(schema["$ref"], at)
        return schema
