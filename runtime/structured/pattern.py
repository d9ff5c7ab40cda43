r"""Reads regular expressions: the syntax that Python's `re` and ECMAScript have in common.

A pattern allows a text only if both would match it, so `\d`, `\w`, `\s` and their complements stand
for ASCII characters. A negative look-ahead forbids what either would find, so they stand for all
others too. Named groups may have the notation of either. Constructs that are not regular, and those
whose meaning differs, are refused with their place. Does not know about JSON or automata.
"""

from typing import NamedTuple

from ..errors import UserError
from .language import (
    ANY_CHARACTER,
    EMPTY,
    Alternatives,
    Characters,
    Concatenation,
    Language,
    Origin,
    Ranges,
    Repetition,
    Restricted,
    characters,
    complement,
    intersection,
    merged,
    optional,
)

MAX_PATTERN = 4096
"""Maximum length of a pattern in characters."""
MAX_COUNT = 10_000
"""Maximum number in braces."""
_MAX_DEPTH = 50
_ASCII: Ranges = ((0, 0x7F),)
_CLASSES: dict[str, Ranges] = {
    "d": characters("0123456789").ranges,
    "w": characters((0x30, 0x39), (0x41, 0x5A), "_", (0x61, 0x7A)).ranges,
    "s": characters(" \t\n\r\f\v").ranges,
}
_CLASSES |= {k.upper(): intersection(complement(v), _ASCII) for k, v in _CLASSES.items()}
_LARGE_CLASSES = {k: complement(_CLASSES[k.swapcase()]) for k in _CLASSES}
"""The characters of classes in one of the two languages, or in both."""
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11}
_HEX_DIGITS = {"x": 2, "u": 4}
_LINE_ENDS = characters("\n\r\u2028\u2029").ranges
_DOT = Characters(complement(_LINE_ENDS))
_LARGE_DOT = Characters(complement(characters("\n").ranges))
ANY_TEXT = Repetition(ANY_CHARACTER)


class _Ends(NamedTuple):
    """The ends of alternatives that reach to the end of the text."""

    is_start: bool
    """Whether they begin where the text begins."""
    has_before: bool
    """Whether any text may stand before them, unless they begin with `^`."""
    has_after: bool
    """Whether any text may stand after them, unless they end with `$`."""


class PatternError(UserError):
    """A pattern that is wrong or not supported; the message says where."""


