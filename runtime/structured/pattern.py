r"""Reads regular expressions: the syntax that Python's `re` and ECMAScript have in common.

A pattern allows a text only if both would match it, so `\d`, `\w`, `\s` and their complements stand
for ASCII characters. Named groups may have the notation of either. Constructs that are not regular,
and those whose meaning differs, are refused with their place. Does not know about JSON or automata.
"""

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
    characters,
    complement,
    intersection,
    merged,
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
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11}
_HEX_DIGITS = {"x": 2, "u": 4}
_LINE_ENDS = characters("\n\r\u2028\u2029").ranges
_DOT = Characters(complement(_LINE_ENDS))
ANY_TEXT = Repetition(ANY_CHARACTER)


class PatternError(ValueError):
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

    def read(self) -> Language:
        language = self._alternatives(is_outermost=True)
        if self._at < len(self._pattern):
            raise self._error("a group before this parenthesis")
        return language

    def _alternatives(self, *, is_outermost: bool = False) -> Language:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"at most {_MAX_DEPTH} groups inside each other")
        options = [self._branch(is_outermost)]
        while self._takes("|"):
            options.append(self._branch(is_outermost))
        self._depth -= 1
        return options[0] if len(options) == 1 else Alternatives(tuple(options), self._origin)

    def _branch(self, is_outermost: bool) -> Language:
        """One alternative. Anchors may stand at the ends of the outermost ones."""
        parts: list[Language] = []
        begins = is_outermost and self._takes("^")
        ends = False
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            if is_outermost and self._pattern[self._at] == "$":
                self._at += 1
                ends = True
                if self._at < len(self._pattern) and self._pattern[self._at] != "|":
                    self._at -= 1
                    raise self._error("$ at the end of the pattern only")
                break
            parts.append(self._repeated())
        if is_outermost and self._is_search:
            parts = [*([] if begins else [ANY_TEXT]), *parts, *([] if ends else [ANY_TEXT])]
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts)) if parts else EMPTY

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
                return _DOT
            case "\\":
                return Characters(self._escape())
            case "^" | "$" | "*" | "+" | "?" | "{" | "}" | "]":
                self._at -= 1
                place = "at an end of the pattern" if character in "^$" else "after a backslash"
                raise self._error(f"{character} {place} only")
        return self._character(character)

    def _group(self) -> Language:
        if self._takes("?"):
            if self._takes("P<") or (self._at_is("<") and not self._at_is("<=", "<!")):
                self._at = self._pattern.find(">", self._at) + 1 or len(self._pattern)
            elif not self._takes(":"):
                raise self._error("a group without look-around, reference, condition or flags")
        language = self._alternatives()
        if not self._takes(")"):
            raise self._error("a closing parenthesis")
        return language

    def _set(self) -> Language:
        """A set in brackets."""
        is_negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        has_class = False
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
                has_class |= not _is_single(low)
                ranges += low
        found = intersection(merged(ranges), ANY_CHARACTER.ranges)
        if is_negated:
            found = complement(found)
            found = intersection(found, _ASCII) if has_class else found
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
            return _CLASSES[character]
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


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
