"""The texts of one embedding request as token ids, and their form as one list of integers.

The batch job keeps, compares and hashes the token ids of a row as one list. So the texts of a row
are packed into a list: their number, the length and the first part of each, then all ids. Knows
nothing of tokenizers or devices. Guarantees: `unpack(pack(texts)) == texts`.
"""

from collections.abc import Sequence
from typing import NamedTuple


class EncodedText(NamedTuple):
    """The token ids of one text, or of a pair of texts."""

    ids: tuple[int, ...]
    num_first: int
    """The number of tokens of the first part of a pair, by token types; all tokens of a text."""


def whole_text(ids: Sequence[int]) -> EncodedText:
    """Make the text of token ids that are not a pair."""
    return EncodedText(tuple(ids), len(ids))


def pack(texts: Sequence[EncodedText]) -> list[int]:
    """Pack texts into one list of integers, which `unpack` reads."""
    facts = [fact for text in texts for fact in (len(text.ids), text.num_first)]
    return [len(texts), *facts, *(token for text in texts for token in text.ids)]


def unpack(packed: Sequence[int]) -> list[EncodedText]:
    """The texts in a list that `pack` returned."""
    texts, start = [], 1 + 2 * packed[0]
    for index in range(packed[0]):
        length, num_first = packed[1 + 2 * index : 3 + 2 * index]
        texts.append(EncodedText(tuple(packed[start : start + length]), num_first))
        start += length
    return texts


def lengths_of(packed: Sequence[int]) -> tuple[int, ...]:
    """The number of tokens of each text in a list that `pack` returned."""
    return tuple(packed[1 : 1 + 2 * packed[0] : 2])
