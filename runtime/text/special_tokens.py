"""Find special tokens in text, and prevent text of users from becoming special tokens.

A chat template mixes its own special tokens with text of users. Before the rendering, `protect`
puts a mark into the strings of users: one character that occurs nowhere else. A mark is put before
the text of a special token, before the beginning of a special token at the end of a string, and
before the end of a special token at the beginning of a string, as two adjacent strings could
otherwise form a special token. After the rendering, `split` cuts the text at special tokens without
a mark, and removes the marks. Strings without any of these places are unchanged, so a template sees
ordinary content as it is.

Does not know about vocabularies, templates or encoders.
"""

import itertools
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping

# plane 16 is for private use: text rarely has such characters, so an unused one is found quickly
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
        """Ids in `strips_left` and `strips_right` remove white space on their left and right."""
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
        """Split `text` into the ids of special tokens and the plain text between them, in order.

        The text of a special token directly after `mark` is plain text. Marks are removed.
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
        """Whether `protect` may change `text`: a fast check that is False for most texts."""
        start = text[: self._longest]
        return any(first in text for first in self._firsts) or any(
            last in start for last in self._lasts
        )

    def protect(self, text: str, mark: str) -> str:
        """Put `mark` before each place of `text` that could become a part of a special token."""
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
                position = start + 1  # text of a user; a real token may begin inside it
            else:
                yield start, end
                position = end


def unused_character(texts: Iterable[str]) -> str | None:
    """Choose a private-use character that is in none of `texts`; None if all of them occur."""
    taken = set().union(*texts)
    if sum(ord(character) in _MARK_RANGE for character in taken) == len(_MARK_RANGE):
        return None
    while (mark := chr(secrets.choice(_MARK_RANGE))) in taken:
        pass
    return mark


def _longest_of(texts: Iterable[str]) -> str:
    """A regular expression that matches the longest of `texts` at a position.

    Texts with a common prefix share one alternative: vocabularies have a thousand placeholders with
    the same prefix, and matching each of them at each "<" of a long text would take minutes.
    """
    alternatives, is_optional = [], False
    for first, group in itertools.groupby(sorted(set(texts)), key=lambda text: text[:1]):
        if not first:
            is_optional = True
            continue
        members = list(group)
        # in a sorted list, the first and the last member have the shortest common prefix
        shared = itertools.takewhile(
            lambda ab: ab[0] == ab[1], zip(members[0], members[-1], strict=False)
        )
        prefix = "".join(a for a, _ in shared)
        rests = [text[len(prefix) :] for text in members]
        alternatives.append(re.escape(prefix) + (_longest_of(rests) if any(rests) else ""))
    return f"(?:{'|'.join(alternatives)}){'?' if is_optional else ''}"
