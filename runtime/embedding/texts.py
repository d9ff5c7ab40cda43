"""The texts of one embedding request as token ids, and their form as one list of integers.

The batch job keeps, compares and hashes the token ids of a row as one list. So the texts of a row
are packed into a list: their number, three facts of each (the length, the first part, the tokens
that were cut), then all ids. Knows nothing of tokenizers or devices. Guarantees:
`unpack(pack(texts)) == texts`.
"""

from collections.abc import Sequence
from typing import NamedTuple


class EncodedText(NamedTuple):
    """The token ids of one text, or of a pair of texts."""

    ids: tuple[int, ...]
    num_first: int
    """The number of tokens of the first part of a pair, by token types; all tokens of a text."""
    num_cut: int = 0
    """The number of tokens that the request or the model's files asked to cut."""


_NUM_FACTS = 3


def whole_text(ids: Sequence[int]) -> EncodedText:
    """Make the text of token ids that are not a pair."""
    return EncodedText(tuple(ids), len(ids))


def pack(texts: Sequence[EncodedText]) -> list[int]:
    """Pack texts into one list of integers, which `unpack` reads."""
    facts = [fact for text in texts for fact in (len(text.ids), text.num_first, text.num_cut)]
    return [len(texts), *facts, *(token for text in texts for token in text.ids)]


def unpack(packed: Sequence[int]) -> list[EncodedText]:
    """The texts in a list that `pack` returned."""
    texts, start = [], 1 + _NUM_FACTS * packed[0]
    for first in range(1, start, _NUM_FACTS):
        length, num_first, num_cut = packed[first : first + _NUM_FACTS]
        texts.append(EncodedText(tuple(packed[start : start + length]), num_first, num_cut))
        start += length
    return texts


def lengths_of(packed: Sequence[int]) -> tuple[int, ...]:
    """The number of tokens of each text in a list that `pack` returned."""
    return tuple(packed[1 : 1 + _NUM_FACTS * packed[0] : _NUM_FACTS])


def cuts_of(packed: Sequence[int]) -> tuple[int, ...]:
    """The number of tokens that were cut from each text in a list that `pack` returned."""
    return tuple(packed[_NUM_FACTS : 1 + _NUM_FACTS * packed[0] : _NUM_FACTS])
