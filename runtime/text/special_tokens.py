"""Special tokens in text: finding them, and keeping user text from becoming one.

A chat template mixes its own special tokens with what users wrote. Before rendering, `protect` puts
a mark, one character that occurs nowhere else, before each place where a user's string holds the
text of a special token, or the beginning of one at its end, or the end of one at its beginning (two
strings side by side could otherwise join into one). After rendering, `split` cuts at special tokens
that have no mark and drops the marks. Strings without such places are not touched at all, so a
template sees ordinary content as it is.

Knows nothing about vocabularies, templates or encoders.
"""

import itertools
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping

# Plane 16 is private use: no text has a meaning there, so a free character is found at once.
_MARK_RANGE = range(0x100000, 0x10FFFE)


class SpecialTokens:
    """The special tokens of one vocabulary, by id and by text."""

    def __init__(
        self,
        text_by_id: Mapping[int, str],
        *,
        strips_left: Collection[int] = (),
        strips_right: Collection[int] = (),
    ):
        """Takes the texts by id, and the ids that swallow the white space on one side of them."""
        self.text_by_id = {token: text for token, text in text_by_id.items() if text}
        self._id_by_text = {text: token for token, text in self.text_by_id.items()}
        self._strips_left = frozenset(strips_left)
        self._strips_right = frozenset(strips_right)
        texts = self._id_by_text
        self._pattern = re.compile(_longest_of(texts)) if texts else None
        self._starts = re.compile(f"(?={_longest_of(texts)})") if texts else None
        self._longest = max(map(len, texts), default=0)
        self._firsts = {text[0] for text in texts}
        self._lasts = {text[-1] for text in texts}
        self._heads = {text[:cut] for text in texts for cut in range(1, len(text))}
        self._tails = {text[cut:] for text in texts for cut in range(1, len(text))}

    def split(self, text: str, mark: str | None = None) -> list[int | str]:
        """Cuts `text` into special token ids and the plain text between them, in order.

        Special-token text right after `mark` is plain; marks are dropped from the plain text.
        """
        pieces: list[int | str] = []
        plain_start, strip_next = 0, False
        for start, end in self._occurrences(text, mark):
            token = self._id_by_text[text[start:end]]
            plain = text[plain_start:start]
            plain = plain.lstrip() if strip_next else plain
            pieces.append(plain.rstrip() if token in self._strips_left else plain)
            pieces.append(token)
            plain_start, strip_next = end, token in self._strips_right
        rest = text[plain_start:]
        pieces.append(rest.lstrip() if strip_next else rest)
        if mark is not None:
            pieces = [p if isinstance(p, int) else p.replace(mark, "") for p in pieces]
        return [piece for piece in pieces if piece != ""]

    def may_occur_in(self, text: str) -> bool:
        """Whether `protect` has to look at `text`; most texts hold no character of a token."""
        start = text[: self._longest]
        return any(first in text for first in self._firsts) or any(
            last in start for last in self._lasts
        )

    def protect(self, text: str, mark: str) -> str:
        """Puts `mark` wherever `text` could be taken for a special token or a part of one."""
        if self._starts is None:
            return text
        positions = {match.start() for match in self._starts.finditer(text)}
        for length in range(1, min(self._longest, len(text) + 1)):
            if text[-length:] in self._heads:
                positions.add(len(text) - length)
            if text[:length] in self._tails:
                positions.add(0)
        if not positions:
            return text
        cuts = [0, *sorted(positions), len(text)]
        return mark.join(text[a:b] for a, b in itertools.pairwise(cuts))

    def _occurrences(self, text: str, mark: str | None) -> Iterator[tuple[int, int]]:
        position = 0
        while self._pattern and (match := self._pattern.search(text, position)):
            start, end = match.span()
            if mark is not None and start > 0 and text[start - 1] == mark:
                position = start + 1  # a user's text; a true token may still begin inside it
            else:
                yield start, end
                position = end


def unused_character(texts: Iterable[str]) -> str | None:
    """Draws a private-use character that occurs in none of `texts`; None if every one occurs."""
    taken = set().union(*texts)
    if sum(ord(character) in _MARK_RANGE for character in taken) == len(_MARK_RANGE):
        return None
    while (mark := chr(secrets.choice(_MARK_RANGE))) in taken:
        pass
    return mark


def _longest_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of `texts` at a position.

    Common beginnings are shared: vocabularies have a thousand placeholders with one prefix, and
    trying each of them at each "<" of a long text would take minutes.
    """
    alternatives, is_optional = [], False
    for first, group in itertools.groupby(sorted(set(texts)), key=lambda text: text[:1]):
        if not first:
            is_optional = True
            continue
        members = list(group)
        # of a sorted list, the first and the last member differ the earliest
        shared = itertools.takewhile(
            lambda ab: ab[0] == ab[1], zip(members[0], members[-1], strict=False)
        )
        prefix = "".join(a for a, _ in shared)
        rests = [text[len(prefix) :] for text in members]
        alternatives.append(re.escape(prefix) + (_longest_of(rests) if any(rests) else ""))
    return f"(?:{'|'.join(alternatives)}){'?' if is_optional else ''}"
