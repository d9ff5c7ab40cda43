"""Builds automata with byte ranges on their edges, and with edges without a byte, from languages.

A state may have several next states for a byte; `byte_automaton` makes them deterministic. Does not
know about tokens, JSON or requests.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np

from .language import (
    DEAD,
    START,
    Alternatives,
    ByteAutomaton,
    Characters,
    Compiled,
    Concatenation,
    Language,
    Literal,
    Members,
    Ranges,
    Repetition,
    Restricted,
)

_ByteRange = tuple[int, int]
_MAX_OF_BYTES = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


class Builder:
    """An automaton with edges of byte ranges, and edges without a byte."""

    def __init__(self, restrict: Callable[[Restricted], ByteAutomaton]):
        """`restrict` makes the automaton of a restricted language."""
        self._restrict = restrict
        self.edges: list[list[tuple[int, int, int]]] = []
        """The first byte, the last byte and the target of the edges of each state."""
        self.free: list[list[int]] = []
        """The states that each state may become without a byte."""

    def state(self) -> int:
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def add(self, language: Language, start: int) -> int:
        """Add the paths of a language from a state on; return the state at their end."""
        match language:
            case Characters(ranges):
                return self._add_characters(ranges, start)
            case Literal(text):
                for byte in text.encode():
                    end = self.state()
                    self.edges[start].append((byte, byte, end))
                    start = end
                return start
            case Concatenation(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Alternatives(options):
                end = self.state()
                for option in options:
                    first = self.state()
                    self.free[start].append(first)
                    self.free[self.add(option, first)].append(end)
                return end
            case Repetition():
                return self._add_repetition(language, start)
            case Members():
                return self._add_members(language, start)
            case Restricted():
                return self._add_automaton(self._restrict(language), start)
            case Compiled(automaton):
                return self._add_automaton(automaton, start)

    def _add_characters(self, ranges: Ranges, start: int) -> int:
        end = self.state()
        after: dict[tuple[_ByteRange, ...], int] = {(): end}
        for path in utf8_paths(ranges):
            for place in range(len(path) - 1, 0, -1):
                if path[place:] not in after:
                    state = after[path[place:]] = self.state()
                    self.edges[state].append((*path[place], after[path[place + 1 :]]))
            self.edges[start].append((*path[0], after[path[1:]]))
        return end

    def _add_repetition(self, repetition: Repetition, start: int) -> int:
        body, separator = repetition.body, repetition.separator
        least, most = repetition.least, repetition.most
        end = self.state()
        if least == 0:
            self.free[start].append(end)
        if most == 0:
            return end
        last = 1 if most is None else most
        for count in range(1, max(least, last) + 1):
            # an own state, as the end of a loop may have edges back
            entry = self.state()
            self.free[start if count == 1 else self.add(separator, start)].append(entry)
            start = self.add(body, entry)
            if count >= least:
                self.free[start].append(end)
            if most is None and count >= max(least, last):
                self.free[self.add(separator, start)].append(entry)
        return end

    def _add_members(self, language: Members, start: int) -> int:
        """Two paths lead past each member: one without a member so far, one with some."""
        none, some = start, self.state()
        for member, is_required in language.members:
            entry = self.state()
            self.free[none].append(entry)
            self.free[self.add(language.separator, some)].append(entry)
            next_none, next_some = self.state(), self.state()
            if not is_required:
                self.free[none].append(next_none)
                self.free[some].append(next_some)
            self.free[self.add(member, entry)].append(next_some)
            none, some = next_none, next_some
        end = self.state()
        self.free[none].append(end)
        self.free[some].append(end)
        return end

    def _add_automaton(self, automaton: ByteAutomaton, start: int) -> int:
        states, end = [self.state() for _ in range(automaton.num_states)], self.state()
        # the first byte, the last byte and the class of each run of bytes of one class
        classes = automaton.class_of_byte
        starts = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), 256]
        runs = [(low, end - 1, int(classes[low])) for low, end in pairwise(starts)]
        for state, row in enumerate(automaton.next_SC.tolist()):
            for low, high, byte_class in runs:
                if row[byte_class] != DEAD:
                    self.edges[states[state]].append((low, high, states[row[byte_class]]))
            if automaton.is_accepting_S[state]:
                self.free[states[state]].append(end)
        self.free[start].append(states[START])
        return end


@lru_cache(maxsize=4096)
def utf8_paths(ranges: Ranges) -> tuple[tuple[_ByteRange, ...], ...]:
    """The UTF-8 encodings of characters, as sequences of byte ranges."""
    paths: list[tuple[_ByteRange, ...]] = []
    for low, high in ranges:
        for most in _MAX_OF_BYTES:
            if low <= min(high, most):
                _add_paths(low, min(high, most), paths)
                low = most + 1
    return tuple(paths)


def _add_paths(low: int, high: int, paths: list[tuple[_ByteRange, ...]]) -> None:
    """Add the encodings of a range of characters that have the same number of bytes."""
    length = len(chr(low).encode())
    for trailing in range(1, length):
        mask = (1 << 6 * trailing) - 1
        if low & ~mask != high & ~mask:
            # split where the leading bytes change, unless each is followed by all trailing bytes
            if low & mask:
                _add_paths(low, low | mask, paths)
                _add_paths((low | mask) + 1, high, paths)
                return
            if high & mask != mask:
                _add_paths(low, (high & ~mask) - 1, paths)
                _add_paths(high & ~mask, high, paths)
                return
    paths.append(tuple(zip(chr(low).encode(), chr(high).encode(), strict=True)))