def read_pattern(
    pattern: str, *, is_search: bool = False, origin: Origin | None = None
) -> Language:
    """The language of a pattern.

    Args:
      pattern: The pattern.
      is_search: Whether a match anywhere in a text is enough, as in JSON Schema. Otherwise the
        whole text must match.
      origin: The place that repetitions in the pattern come from.

    Raises:
      PatternError: The pattern is wrong, or has constructs that are not supported.
    """
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"expected at most {MAX_PATTERN} characters, got {len(pattern)}")
    return _Reader(pattern, is_search, origin).read()


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str, is_search: bool, origin: Origin | None):
        self._pattern, self._is_search, self._origin = pattern, is_search, origin
        self._at, self._depth = 0, 0
        self._closings = _closings(pattern)
        self._is_large = False
        """Whether the language may have more texts than the pattern, as it is forbidden."""

    def read(self) -> Language:
        language = self._alternatives(_Ends(True, self._is_search, self._is_search))
        if self._at < len(self._pattern):
            raise self._error("a group before this parenthesis")
        return language

    def _alternatives(self, ends: _Ends | None = None) -> Language:
        """Alternatives; those that reach to the end of the text may have anchors and look-ahead."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"at most {_MAX_DEPTH} groups inside each other")
        options = [self._branch(ends)]
        while self._takes("|"):
            options.append(self._branch(ends))
        self._depth -= 1
        return options[0] if len(options) == 1 else Alternatives(tuple(options), self._origin)

    def _branch(self, ends: _Ends | None) -> Language:
        """One alternative."""
        if ends is None:
            return _joined(self._items(reaches_end=False))
        if ends.is_start and self._takes("^"):
            ends = ends._replace(has_before=False)
        before = [ANY_TEXT] if ends.has_before else []
        return _joined([*before, self._rest(ends._replace(is_start=not before and ends.is_start))])

    def _rest(self, ends: _Ends) -> Language:
        """The rest of an alternative, up to the end of the text."""
        items = self._items(reaches_end=True)
        # what stands here begins where the items end
        ends = ends._replace(is_start=ends.is_start and not items, has_before=False)
        is_negated = self._takes("(?!")
        if is_negated or self._takes("(?="):
            self._depth += 1  # for the bound of what is inside each other
            self._is_large ^= is_negated
            other = self._alternatives(ends._replace(has_after=True))
            self._is_large ^= is_negated
            if not self._takes(")") or self._at_is("*", "+", "?", "{"):
                raise self._error("a look-ahead that ends with a parenthesis, without a quantifier")
            rest = self._rest(ends)
            self._depth -= 1
            return _joined([*items, Restricted(rest, other, is_negated)])
        if self._takes("("):
            return _joined([*items, self._group(ends)])
        if not self._takes("$"):
            return _joined([*items, *([ANY_TEXT] if ends.has_after else [])])
        if self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            self._at -= 1
            raise self._error("$ at the end of the pattern only")
        # in Python, it also matches before a line end that ends the text
        return _joined([*items, *([optional("\n")] if self._is_large else [])])

    def _items(self, *, reaches_end: bool) -> list[Language]:
        """The items before the end of an alternative.

        If the alternative reaches to the end of the text, an anchor, a look-ahead and a last group,
        which may have these too, are left.
        """
        items: list[Language] = []
        while self._at < len(self._pattern) and not self._at_is("|", ")"):
            if reaches_end and (self._at_is("$", "(?=", "(?!") or self._is_last_group()):
                break
            items.append(self._repeated())
        return items

    def _is_last_group(self) -> bool:
        """Whether a group begins here, after which its alternative ends."""
        closing = self._closings.get(self._at)
        return closing is not None and self._pattern[closing + 1 : closing + 2] in ("", "|", ")")

    def _repeated(self) -> Language:
        atom = self._atom()
        if (bounds := self._bounds()) is not None:
            atom = Repetition(atom, *bounds, self._origin)
            self._takes("?")  # how many a search tries first does not change the language
            if self._at < len(self._pattern) and self._pattern[self._at] in "*+?{":
                raise self._error("one quantifier after an item")
        return atom

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                return bounds
        if not self._takes("{"):
            return None
        least = self._number()
        most: int | None = least
        if self._takes(","):
            most = None if self._at_is("}") else self._number()
        if not self._takes("}"):
            raise self._error("a quantifier such as {2} or {2,4}, or an escaped brace")
        if most is not None and most < least:
            raise self._error(f"at least {least} as the second number")
        return least, most

    def _number(self) -> int:
        start = self._at
        while self._at < len(self._pattern) and self._pattern[self._at] in "0123456789":
            self._at += 1
        digits = self._pattern[start : self._at]
        if not digits or len(digits) > 6 or int(digits) > MAX_COUNT:
            self._at = start
            raise self._error(f"a number up to {MAX_COUNT}")
        return int(digits)

    def _atom(self) -> Language:
        character = self._pattern[self._at]
        self._at += 1
        match character:
            case "(":
                return self._group()
            case "[":
                return self._set()
            case ".":
                return _LARGE_DOT if self._is_large else _DOT
            case "\\":
                return Characters(self._escape())
            case "^" | "$" | "*" | "+" | "?" | "{" | "}" | "]":
                self._at -= 1
                place = "at an end of the pattern" if character in "^$" else "after a backslash"
                raise self._error(f"{character} {place} only")
        return self._character(character)

    def _group(self, ends: _Ends | None = None) -> Language:
        if self._takes("?"):
            if self._takes("P<") or (self._at_is("<") and not self._at_is("<=", "<!")):
                self._at = self._pattern.find(">", self._at) + 1 or len(self._pattern)
            elif self._at_is("=", "!"):
                raise self._error("look-ahead outside of groups that are followed or repeated")
            elif not self._takes(":"):
                raise self._error("a group without look-behind, reference, condition or flags")
        language = self._alternatives(ends)
        if not self._takes(")"):
            raise self._error("a closing parenthesis")
        return language

    def _set(self) -> Language:
        """A set in brackets."""
        is_negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        self._is_large ^= is_negated
        if self._at_is("]"):
            raise self._error("a set that is not empty; write \\] for the bracket")
        while not self._takes("]"):
            if self._at_is("[", "&&", "--", "||", "~~"):
                raise self._error("a backslash before this character in a set")
            low = self._member()
            if self._at_is("-") and not self._at_is("-]"):
                self._at += 1
                high = self._member()
                if not _is_single(low) or not _is_single(high) or low[0][0] > high[0][0]:
                    raise self._error("a range of characters in order before this place")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        self._is_large ^= is_negated
        found = intersection(merged(ranges), ANY_CHARACTER.ranges)
        found = complement(found) if is_negated else found
        if not found:
            raise self._error("a set that has a character before this place")
        return Characters(found)

    def _member(self) -> Ranges:
        if self._at >= len(self._pattern):
            raise self._error("a closing bracket")
        character = self._pattern[self._at]
        self._at += 1
        return self._escape() if character == "\\" else self._character(character).ranges

    def _escape(self) -> Ranges:
        """The characters after a backslash."""
        if self._at >= len(self._pattern):
            raise self._error("a character after the backslash")
        character = self._pattern[self._at]
        self._at += 1
        if character in _CLASSES:
            return (_LARGE_CLASSES if self._is_large else _CLASSES)[character]
        if character in _CONTROLS:
            return characters((_CONTROLS[character], _CONTROLS[character])).ranges
        if (count := _HEX_DIGITS.get(character)) is not None:
            digits = self._pattern[self._at : self._at + count]
            if len(digits) == count and all(d in "0123456789abcdefABCDEF" for d in digits):
                self._at += count
                return self._character(chr(int(digits, 16))).ranges
        if character.isascii() and character.isalnum():
            self._at -= 1
            raise self._error("no such escape: \\b, \\B, \\A, \\Z, \\p and references are unknown")
        return self._character(character).ranges

    def _character(self, character: str) -> Characters:
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise self._error("no surrogate")
        return Characters(((ord(character), ord(character)),))

    def _takes(self, text: str) -> bool:
        is_next = self._at_is(text)
        self._at += len(text) if is_next else 0
        return is_next

    def _at_is(self, *texts: str) -> bool:
        return self._pattern.startswith(texts, self._at)

    def _error(self, expected: str) -> PatternError:
        rest = self._pattern[self._at : self._at + 20]
        got = f"{rest!r} at character {self._at}" if rest else "the end of the pattern"
        return PatternError(f"expected {expected}, got {got}")


def _closings(pattern: str) -> dict[int, int]:
    """The place of the closing parenthesis for each opening one."""
    found, opened = {}, []
    at, is_set = 0, False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif is_set:
            is_set = character != "]"
        elif character == "(":
            opened.append(at)
        elif character == ")" and opened:
            found[opened.pop()] = at
        else:
            is_set = character == "["
        at += 1
    return found


def _joined(parts: list[Language]) -> Language:
    return parts[0] if len(parts) == 1 else Concatenation(tuple(parts)) if parts else EMPTY


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
