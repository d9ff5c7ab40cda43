"""Strict reading of published configuration tables: every value checked, every key accounted for.

A table says what its author believed; this module believes nothing. A value of the wrong type or
out of bounds, and a key that nobody read, are errors that name the key as the author wrote it.
Knows nothing of families or of what the values mean. Guarantees: no value passes that is not finite
and within bounds, so nothing is allocated for a table that lies.
"""

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

REQUIRED = object()
"""Default of a key that has none."""


class UnsupportedModel(ValueError):
    """A model, or an option of one, that is unknown, not implemented or not well formed."""


class ConfigReader:
    """One table of a published configuration, and which of its keys were read."""

    def __init__(self, values: Mapping[str, object], prefix: str = ""):
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """The key as the author of the file would find it."""
        return f"{self._prefix}{key}"

    def error(self, key: str, expected: str) -> UnsupportedModel:
        """The error that the value of `key` deserves."""
        if key not in self._values:
            return UnsupportedModel(f"{self.name(key)}: expected {expected}, got no such key.")
        return UnsupportedModel(
            f"{self.name(key)}: expected {expected}, got {_brief(self._values[key])}."
        )

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null; looking accounts for it."""
        self._read.add(key)
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null."""
        return key in self._values and self._values[key] is None

    def integer(
        self, key: str, *, maximum: int, minimum: int = 1, default: object = REQUIRED
    ) -> int:
        """An integer within bounds; null counts as absent."""
        value = self._value(key, default)
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_integer or not minimum <= int(value) <= maximum:
            raise self.error(key, f"an integer from {minimum} to {maximum}")
        return int(value)

    def number(
        self, key: str, *, above: float, maximum: float = math.inf, default: object = REQUIRED
    ) -> float:
        """A finite number greater than `above` and at most `maximum`; null counts as absent."""
        value = self._value(key, default)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not above < float(value) <= maximum:
            bound = "" if maximum == math.inf else f" and at most {maximum}"
            raise self.error(key, f"a finite number above {above}{bound}")
        return float(value)

    def numbers(self, key: str, *, count: int, above: float) -> tuple[float, ...]:
        """A list of `count` finite numbers greater than `above`."""
        items = self._items(key, count, "numbers")
        return tuple(items.number(i, above=above) for i in items._values)

    def integers(
        self, key: str, *, maximum: int, minimum: int = 1, count: int | None = None
    ) -> tuple[int, ...]:
        """A list of integers within bounds; `count` of them, where it is given."""
        items = self._items(key, count, "integers")
        return tuple(items.integer(i, minimum=minimum, maximum=maximum) for i in items._values)

    def flag(self, key: str, *, default: object = REQUIRED) -> bool:
        """A boolean; null counts as absent."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, *, default: object = REQUIRED) -> str:
        """A string; null counts as absent."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._value(key, REQUIRED)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return tuple(value)

    def table(self, key: str) -> "ConfigReader":
        """A table inside this one; an absent or null one is empty."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "a table")
        return ConfigReader(value, prefix=f"{self.name(key)}.")

    def expect(self, key: str, value: object, remedy: str = "") -> None:
        """Refuse any other value of an option of which one alone is implemented."""
        self._read.add(key)
        if key in self._values and not _is_same(self._values[key], value):
            expected = "null" if value is None else repr(value)
            raise self.error(key, f"{expected}, the only one implemented{remedy}")

    def expect_of_unread(self, neutral: Mapping[str, object]) -> None:
        """Of keys that nobody read, accept these at these values alone."""
        for key, value in neutral.items():
            if key not in self._read:
                self.expect(key, value)

    def ignore(self, keys: Iterable[str]) -> None:
        """Account for keys that cannot change the answer."""
        self._read.update(keys)

    def refuse_rest(self) -> None:
        """Refuse keys that nobody read: what they ask for is not implemented."""
        unknown = sorted(set(self._values) - self._read, key=str)
        if unknown:
            listing = ", ".join(f"{self.name(k)} = {_brief(self._values[k])}" for k in unknown[:8])
            raise UnsupportedModel(
                f"expected only keys whose meaning is known, got {listing}"
                f"{', ...' if len(unknown) > 8 else ''}. "
                "Remove a key that cannot change the model's answers; any other is not implemented."
            )

    def _items(self, key: str, count: int | None, kind: str) -> "ConfigReader":
        """The items of a list, of a certain length where one is given, as a table by position."""
        values = self._value(key, REQUIRED)
        if not isinstance(values, list | tuple) or len(values) != (count or len(values)):
            raise self.error(key, f"a list of {f'{count} ' if count else ''}{kind}")
        return ConfigReader({str(i): x for i, x in enumerate(values)}, f"{self.name(key)}.")

    def _value(self, key: str, default: object) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            value = default
        return None if value is REQUIRED else value


def _is_same(value: object, other: object) -> bool:
    # 0 == False in Python, and a published 0 is no published false
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
