"""Reads the parts of JSON Schemas that describe strings.

Does not know about objects, arrays, references or tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

from ..automaton import ByteAutomaton
from ..byte_automaton import TooLarge, both, compile_language
from ..language import (
    Alternatives,
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
from ..pattern import PatternError, read_pattern
from .formats import FORMATS, PATTERNS
from .json_scalars import SchemaError, count_of, schema_error, too_large
from .json_text import JSON_CHARACTER, in_json_string

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
    try:
        content = reduce(both, automata)
        if most is not None:
            content = _of_length(content, patterns, least, most)
        elif least:
            content = both(content, _characters(least, None))
    except TooLarge as error:
        raise too_large(error, Origin(keys[0], at)) from None
    return sequence('"', Compiled(content), '"')


def _own_pattern(key: str, value: Any, at: str) -> Language:
    if key == "format" and value not in PATTERNS:
        raise schema_error(key, at, f"one of {', '.join(PATTERNS)}", value)
    try:
        if key == "format":
            return read_pattern(PATTERNS[value], origin=Origin(key, at))
        return read_pattern(value, is_search=True, origin=Origin(key, at))
    except PatternError as error:
        raise SchemaError(f"{Origin(key, at)}: {error}") from None


def _compiled(key: str, pattern: Language, at: str) -> ByteAutomaton:
    try:
        return compile_language(in_json_string(pattern))
    except TooLarge as error:
        raise too_large(error, Origin(key, at)) from None


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
        if (short := _short_pattern(patterns, most)) is None:
            raise
    return both(both(content, _characters(least, None)), compile_language(in_json_string(short)))


def _short_pattern(patterns: list[Language], most: int) -> Language | None:
    """A pattern with bounded repetitions whose texts fit into `most`; None if none is found."""
    for repeats in REPEATS:
        for pattern in patterns:
            short = _bounded(pattern, repeats)
            if _longest(short) <= most:
                return short
    return None


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
