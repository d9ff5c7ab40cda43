"""Read configuration from users: TOML files, overrides and times.

Every package owns its tables and their keys. Guarantees: a file or option that cannot be read
raises a `ConfigError` that names it as the user wrote it.
"""

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError

_BARE_WORD = re.compile(r"[A-Za-z_./~][\w./:@+~-]*")


PLAN = "plan.toml"
"""The name of the plan's file in a bundle."""
STRICT_CONFIG = "--strict-config"
"""The option of every subcommand that opens a model."""


def read_instant(option: str, text: str) -> datetime:
    """Read a local date and time without fractions of a second; `option` is named in the error."""
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is not None or instant.microsecond:
        raise ConfigError(
            f"{option}: expected a local date and time such as 2026-01-31T12:00:00, got {text!r}."
        )
    return instant


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as nested dicts."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except ValueError as error:  # of the syntax, of the encoding, or of an integer too long
        raise ConfigError(f"{path}: expected TOML, got: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None


def read_plan_table(path: Path) -> dict[str, Any]:
    """Read the table of a plan from its file, or from the folder of a bundle."""
    if not path.is_dir():
        return read_toml(path)
    # in a pod's bundle, every process has a folder with the same plan
    for plan in (path / PLAN, *sorted(path.glob(f"process-*/{PLAN}"))):
        if plan.is_file():
            return read_toml(plan)
    raise ConfigError(
        f"{path}: expected a plan, or a bundle's folder with {PLAN} in it, got a folder without "
        f"{PLAN}. Make a bundle with noria compile."
    )


def apply_overrides(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `table` with `a.b=value` settings; a value is TOML or a bare word.

    Raises:
      ConfigError: An override is malformed, or sets a key inside a value.

    >>> apply_overrides({"a": {"b": 1}}, ["a.b=[2, 3]", "target=cpu:8"])
    {'a': {'b': [2, 3]}, 'target': 'cpu:8'}
    """
    result = copy.deepcopy(dict(table))
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


def _override_value(override: str, text: str) -> Any:
    if "\n" not in text:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except ValueError:  # of the syntax, or of an integer too long
            if _BARE_WORD.fullmatch(text):
                return text
    raise ConfigError(f"--set {override}: expected a TOML value or a bare word, got {text!r}.")
