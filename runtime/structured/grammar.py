r"""Reads grammars as languages: rules `name ::= ...` in the notation of llama.cpp and XGrammar.

An automaton has no stack. A rule that calls itself at the beginning or the end of an alternative
becomes a loop without a bound. Any other recursion is bounded: texts that need more of it are not
in the language. Does not know about tokens or requests.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .language import (
    ANY_CHARACTER,
    EMPTY,
    NOTHING,
    Alternatives,
    Concatenation,
    Language,
    Literal,
    Origin,
    ReadLanguage,
    Repetition,
    TooManyParts,
)
from .pattern import MAX_COUNT, PatternError, read_pattern

MAX_GRAMMAR = 65_536
"""Maximum length of a grammar in characters."""
ROOT = "root"
_MAX_CALLS = 10_000
_MAX_DEPTH = 64
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<rule>[A-Za-z_][\w-]*)(?=[ \t]*::=)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<define>::=)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n]|\\.)+\])
    |(?P<bounds>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[|()*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Call(NamedTuple):
    """A call of a rule."""

    name: str


@dataclass(frozen=True)
class _Item:
    """A part of an alternative, and how often it stands there."""

    atom: "Language | _Call | _Choice"
    least: int = 1
    most: int | None = 1


_Choice = tuple[tuple[_Item, ...], ...]
"""Alternatives, each of which is a sequence."""


def read_grammar(grammar: str, recursion: int = 0) -> ReadLanguage:
    """Read a grammar, whose texts are those of the rule `root`.

    Args:
      grammar: The text of the grammar.
      recursion: The maximum number of times that a rule calls itself, loops apart.

    Raises:
      PatternError: The grammar is wrong; the message says where.
      TooManyParts: Its rules call each other too often.
    """
    rules = _Parser(grammar).rules()
    expander = _Expander(rules, recursion)
    return ReadLanguage(expander.rule(ROOT, ()), expander.is_recursive)


class _Parser:
    """Reads the rules of a grammar from left to right."""

    def __init__(self, grammar: str):
        if len(grammar) > MAX_GRAMMAR:
            raise PatternError(f"expected at most {MAX_GRAMMAR} characters, got {len(grammar)}")
        if any("\ud800" <= character <= "\udfff" for character in grammar):
            raise PatternError("expected text without lone surrogates")
        self._tokens = [*_tokens(grammar), _Token("end", "", len(grammar))]
        self._next, self._depth = 0, 0

    def rules(self) -> dict[str, _Choice]:
        """The alternatives of each rule."""
        found: dict[str, _Choice] = {}
        while (token := self._take()).kind != "end":
            if token.kind != "rule":
                raise _wrong(token, "a rule as `name ::= ...`")
            if token.text in found:
                raise _wrong(token, "one rule of each name")
            self._take()
            found[token.text] = self._choice()
        called = {t.text: t for t in self._tokens if t.kind == "name"}
        for name, token in called.items():
            if name not in found:
                raise _wrong(token, f"a rule of the name {name}")
        if ROOT not in found:
            raise PatternError(f"expected a rule of the name {ROOT}, got {[*found]}")
        return found

    def _take(self) -> _Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _choice(self) -> _Choice:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _wrong(self._peek(), f"at most {_MAX_DEPTH} groups inside each other")
        options = [self._sequence()]
        while self._peek().text == "|" and self._peek().kind == "sign":
            self._take()
            options.append(self._sequence())
        self._depth -= 1
        return tuple(options)

    def _sequence(self) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while (token := self._peek()).kind in ("name", "text", "set") or token.text in ("(", "."):
            items.append(self._quantified(self._atom(self._take())))
        return tuple(items)

    def _atom(self, token: _Token) -> "Language | _Call | _Choice":
        match token.kind:
            case "name":
                return _Call(token.text)
            case "text":
                return Literal(_unescaped(token))
            case "set":
                try:
                    return read_pattern(token.text)
                except PatternError as error:
                    raise PatternError(f"{error}, in the set at {token.at}") from None
        if token.text == ".":
            return ANY_CHARACTER
        choice = self._choice()
        if (end := self._take()).text != ")":
            raise _wrong(end, "a closing parenthesis")
        return choice

    def _quantified(self, atom: "Language | _Call | _Choice") -> _Item:
        token = self._peek()
        if token.kind == "bounds":
            bounds = _bounds(token)
        elif token.kind == "sign" and token.text in _QUANTIFIERS:
            bounds = _QUANTIFIERS[token.text]
        else:
            return _Item(atom)
        self._take()
        return _Item(atom, *bounds)


class _Expander:
    """Puts rules in the place of their calls."""

    def __init__(self, rules: dict[str, _Choice], recursion: int):
        self._rules, self._recursion = rules, recursion
        self._num_calls = 0
        self.is_recursive = False

    def rule(self, name: str, calls: tuple[str, ...]) -> Language:
        """The language of a rule.

        A rule with the alternatives `A op A`, `before A`, `A after` and `other` allows the texts
        `B (op B)*`, where B is `before* other after*`.

        Args:
          name: The rule.
          calls: The rules whose calls led to it.
        """
        if calls.count(name) > self._recursion:
            self.is_recursive = True
            return NOTHING
        self._num_calls += 1
        if self._num_calls > _MAX_CALLS or len(calls) > _MAX_DEPTH:
            raise TooManyParts
        inner = (*calls, name)
        between, before, after, others = [], [], [], []
        for items in self._rules[name]:
            begins, ends = (bool(items) and items[at] == _Item(_Call(name)) for at in (0, -1))
            if begins and ends and len(items) > 1:
                between.append(self._items(items[1:-1], inner))
            elif begins:
                after.append(self._items(items[1:], inner))
            elif ends:
                before.append(self._items(items[:-1], inner))
            else:
                others.append(self._items(items, inner))
        once = _joined(_any_number(before), _one_of(others, name), _any_number(after))
        return _joined(once, _any_number([_joined(op, once) for op in between]))

    def _items(self, items: Sequence[_Item], calls: tuple[str, ...]) -> Language:
        return _joined(*(self._item(item, calls) for item in items))

    def _item(self, item: _Item, calls: tuple[str, ...]) -> Language:
        if isinstance(item.atom, _Call):
            body = self.rule(item.atom.name, calls)
        elif isinstance(item.atom, tuple):
            body = _one_of([self._items(items, calls) for items in item.atom], calls[-1])
        else:
            body = item.atom
        if (item.least, item.most) == (1, 1):
            return body
        return Repetition(body, item.least, item.most, Origin("grammar", calls[-1]))


def _tokens(grammar: str) -> list[_Token]:
    found, at = [], 0
    while at < len(grammar):
        if (match := _TOKEN.match(grammar, at)) is None:
            raise _wrong(_Token("", grammar[at], at), 'a name, a "text", a [set] or a sign')
        if match.lastgroup != "space":
            found.append(_Token(str(match.lastgroup), match.group(), at))
        at = match.end()
    return found


def _bounds(token: _Token) -> tuple[int, int | None]:
    low, comma, high = token.text[1:-1].replace(" ", "").partition(",")
    least = int(low or 0)
    most = (int(high) if high else None) if comma else least
    if (
        max(least, most or 0) > MAX_COUNT
        or (most is not None and most < least)
        or not (low or high)
    ):
        raise _wrong(token, f"counts in order, of at most {MAX_COUNT}")
    return least, most


def _unescaped(token: _Token) -> str:
    def one(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        if digits is None:
            return _ESCAPED.get(match[4], match[4])
        if int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) <= 0xDFFF:
            raise _wrong(token, "characters that UTF-8 can encode")
        return chr(int(digits, 16))

    return _ESCAPE.sub(one, token.text[1:-1])


def _any_number(options: Sequence[Language]) -> Language:
    return Repetition(_one_of(options, ROOT)) if options else EMPTY


def _one_of(options: Sequence[Language], name: str) -> Language:
    if len(options) == 1:
        return options[0]
    return Alternatives(tuple(options), Origin("grammar", name))


def _joined(*parts: Language) -> Language:
    kept = tuple(part for part in parts if part != EMPTY)
    return kept[0] if len(kept) == 1 else Concatenation(kept) if kept else EMPTY


def _wrong(token: _Token, expected: str) -> PatternError:
    got = token.text or "the end"
    return PatternError(f"expected {expected}, got {got[:40]} at character {token.at}")
