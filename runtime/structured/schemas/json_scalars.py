"""Reads the parts of JSON Schemas for numbers and constants, and makes the errors of schemas.

Does not know about objects, arrays, references or tokens. Guarantees: every number that
`multipleOf` allows is a multiple of the step in decimal arithmetic, and also for a validator that
divides it by the step in doubles.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from ...errors import UserError
from ..byte_automaton import TooLarge, both, compile_language, multiples_of
from ..language import Alternatives, Compiled, Language, Literal, Origin
from ..pattern import PatternError
from .json_text import INTEGER, MAX_DIGITS, NUMBER, bounded_integer, bounded_number

MAX_MULTIPLES = 1_000
"""Maximum number of multiples that are listed, and maximum step of integers."""

LARGEST = 10**MAX_DIGITS - 1
"""The largest whole number that an answer with a bound can have."""
MAX_BOUND_DIGITS = 20
"""Maximum number of digits of a bound, those before and after the point together."""


class SchemaError(UserError):
    """A schema that is wrong or not supported; the message names the keyword and its place."""


def values_of(key: str, schema: Mapping[str, Any], at: str) -> Language:
    """The values of `enum` or `const` that have the schema's type."""
    values = schema[key] if key == "enum" else [schema[key]]
    fitting = [v for v in values if "type" not in schema or has_type(v, schema["type"])]
    if not fitting:
        raise schema_error(key, at, f"a value of the type {schema.get('type')}", values)
    options = tuple(literal_of(value, key, at) for value in fitting)
    return options[0] if len(options) == 1 else Alternatives(options, Origin(key, at))


def has_type(value: Any, types: Any) -> bool:
    """Whether a value has a type of JSON Schema, or one of a list of them."""
    return any(_is_a(value, name) for name in (types if isinstance(types, list) else [types]))


def _is_a(value: Any, name: str) -> bool:
    match name:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return is_whole and not isinstance(value, bool)
    return name == "number" and isinstance(value, int | float) and not isinstance(value, bool)


