"""Tables of a plan's file: keys are read strictly, values are written as TOML. Touches no disk."""

import math
import re
from collections.abc import Mapping, Set
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Self

from ..modelzoo.errors import UserError

_BARE_KEY = re.compile("[A-Za-z0-9_-]+")
_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"'}
_ESCAPES |= {code: f"\\u{code:04X}" for code in [*range(0x20), 0x7F]}
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class PlanTable:
    """A table of a plan: a dataclass whose fields are the keys, defined with the table's name."""

    NAME: ClassVar[str]

    def __init_subclass__(cls, name: str):
        cls.NAME = name

    @classmethod
    def from_table(cls, table: Any) -> Self:
        """Read the parsed table; raises ValueError that names a wrong key or value."""
        cls.check(table)
        return cls(**table)

    @classmethod
    def check(cls, table: Any) -> None:
        """Refuse a table with unknown or missing keys."""
        check_keys(f"[{cls.NAME}]", table, *keys_of(cls))

    def to_table(self) -> dict[str, Any]:
        """The keys and values to write, without defaults and without empty tables."""
        return {
            key: value
            for key, value in asdict(self).items()
            if value not in (getattr(type(self), key, None), {})
        }

    def to_lines(self) -> list[str]:
        """The table as lines of TOML, after an empty line; none for a table that is left out."""
        return table_lines(self.NAME, self.to_table())


def keys_of(kind: type[Any]) -> tuple[Set[str], Set[str]]:
    """The required and the optional keys of a table: the fields without and with defaults."""
    required = {key.name for key in fields(kind) if key.default is key.default_factory is MISSING}
    return required, {key.name for key in fields(kind)} - required


def check_keys(
    where: str,
    table: Any,
    required: Set[str],
    optional: Set[str] = frozenset(),
) -> None:
    """Refuse a table with unknown or missing keys.

    Args:
      where: Beginning of the error message.
      table: A parsed value, which may be no table.
      required: Keys that must be there.
      optional: Other known keys.

    Raises:
      ValueError: The value is no table, or its keys are wrong.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"{where}: expected a table, got {table!r}.")
    unknown, missing = set(table) - required - optional, required - set(table)
    if unknown or missing:
        raise UserError(
            f"{where}: expected the keys {sorted(required | optional)}; "
            f"unknown {sorted(unknown)}, missing {sorted(missing)}."
        )


def check_text(name: str, value: object) -> None:
    """Raise ValueError unless a value is a string."""
    if not isinstance(value, str):
        raise UserError(f"{name}: expected a string, got {value!r}.")


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless a value is true or false."""
    if not isinstance(value, bool):
        raise UserError(f"{name}: expected true or false, got {value!r}.")


def check_number(name: str, value: Any, *, above: float | None = None) -> None:
    """Raise ValueError unless a value is a finite number from 0 up, or above the bound `above`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_large = is_number and (value >= 0 if above is None else value > above)
    if not (is_large and math.isfinite(value)):
        wanted = "from 0 up" if above is None else f"above {above:g}"
        raise UserError(f"{name}: expected a number {wanted}, got {value!r}.")


def table_lines(name: str, values: Mapping[str, Any]) -> list[str]:
    """A table as lines of TOML, after an empty line; a key with the value None is left out."""
    return ["", f"[{name}]", *key_lines(values, f"{name}.")]


def key_lines(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys and values as lines of TOML; a key with the value None is left out.

    Raises:
      ValueError: A text has no UTF-8 form; the error names its key after the prefix.
    """
    lines = []
    for key, value in values.items():
        if value is None:
            continue
        try:
            lines.append(f"{key if _BARE_KEY.fullmatch(key) else toml(key)} = {toml(value)}")
        except ValueError as error:
            raise UserError(f"{prefix}{ascii(key)[1:-1]}: {error}") from None
    return lines


def toml(value: Any) -> str:
    """One value as TOML; raises ValueError for a text without a UTF-8 form."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(key_lines(value))}}}"
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise UserError(
                f"expected text that can be written in UTF-8, got {value!a}, which has lone "
                f"surrogates. Rename it."
            )
        return f'"{value.translate(_ESCAPES)}"'
    return str(value)
