"""Checks of the values in the configuration of a decoder, and of the values of a plan.

Knows nothing of the use of these values. Guarantees: a wrong value raises a ValueError with its
name, the expected value and the actual one.
"""

import math
from collections.abc import Iterable

from .errors import UserError

MAX_COUNT = 2**31 - 1
"""Largest count: positions and token counts are 32-bit integers on devices."""


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless the value is a positive integer up to `MAX_COUNT`."""
    if not is_count(value):
        is_large = isinstance(value, int) and value > MAX_COUNT
        expected = f"at most {MAX_COUNT}" if is_large else "a positive integer"
        raise UserError(f"{name}: expected {expected}, got {value!r}.")


def is_count(value: object) -> bool:
    """Whether the value is a positive integer up to `MAX_COUNT`."""
    # bool is an int in Python; `decode_slots = true` is a mistake
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in (known := tuple(choices)):
        raise UserError(f"{name}: expected one of {', '.join(known)}, got {value!r}.")


def check_positive(owner: str, **numbers: float | None) -> None:
    """Raise ValueError for a number that is not finite and above 0; None is allowed."""
    for name, number in numbers.items():
        if number is not None and not (math.isfinite(number) and number > 0):
            raise UserError(f"{owner}.{name}: expected a finite number above 0, got {number!r}.")