def literal_of(value: Any, key: str, at: str) -> Language:
    """The JSON text of one value, with a space after each colon and comma."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise schema_error(key, at, "text without lone surrogates", value) from None
    return Literal(text)


def number_of(name: str, schema: Mapping[str, Any], at: str) -> Language:
    low, above = _bound(schema, "minimum", "exclusiveMinimum", at, sign=1)
    high, below = _bound(schema, "maximum", "exclusiveMaximum", at, sign=-1)
    if low is not None and high is not None and (low > high or (low == high and (above or below))):
        raise schema_error("maximum", at, f"a number above the minimum, {low}", str(high))
    if "multipleOf" in schema:
        return _multiples(name, schema["multipleOf"], at, low, high, above=above, below=below)
    if low is None and high is None:
        return INTEGER if name == "integer" else NUMBER
    if name == "number":
        _check_digits(low, high, at, above=above, below=below)
        return bounded_number(low, high, above=above, below=below)
    return bounded_integer(*_whole_bounds(low, high, at, above=above, below=below))


def _check_digits(
    low: Decimal | None, high: Decimal | None, at: str, *, above: bool, below: bool
) -> None:
    """Refuse bounds of so many digits that answers could be rounded to a bound that is excluded.

    Answers have at most one digit more than the longer bound. Different numbers of at most 15
    digits are different doubles (IEEE 754, binary64).
    """
    most = MAX_DIGITS - 1 if above or below else MAX_BOUND_DIGITS
    for bound, key, is_excluded in ((low, "Minimum", above), (high, "Maximum", below)):
        if bound is None or len(f"{abs(bound):f}".removeprefix("0").replace(".", "")) <= most:
            continue
        name = f"exclusive{key}" if is_excluded else key.lower()
        beside = " if a bound is excluded" if above or below else ""
        raise schema_error(name, at, f"a bound of at most {most} digits{beside}", float(bound))


def _whole_bounds(
    low: Decimal | None, high: Decimal | None, at: str, *, above: bool, below: bool
) -> tuple[int | None, int | None]:
    """The smallest and the largest integer between two bounds."""
    least = None if low is None else math.ceil(low)
    most = None if high is None else math.floor(high)
    least = least + 1 if above and least == low and least is not None else least
    most = most - 1 if below and most == high and most is not None else most
    if least is not None and most is not None and least > most:
        raise schema_error("maximum", at, "bounds with an integer between them", str(high))
    return least, most


def _multiples(
    name: str,
    step: float,
    at: str,
    low: Decimal | None,
    high: Decimal | None,
    *,
    above: bool,
    below: bool,
) -> Language:
    """The multiples of a number between two bounds."""
    exact = Decimal(repr(step))
    if 0 < exact <= MAX_MULTIPLES and exact % 1 == 0:
        bounds = _whole_bounds(low, high, at, above=above, below=below)
        integers = INTEGER if bounds == (None, None) else bounded_integer(*bounds)
        with errors_at(Origin("multipleOf", at)):
            return Compiled(both(compile_language(integers), multiples_of(int(exact))))
    found = None
    if exact > 0 and low is not None and high is not None:
        excluded = {bound for bound, is_out in ((low, above), (high, below)) if is_out}
        is_integer = name == "integer"
        found = listed_multiples(exact, low, high, excluded, only_integers=is_integer)
    if found is None:
        expected = (
            f"an integer from 1 to {MAX_MULTIPLES}, or a number above 0 with at most "
            f"{MAX_MULTIPLES} multiples between a minimum and a maximum"
        )
        raise schema_error("multipleOf", at, expected, step)
    return found


def _bound(
    schema: Mapping[str, Any], key: str, exclusive: str, at: str, *, sign: int
) -> tuple[Decimal | None, bool]:
    """The stricter of two bounds, and whether it is excluded itself."""
    found: tuple[Decimal | None, bool] = None, False
    for name in (key, exclusive):
        value = schema.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_excluded = name == exclusive
        if is_number and sign * value < -LARGEST:
            # answers have no more digits, so a looser bound excludes none of them
            value, is_excluded = -sign * LARGEST, False
        if not is_number or not abs(value) <= LARGEST:
            raise schema_error(name, at, f"a number of at most {MAX_DIGITS} digits", value)
        bound = Decimal(repr(value))
        is_stricter = found[0] is None or sign * bound > sign * found[0]
        if is_stricter or (bound == found[0] and is_excluded):
            found = bound, is_excluded
    return found


def count_of(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    return None if value is None else int(value)


def too_large(error: TooLarge, otherwise: Origin) -> SchemaError:
    """The error for a part that needs too many states."""
    origin = error.origin or otherwise
    return SchemaError(f"{origin}: expected a smaller language, got one of too many states")


@contextmanager
def errors_at(origin: Origin) -> Iterator[None]:
    """Turn the errors of patterns and automata into errors of a schema, which name a place."""
    try:
        yield
    except PatternError as error:
        raise SchemaError(f"{origin}: {error}") from None
    except TooLarge as error:
        raise too_large(error, origin) from None


def schema_error(key: str, at: str, expected: str, got: Any = None) -> SchemaError:
    shown = "" if got is None else f", got {json.dumps(got, ensure_ascii=False)[:100]}"
    where = Origin(key, at) if key else f"schema at {at or '/'}"
    return SchemaError(f"{where}: expected {expected}{shown}")


def listed_multiples(
    step: Decimal,
    low: Decimal,
    high: Decimal,
    excluded: Collection[Decimal],
    *,
    only_integers: bool,
) -> Language | None:
    """The multiples from `low` to `high`, without those excluded; None if there are too many."""
    first, last = math.ceil(low / step), math.floor(high / step)
    if last - first >= MAX_MULTIPLES:
        return None
    values = [number * step for number in range(first, last + 1)]
    fitting = [
        value
        for value in values
        if (value % 1 == 0 or not only_integers)
        and value not in excluded
        and (float(value) / float(step)).is_integer()
    ]
    # without trailing zeros, which do not change a number
    texts = [f"{value.normalize():f}" for value in fitting]
    return Alternatives(tuple(map(Literal, texts)))
