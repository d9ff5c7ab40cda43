"""The JSON texts of strings, numbers and values, as languages.

JSON is written in one way: no space except an optional one after each colon and comma; in strings,
characters stand for themselves, or are escaped by a backslash and one character where JSON demands
it. Does not know about schemas or automata.
"""

import json
from dataclasses import replace
from decimal import Decimal

from ..language import (
    ANY_CHARACTER,
    EMPTY,
    NOTHING,
    Alternatives,
    Characters,
    Compiled,
    Concatenation,
    Language,
    Literal,
    Members,
    Ranges,
    Repetition,
    Restricted,
    characters,
    complement,
    either,
    intersection,
    optional,
    sequence,
)

COMMA = sequence(",", optional(" "))
COLON = sequence(":", optional(" "))
MAX_DIGITS = 15
"""Maximum number of digits before a decimal point, and again after it; a double holds as many."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r"}
_ESCAPES |= {"\t": "\\t"}
_UNESCAPED = complement(characters('"\\', (0, 0x1F)).ranges)
_DIGIT = characters("0123456789")
_NOT_ZERO = characters("123456789")


def json_characters(ranges: Ranges) -> Language:
    """One character of a set as it stands in a JSON string."""
    raw = intersection(ranges, _UNESCAPED)
    escaped = [
        Literal(text)
        for character, text in _ESCAPES.items()
        if any(low <= ord(character) <= high for low, high in ranges)
    ]
    return Alternatives(((Characters(raw),) if raw else ()) + tuple(escaped))


def in_json_string(language: Language) -> Language:
    """The texts of a language as they stand in a JSON string."""
    match language:
        case Characters(ranges):
            return json_characters(ranges)
        case Literal(text):
            return Literal(json.dumps(text, ensure_ascii=False)[1:-1])
        case Concatenation(parts):
            return Concatenation(tuple(map(in_json_string, parts)))
        case Alternatives(options):
            return replace(language, options=tuple(map(in_json_string, options)))
        case Repetition(body):
            return replace(language, body=in_json_string(body))
        case Restricted(body, other):
            return replace(language, body=in_json_string(body), other=in_json_string(other))
        case Members() | Compiled():
            raise AssertionError("patterns have none of these")


JSON_CHARACTER = json_characters(ANY_CHARACTER.ranges)
STRING = sequence('"', Repetition(JSON_CHARACTER), '"')
_FRACTION = sequence(".", Repetition(_DIGIT, 1, MAX_DIGITS))
_EXPONENT = sequence(characters("eE"), optional(characters("+-")), Repetition(_DIGIT, 1, 2))
_WHOLE = either("0", sequence(_NOT_ZERO, Repetition(_DIGIT, 0, MAX_DIGITS - 1)))
INTEGER = sequence(optional("-"), _WHOLE)
NUMBER = sequence(INTEGER, optional(_FRACTION), optional(_EXPONENT))
BOOLEAN = either("true", "false")
SCALAR = either(STRING, NUMBER, BOOLEAN, "null")


def any_value(depth: int) -> Language:
    """Any value with at most `depth` arrays and objects inside each other."""
    if depth == 0:
        return SCALAR
    inner = any_value(depth - 1)
    return either(
        *SCALAR.options, sequence("[", Repetition(inner, separator=COMMA), "]"), json_map(inner)
    )


def json_map(value: Language, key: Language = STRING) -> Language:
    """An object of any number of keys."""
    return sequence("{", Repetition(sequence(key, COLON, value), separator=COMMA), "}")


def bounded_integer(low: int | None, high: int | None) -> Language:
    """Integers from `low` to `high`, both included; None for no bound."""
    options: list[Language] = []
    if high is None or high >= 0:
        options.append(_whole_range(max(low or 0, 0), high))
    if low is None or low < 0:
        least = 1 if high is None else max(-high, 1)
        options.append(sequence("-", _whole_range(least, None if low is None else -low)))
    return either(*options)


def bounded_number(
    low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False
) -> Language:
    """Numbers without exponents between two bounds; `above` and `below` exclude the bounds."""
    options: list[Language] = []
    if high is None or high > 0 or (high == 0 and not below):
        is_cut = low is not None and low >= 0
        bound = low if is_cut and low is not None else Decimal(0)
        options.append(_decimal_range(bound, high, above=is_cut and above, below=below))
    if low is None or low < 0:
        is_cut = high is not None and high < 0
        bound = -high if is_cut and high is not None else Decimal(0)
        most = None if low is None else -low
        # without a negative zero, which may equal an excluded bound
        above, below = not is_cut or below, above
        options.append(sequence("-", _decimal_range(bound, most, above=above, below=below)))
    return either(*options)


def _whole_range(low: int, high: int | None) -> Language:
    """Whole numbers without sign from `low` to `high`, which have at most `MAX_DIGITS` digits."""
    high = 10**MAX_DIGITS - 1 if high is None else min(high, 10**MAX_DIGITS - 1)
    options: list[Language] = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = min(high, 10**length - 1)
        if first <= last:
            options.append(_digits_between(str(first), str(last), least=length, most=length))
    return either(*options)


def _decimal_range(low: Decimal, high: Decimal | None, *, above: bool, below: bool) -> Language:
    """Numbers without sign and exponent between two bounds."""
    low_whole, low_digits = _split(low)
    high_whole, high_digits = (None, None) if high is None else _split(high)
    # so few digits that rounding to a double never reaches a bound
    size = MAX_DIGITS - len(str(low_whole if high_whole is None else high_whole))
    size = max(1, min(6, size))
    if high_whole == low_whole:
        fraction = _fraction(low_digits, high_digits, size, above=above, below=below)
        return sequence(str(low_whole), fraction)
    last = None if high_whole is None else high_whole - 1
    inner = sequence(".", Repetition(_DIGIT, 1, size))
    options: list[Language] = [
        sequence(str(low_whole), _fraction(low_digits, None, size, above=above, below=False)),
        sequence(_whole_range(low_whole + 1, last), optional(inner)),
    ]
    if high_whole is not None:
        fraction = _fraction("", high_digits, size, above=False, below=below)
        options.append(sequence(str(high_whole), fraction))
    return either(*options)


def _split(value: Decimal) -> tuple[int, str]:
    """The whole part of a number, and the digits after its point without zeros at the end."""
    whole, _, digits = f"{value:f}".partition(".")
    return int(whole), digits.rstrip("0")


def _fraction(low: str, high: str | None, size: int, *, above: bool, below: bool) -> Language:
    """Nothing, or a point and digits, for fractions from `low` to `high`; a `high` of None is 1.

    There are at most `size` digits, or one more than a bound has if that is more.
    """
    options: list[Language] = []
    if not low and not above and not (high == "" and below):
        options.append(EMPTY)
    most = max(len(low) + 1, len(high or "") + 1, size)
    options.append(sequence(".", _digits_between(low, high, above=above, below=below, most=most)))
    return either(*options)


def _digits_between(
    low: str | None,
    high: str | None,
    *,
    above: bool = False,
    below: bool = False,
    least: int = 1,
    most: int,
) -> Language:
    """From `least` to `most` digits between two fractions, of which None is no bound."""
    if most == 0:
        return NOTHING
    # bounds that allow every digit
    if low is not None and not low.strip("0") and not above:
        low = None
    if high is not None and not high.strip("9") and len(high) >= most and not below:
        high = None
    if low is None and high is None:
        return Repetition(_DIGIT, least, most)
    bottom, top = int((low or "0")[0]), 9 if high is None else int((high or "0")[0])
    options: list[Language] = []
    if inside := range(bottom + (low is not None), top + (high is None)):
        digits = Characters(((ord("0") + inside[0], ord("0") + inside[-1]),))
        options.append(sequence(digits, Repetition(_DIGIT, max(0, least - 1), most - 1)))
    for digit in {bottom, top} - {*inside}:
        next_low = low[1:] if low is not None and digit == bottom else None
        next_high = high[1:] if high is not None and digit == top else None
        is_low = next_low is not None and (bool(next_low.strip("0")) or above)
        may_end = least <= 1 and not is_low and not (next_high == "" and below)
        limits = {"above": above, "below": below, "least": max(1, least - 1), "most": most - 1}
        rest = _digits_between(next_low, next_high, **limits)
        options.append(sequence(str(digit), either(*[EMPTY] * may_end, rest)))
    return either(*options)
