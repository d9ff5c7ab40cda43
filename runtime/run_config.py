"""TOML tables -> frozen dataclasses, strictly, with overrides from the command line.

Knows nothing of what is configured: every floor owns its dataclasses. Guarantees: an unknown key,
a missing one or a value of another type is a `ConfigError` naming the key as the user wrote it;
nothing is converted except a list to a tuple and an integer to a float.
"""

import dataclasses
import difflib
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_BARE_WORD = re.compile(r"[A-Za-z_./~][\w./:@+~-]*")


class ConfigError(ValueError):
    """A configuration that says something we do not understand."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as nested dicts."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected TOML, got: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None


def apply_overrides(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `table` with `a.b=value` settings; a value is TOML or a bare word.

    >>> apply_overrides({"a": {"b": 1}}, ["a.b=[2, 3]", "target=cpu:8"])
    {'a': {'b': [2, 3]}, 'target': 'cpu:8'}
    """
    result = _copy(table)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set {override}: expected a.b=value.")
        inner = result
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {override}: {key} is a value, not a table.")
        inner[keys[-1]] = _override_value(override, text.strip())
    return result


def from_table(cls: type[_T], table: object, where: str = "") -> _T:
    """Build a (nested) frozen dataclass from a table; `where` is the table's own name."""
    name = where or "the configuration"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name}: expected a table, got {table!r}.")
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls)) if field.init}
    for key in table:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"{_join(where, key)}: unknown key; {name} has {', '.join(sorted(fields))}.{hint}"
            )
    hints = get_type_hints(cls)
    values = {}
    for key, field in fields.items():
        if key in table:
            values[key] = _convert(hints[key], table[key], _join(where, key))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(where, key)}: expected a value, got none.")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _override_value(override: str, text: str) -> Any:
    if "\n" not in text:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            if _BARE_WORD.fullmatch(text):
                return text
    raise ConfigError(f"--set {override}: expected a TOML value or a bare word, got {text!r}.")


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, where)
    if origin is Literal:
        if value in get_args(hint):
            return value
        raise ConfigError(f"{where}: expected one of {list(get_args(hint))}, got {value!r}.")
    if origin is tuple:
        return _convert_tuple(get_args(hint), value, where)
    if dataclasses.is_dataclass(hint):
        return from_table(cast(type, hint), value, where)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a table, got {value!r}.")
        inner = get_args(hint)[1]
        return {key: _convert(inner, item, _join(where, key)) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int in Python; `slots = true` is a mistake
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r}.")
    return value


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    problems = []
    for option in get_args(hint):
        if option is type(None):
            continue
        try:
            return _convert(option, value, where)
        except ConfigError as error:
            problems.append(error)
    raise problems[0]


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: expected a list, got {value!r}.")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise ConfigError(f"{where}: expected {len(arguments)} values, got {len(value)}.")
    pairs = zip(arguments, value, strict=True)
    return tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(pairs))
