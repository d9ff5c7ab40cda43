"""Strict reader of published configuration tables: it checks every value and tracks every key.

No value of a table is trusted. A value of the wrong type or out of bounds is an error that names
the key as the author wrote it. A key that was not read is refused or noted. Knows nothing of
families or the meaning of values. Guarantees: every returned number is finite and within bounds, so
a wrong table cannot cause a large allocation.
"""

import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..errors import UserError

REQUIRED = object()
"""The default of a key that must be present."""

_MAX_SHOWN = 80
_MAX_LISTED = 8
NO_DEFAULTS: Mapping[str, object] = MappingProxyType({})


class UnsupportedModel(UserError):
    """The error for a model or option that is unknown, not implemented or malformed."""


class ConfigReader:
    """A table of a published configuration, with a record of the keys that were read.

    Args:
      values: The table.
      prefix: The text before its keys in messages, such as the key of the outer table.
      defaults: Values of keys that are not in the table. A key with null is in the table.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        prefix: str = "",
        defaults: Mapping[str, object] = NO_DEFAULTS,
    ):
        self._values = values
        self._prefix = prefix
        self._defaults = defaults
        self._read: set[str] = set()
        self.ignored: list[str] = []
        """The keys that `ignore_rest` noted in this table and in inner ones, as `key = value`."""

    def name(self, key: str) -> str:
        """The key with its prefix, as messages show it."""
        is_plain = key.isprintable() and len(key) <= _MAX_SHOWN
        return f"{self._prefix}{key if is_plain else _brief(key)}"

    def error(self, key: str, expected: str) -> UnsupportedModel:
        """An error for the value of `key`, which says what was expected."""
        if key not in self._values:
            return UnsupportedModel(f"{self.name(key)}: expected {expected}, got no such key.")
        return UnsupportedModel(
            f"{self.name(key)}: expected {expected}, got {_brief(self._values[key])}."
        )

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null; the key then counts as read."""
        self._read.add(key)
        return self._values.get(key, self._defaults.get(key)) is not None

    def names(self) -> tuple[str, ...]:
        """All keys of the table; they count as read."""
        self._read.update(self._values)
        return tuple(self._values)

    def is_null(self, key: str) -> bool:
        """Whether the key is in the table and null."""
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
        """A list of integers within bounds; if `count` is given, a list of this length."""
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
        table = ConfigReader(value, f"{self.name(key)}.")
        table.ignored = self.ignored
        return table

    def without(self, keys: Collection[str], added: Mapping[str, object]) -> "ConfigReader":
        """The same table without some keys, and with other ones; what is left counts as read."""
        rest = {key: value for key, value in self._values.items() if key not in keys}
        self._read.update(rest)
        table = ConfigReader(rest | dict(added), self._prefix)
        table.ignored = self.ignored
        return table

    def with_defaults(self, defaults: Mapping[str, object]) -> "ConfigReader":
        """The same table with values of keys that are not in it."""
        table = ConfigReader(self._values, self._prefix, defaults)
        table.ignored = self.ignored
        return table

    def without_nulls(self) -> "ConfigReader":
        """The same table without keys that are null, in inner tables too."""
        table = ConfigReader(_without_nulls(self._values), self._prefix, self._defaults)
        table.ignored = self.ignored
        return table

    def expect(self, key: str, value: object, remedy: str = "") -> None:
        """Refuse any other value of an option for which only `value` is implemented."""
        self._read.add(key)
        if key in self._values and not _is_same(self._values[key], value):
            expected = "null" if value is None else repr(value)
            raise self.error(key, f"{expected}, the only one implemented{remedy}")

    def expect_equal(self, key: str, other: str) -> None:
        """Refuse a second name of an option if its value differs from that of the first."""
        self._read.add(key)
        value = self._values.get(other)
        if self._values.get(key) and not _is_same(self._values[key], value):
            raise self.error(key, f"{_brief(value)}, the value of {other}")

    def expect_if_unread(self, neutral: Mapping[str, object]) -> None:
        """Refuse unread keys with values other than these; null and 0 count as false."""
        for key, value in neutral.items():
            if key in self._read:
                continue
            is_off = value is not None and not value
            if not (is_off and not self._values.get(key)):
                self.expect(key, value)

    def ignore(self, keys: Iterable[str]) -> None:
        """Mark keys as read that cannot change the answer."""
        self._read.update(keys)

    def ignore_beginning(self, beginning: str) -> None:
        """Mark keys with a beginning as read, as they cannot change the answer."""
        self.ignore(key for key in self._values if key.startswith(beginning))

    def ignore_rest(self, refused: Collection[str] = ()) -> None:
        """Note unread keys, or refuse them if they are in `refused`.

        Keys with null, false, 0 or an empty value are skipped.
        """
        unread = {key for key in self._values.keys() - self._read if self._values[key]}
        self._refuse(unread.intersection(refused))
        self.ignored.extend(self._listed(unread))

    def refuse_rest(self) -> None:
        """Refuse unread keys, as their options are not implemented."""
        self._refuse(self._values.keys() - self._read)

    def _refuse(self, keys: Collection[str]) -> None:
        if keys:
            raise UnsupportedModel(
                f"expected only keys whose meaning is known, got {listing(self._listed(keys))}. "
                "Remove a key that cannot change the model's answers; any other is not implemented."
            )

    def _listed(self, keys: Collection[str]) -> list[str]:
        return [f"{self.name(key)} = {_brief(self._values[key])}" for key in sorted(keys, key=str)]

    def _items(self, key: str, count: int | None, kind: str) -> "ConfigReader":
        """The items of a list, as a table by position; `count` is the expected length, if given."""
        values = self._value(key, REQUIRED)
        if not isinstance(values, list | tuple) or len(values) != (count or len(values)):
            raise self.error(key, f"a list of {f'{count} ' if count else ''}{kind}")
        return ConfigReader({str(i): x for i, x in enumerate(values)}, f"{self.name(key)}.")

    def _value(self, key: str, default: object) -> Any:
        self._read.add(key)
        value = self._values.get(key, self._defaults.get(key))
        if value is None:
            value = default
        return None if value is REQUIRED else value


def listing(items: Collection[str]) -> str:
    """The first few items, joined to one line."""
    shown = list(items)[:_MAX_LISTED]
    return ", ".join(shown if len(items) == len(shown) else [*shown, "..."])


def _without_nulls(values: Mapping[str, object]) -> Mapping[str, object]:
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def _is_same(value: object, other: object) -> bool:
    # 0 == False in Python, but a published 0 is not a published false
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
