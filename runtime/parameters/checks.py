"""Checks and converts the values of parameters. Does not know which parameters there are."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from ...modelzoo.sampling_parameters import Parameter
from ..errors import RowError

INTEGERS = ("int32", "int64")
PLAIN = frozenset({int, float, bool, str, tuple, type(None)})
"""Types of parameters that are no numbers of numpy."""


def wrong_value(where: str, expected: str, got: object, param: str | None = None) -> RowError:
    """Make the error for an invalid value of a request; a long value is cut in the message.

    Args:
      where: The parameter, or the place of the value in it.
      expected: A description of valid values.
      got: The value.
      param: The parameter, if it differs from `where`.
    """
    shown = "none" if got is None else repr(got)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    message = f"{where}: expected {expected}, got {shown}."
    return RowError("invalid_request", message, param or where)


def whole_number(value: Any) -> Any:
    """A float without a fraction as an integer; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def plain_number(value: Any) -> Any:
    """A number as int or float; anything else as it is."""
    if type(value) not in PLAIN and isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """The values of a list; none for None.

    Raises:
      RowError: The value is no list.
    """
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise wrong_value(name, "a list", values)
    return tuple(values)


def check_integer(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    """Raise RowError unless a value is an integer from `low` to `high`, or an optional None."""
    if value is None and optional:
        return
    # bool is an int in Python, but `n: true` in a request is a mistake
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_value(name, "an integer", value)
    if not low <= value <= high:
        raise wrong_value(name, f"an integer from {low} to {high}", value)


def check_number(
    name: str, value: object, low: float, high: float, *, or_zero: bool = False
) -> None:
    """Raise RowError unless a value is a number from `low` to `high`, or 0 with `or_zero`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (low <= value <= high or (or_zero and value == 0))
    ):
        zero = "0 or " if or_zero else ""
        raise wrong_value(name, f"{zero}a number from {low:g} to {high:g}", value)


def check_parameter(name: str, value: object, entry: Parameter) -> None:
    """Raise RowError unless the table of sampling parameters allows a value."""
    if entry.dtype == "bool" and not isinstance(value, bool):
        raise wrong_value(name, "true or false", value)
    if entry.dtype in INTEGERS:
        check_integer(name, value, int(entry.low), int(entry.high))
    if entry.dtype == "float32":
        check_number(name, value, entry.low, entry.high, or_zero=entry.or_zero)
