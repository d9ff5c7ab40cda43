"""Descriptions of regular languages: what a pattern, a choice or a JSON Schema allows as text.

A language is a tree of the classes below. Characters are code points; their bytes are UTF-8. Does
not know about tokens, JSON or requests, nor how automata are made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

import numpy as np

DEAD, START = 0, 1
MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""Code points that UTF-8 cannot encode."""
Ranges = tuple[tuple[int, int], ...]
"""Inclusive ranges of code points, in order, neither overlapping nor adjacent."""


class Origin(NamedTuple):
    """The place of a request that a part of a language comes from, for errors."""

    keyword: str
    pointer: str
    """The JSON pointer of the keyword's schema; empty for the whole."""

    def __str__(self) -> str:
        """The keyword and its place, as `maxLength at /properties/name`."""
        return f"{self.keyword} at {self.pointer or '/'}"


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Literal:
    """One text."""

    text: str


@dataclass(frozen=True)
class Concatenation:
    """Parts that follow each other."""

    parts: tuple["Language", ...]


@dataclass(frozen=True)
class Alternatives:
    """One of several languages; none at all allows nothing."""

    options: tuple["Language", ...]
    origin: Origin | None = None


@dataclass(frozen=True)
class Repetition:
    """A language several times, with a separator between two; a `most` of None is unbounded."""

    body: "Language"
    least: int = 0
    most: int | None = None
    origin: Origin | None = None
    separator: "Language" = Literal("")


@dataclass(frozen=True)
class Members:
    """Members in order, of which some may be left out, with a separator between two members."""

    members: tuple[tuple["Language", bool], ...]
    """Each member, and whether it is required."""
    separator: "Language"


@dataclass(frozen=True)
class Restricted:
    """The texts of a language that are, or are not, texts of another one."""

    body: "Language"
    other: "Language"
    is_negated: bool


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton. State 0 accepts nothing, and state 1 is the first."""

    next_SC: np.ndarray
    """The next state of each state for each class of bytes."""
    class_of_byte: np.ndarray
    is_accepting_S: np.ndarray

    @property
    def num_states(self) -> int:
        """The number of states."""
        return len(self.next_SC)

    @property
    def is_empty(self) -> bool:
        """Whether no text is in the language."""
        return not self.is_accepting_S[START] and bool((self.next_SC[START] == DEAD).all())

    def accepts(self, text: bytes) -> bool:
        """Whether a text is in the language."""
        state = START
        for byte in text:
            state = self.next_SC[state, self.class_of_byte[byte]]
        return bool(self.is_accepting_S[state])


@dataclass(frozen=True)
class Compiled:
    """The language of an automaton."""

    automaton: ByteAutomaton


Language = Union[  # noqa: UP007 - the names in quotation marks are not defined yet
    Characters,
    Literal,
    Concatenation,
    Alternatives,
    Repetition,
    Members,
    Restricted,
    Compiled,
]


class ReadLanguage(NamedTuple):
    """The language of a schema or grammar."""

    language: Language
    is_recursive: bool
    """Whether a part of it leads to itself more often than was allowed."""


class TooManyParts(Exception):
    """A schema or grammar has too many parts, those of references included."""


EMPTY = Literal("")
NOTHING = Alternatives(())
"""The language without a text."""


def sequence(*parts: Language | str) -> Concatenation:
    """Parts that follow each other; a string is itself."""
    return Concatenation(tuple(map(_language, parts)))


def either(*options: Language | str) -> Alternatives:
    """One of several parts; a string is itself."""
    return Alternatives(tuple(map(_language, options)))


def optional(part: Language | str) -> Repetition:
    """A part, or nothing."""
    return Repetition(_language(part), 0, 1)


def characters(*ranges: tuple[int, int] | str) -> Characters:
    """One character of a set, given as ranges of code points or as strings of characters."""
    pairs: list[tuple[int, int]] = []
    for item in ranges:
        pairs += [(ord(c), ord(c)) for c in item] if isinstance(item, str) else [item]
    return Characters(merged(pairs))


def merged(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order, without overlaps."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """All characters except those in `ranges` and surrogates."""
    found, start = [], 0
    for low, high in merged([*ranges, SURROGATES]):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, MAX_CODE_POINT)) if start <= MAX_CODE_POINT else tuple(found)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """The characters in both sets."""
    return tuple(
        (max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) <= min(b, d)
    )


ANY_CHARACTER = Characters(complement(()))


def children(language: Language) -> Sequence[Language]:
    """The languages that a language is made of."""
    match language:
        case Concatenation(parts):
            return parts
        case Alternatives(options):
            return options
        case Repetition(body, separator=separator):
            return body, separator
        case Restricted(body, other):
            return body, other
        case Members(members, separator):
            return (*(member for member, _ in members), separator)
        case _:
            return ()


def _language(part: Language | str) -> Language:
    return Literal(part) if isinstance(part, str) else part
