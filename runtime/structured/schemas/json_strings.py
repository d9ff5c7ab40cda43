"""Reads the parts of JSON Schemas that describe strings.

Does not know about objects, arrays, references or tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

from ..byte_automaton import TooLarge, both, compile_language
from ..language import (
    Alternatives,
    ByteAutomaton,
    Characters,
    Compiled,
    Concatenation,
    Language,
    Literal,
    Origin,
    Repetition,
    Restricted,
    sequence,
)
from ..pattern import read_pattern
from .json_scalars import count_of, errors_at, schema_error
from .json_text import JSON_CHARACTER, in_json_string

_HOUR_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_MINUTE})"
_LEAP = r"([0-9][0-9](0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""Years from 0001 on, as many libraries have no year 0."""
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    rf"|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,6}}"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ATOM = r"[A-Za-z0-9_+-]+"
_HEX = "[0-9a-fA-F]"
_PATH = r"[A-Za-z0-9._~:@!$&'()*+,;=/-]*"
_REFERENCE = rf"(https?://{_HOST}(:[1-9][0-9]{{0,3}})?)?(/{_PATH})?(\?{_PATH})?"
_POINTER = r"(/([A-Za-z0-9_. -]|~[01])*)*"
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,6}D(T[0-9]{1,6}H)?|T[0-9]{1,6}(H([0-9]{1,6}M)?|M|S)|[0-9]{1,6}[WMY])",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,4}}@{_LABEL}(\.{_LABEL}){{1,4}}",
    "hostname": _HOST,
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "ipv6": rf"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
    "uuid": rf"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9][0-9]{{0,5}})(#|{_POINTER})",
    "regex": r"\^?(([A-Za-z0-9_ /,:;@#%&=<>!~-]|\.|\\[dws.])[*+?]?)*\$?",
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "iri": rf"https?://{_HOST}(:[1-9][0-9]{{0,3}})?(/{_PATH})?(\?{_PATH})?",
    "uri": rf"https?://{_HOST}(:[1-9][0-9]{{0,3}})?(/{_PATH})?(\?{_PATH})?",
}
"""Every match is a string of the format. Rare forms of a format have no match."""
FORMATS = {*PATTERNS, "idn-email", "idn-hostname", "uri-template"}
"""The formats that JSON Schema defines; a format with another name has no effect."""


REPEATS = (256, 32)
"""Largest numbers of times that a part without a bound is repeated, tried in order if `maxLength`
needs a bound."""
_MAX_STATES = 4_096
"""Maximum number of states of a string with a pattern and a length."""


def string_of(schema: Mapping[str, Any], at: str) -> Language:
    """The strings that a schema allows."""
    least = count_of(schema, "minLength") or 0
    most = count_of(schema, "maxLength")
    if most is not None and most < least:
        raise schema_error("maxLength", at, f"at least minLength, {least}", most)
    keys = [key for key in ("pattern", "format") if key in schema]
    keys = [key for key in keys if key == "pattern" or schema[key] in FORMATS]
    if not keys:
        key = "minLength" if most is None else "maxLength"
        content = Repetition(JSON_CHARACTER, least, most, Origin(key, at))
        return sequence('"', content, '"')
    patterns = [_own_pattern(key, schema[key], at) for key in keys]
    # on their own, so that an error names them
    automata = [_compiled(*pattern, at) for pattern in zip(keys, patterns, strict=True)]
    with errors_at(Origin(keys[0], at)):
        content = reduce(both, automata)
        if most is not None:
            content = _of_length(content, patterns, least, most)
        elif least:
            content = both(content, _characters(least, None))
    return sequence('"', Compiled(content), '"')


def _own_pattern(key: str, value: Any, at: str) -> Language:
    if key == "format" and value not in PATTERNS:
        raise schema_error(key, at, f"one of {', '.join(PATTERNS)}", value)
    with errors_at(origin := Origin(key, at)):
        if key == "format":
            return read_pattern(PATTERNS[value], origin=origin)
        return read_pattern(value, is_search=True, origin=origin)


def _compiled(key: str, pattern: Language, at: str) -> ByteAutomaton:
    with errors_at(Origin(key, at)):
        return compile_language(in_json_string(pattern))


def _of_length(
    content: ByteAutomaton, patterns: list[Language], least: int, most: int
) -> ByteAutomaton:
    """The texts with `least` to `most` characters of an automaton, which was made from patterns.

    If they need too many states, parts of the patterns are repeated less often, so that no text is
    too long.
    """
    try:
        return both(content, _characters(least, most), _MAX_STATES)
    except TooLarge:
        bounded = (_bounded(pattern, repeats) for repeats in REPEATS for pattern in patterns)
        if (short := next((each for each in bounded if _longest(each) <= most), None)) is None:
            raise
    return both(both(content, _characters(least, None)), compile_language(in_json_string(short)))


@lru_cache(maxsize=64)
def _characters(least: int, most: int | None) -> ByteAutomaton:
    return compile_language(Repetition(JSON_CHARACTER, least, most))


def _bounded(language: Language, repeats: int) -> Language:
    """The language in which unbounded repetitions end at `repeats`, or at `least` if it is more."""
    match language:
        case Concatenation(parts):
            return Concatenation(tuple(_bounded(part, repeats) for part in parts))
        case Alternatives(options):
            return replace(language, options=tuple(_bounded(o, repeats) for o in options))
        case Repetition(body, least, most):
            most = max(least, repeats) if most is None else most
            return replace(language, body=_bounded(body, repeats), most=most)
        case Restricted(body):
            return replace(language, body=_bounded(body, repeats))
    return language


def _longest(language: Language) -> int:
    """The number of characters of the longest text of a pattern that has no unbounded parts."""
    match language:
        case Characters():
            return 1
        case Literal(text):
            return len(text)
        case Concatenation(parts):
            return sum(map(_longest, parts))
        case Alternatives(options):
            return max(map(_longest, options), default=0)
        case Repetition(body, _, int(most)):
            return most * _longest(body)
        case Restricted(body):
            return _longest(body)
    raise AssertionError("patterns have no other parts")
